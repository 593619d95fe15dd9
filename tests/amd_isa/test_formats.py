"""Number formats against torch and against the lists of the OCP specification."""

from __future__ import annotations

import amd_needs  # noqa: F401
import numpy as np
import pytest
import torch

from k3port.testing.amd_isa.formats import (
    BF6,
    BF8_FNUZ,
    BF8_OCP,
    FP4,
    FP6,
    FP8_FNUZ,
    FP8_OCP,
    MiniFloat,
    bf16_to_f32,
    f32_to_bf16,
    f32_to_f16_rtz,
)  # fmt: skip

TORCH = [
    (FP8_OCP, torch.float8_e4m3fn), (BF8_OCP, torch.float8_e5m2), (FP8_FNUZ, torch.float8_e4m3fnuz),
    (BF8_FNUZ, torch.float8_e5m2fnuz),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "dtype"), TORCH)
def test_all_codes_of_fp8(fmt: MiniFloat, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(fmt.dec(codes.numpy()), codes.view(dtype).double().numpy())


@pytest.mark.parametrize(("fmt", "dtype"), TORCH)
def test_rounding_to_fp8(fmt: MiniFloat, dtype: torch.dtype) -> None:
    largest = float(np.nanmax(fmt.table[np.isfinite(fmt.table)]))
    x = torch.cat([torch.randn(4000), torch.randn(4000) * largest / 8, torch.tensor([0.0, -0.0, 1e-9, -1e-9])])
    x = x.clamp(-largest, largest)
    # every midpoint of two neighbours too, where ties go to even
    values = np.unique(fmt.table[np.isfinite(fmt.table)])
    x = torch.cat([x, torch.from_numpy((values[1:] + values[:-1]) / 2).float()])
    np.testing.assert_array_equal(fmt.enc(x.numpy(), False), x.to(dtype).view(torch.uint8).numpy())


def test_overflow_of_fp8() -> None:
    huge = np.array([1e9, -1e9, np.nan])
    assert FP8_OCP.enc(huge).tolist() == [0x7E, 0xFE, 0x7F]
    assert FP8_OCP.enc(huge, False).tolist() == [0x7F, 0xFF, 0x7F]
    assert BF8_OCP.enc(huge, False).tolist() == [0x7C, 0xFC, 0x7F]
    assert FP8_FNUZ.enc(huge, False).tolist() == [0x80, 0x80, 0x80]


def test_fp4_and_fp6() -> None:
    assert FP4.dec(np.arange(8)).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert FP4.dec(np.arange(8, 16)).tolist() == [-0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert FP4.enc(np.array([0.25, 0.75, 2.5, 5.0, 100.0])).tolist() == [0, 2, 4, 6, 7]
    assert (FP6.dec(np.array([1, 31])).tolist(), BF6.dec(np.array([1, 31])).tolist()) == ([0.125, 7.5], [0.0625, 28.0])


def test_bf16() -> None:
    x = torch.cat([torch.randn(5000), torch.tensor([0.0, -0.0, torch.inf, 1.00390625, 1.01171875])])
    bits = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(f32_to_bf16(x.numpy()), bits)
    np.testing.assert_array_equal(bf16_to_f32(bits), x.to(torch.bfloat16).float().numpy())
    assert np.isnan(bf16_to_f32(f32_to_bf16(np.float32(np.nan))))


def test_f16_towards_zero() -> None:
    x = np.array([1 + 2**-11 + 2**-12, -(1 + 2**-11 + 2**-12), 65535.0, 0.5], np.float32)
    assert f32_to_f16_rtz(x).view(np.float16).tolist() == [1.0, -1.0, 65504.0, 0.5]
