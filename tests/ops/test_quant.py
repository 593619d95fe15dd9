"""MXFP4: every byte, every scale byte, rounding, and refusals."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3port.ops.quant import (
    E2M1_MAGNITUDES,
    GROUP_SIZE,
    Mxfp4Tensor,
    dequantize_mxfp4,
    quantize_mxfp4,
    scale_values,
)

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
VALUES = [*MAGNITUDES, *(-m for m in MAGNITUDES)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def row(*bytes_: int) -> torch.Tensor:
    """One group: the given bytes, then zeros."""
    return torch.tensor([[*bytes_, *([0] * (16 - len(bytes_)))]], dtype=torch.uint8)


def scale(*bytes_: int) -> torch.Tensor:
    return torch.tensor([list(bytes_)], dtype=torch.uint8)


def test_layout_constants() -> None:
    assert list(E2M1_MAGNITUDES) == MAGNITUDES
    assert GROUP_SIZE == 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_256_bytes(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    value = dequantize_mxfp4(packed, torch.full((16, 1), 127, dtype=torch.uint8), dtype)
    assert value.dtype == dtype
    expected = [VALUES[nibble] for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    assert value.flatten().tolist() == expected
    # -0 is not 0: the sign bit survives.
    assert [math.copysign(1, x) for x in value.flatten().tolist()] == [math.copysign(1, x) for x in expected]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_scale_byte(dtype: torch.dtype) -> None:
    values = scale_values(torch.arange(256, dtype=torch.uint8), dtype)
    assert values[:255].double().tolist() == [math.ldexp(1, s - 127) for s in range(255)]
    assert math.isnan(values[255])


def test_scale_bytes_0_1_254_255() -> None:
    value = dequantize_mxfp4(row(0x21).expand(4, 16), scale(0, 1, 254, 255).T)
    assert value[0, :2].tolist() == [2.0**-128, 2.0**-127], "subnormal in float32, not zero"
    assert value[1, :2].tolist() == [2.0**-127, 2.0**-126]
    assert value[2, :2].tolist() == [2.0**126, 2.0**127]
    assert value[3].isnan().all(), "zeros too: zero times NaN"
    # 3 x 2^127 exists in float64 only.
    big = dequantize_mxfp4(row(0x75), scale(254), torch.float64)
    assert big[0, :2].tolist() == [3 * 2.0**127, 6 * 2.0**127]
    assert dequantize_mxfp4(row(0x75), scale(254))[0, :2].tolist() == [math.inf, math.inf]


def test_scales_belong_to_their_groups() -> None:
    packed = torch.full((2, 48), 0x22, dtype=torch.uint8)
    scales = torch.tensor([[127, 128, 129], [126, 125, 124]], dtype=torch.uint8)
    value = dequantize_mxfp4(packed, scales)
    assert value.shape == (2, 96)
    assert value[:, ::32].tolist() == [[1, 2, 4], [0.5, 0.25, 0.125]]
    assert value[:, 31::32].tolist() == [[1, 2, 4], [0.5, 0.25, 0.125]]
    tensor = Mxfp4Tensor(packed, scales)
    assert (tensor.shape, tensor.nbytes) == ((2, 96), 2 * 48 + 6)
    assert torch.equal(tensor.dequantize(torch.float64), value.double())


def test_more_dimensions() -> None:
    packed = torch.randint(0, 256, (3, 4, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales = torch.randint(120, 130, (3, 4, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    value = dequantize_mxfp4(packed, scales)
    assert value.shape == (3, 4, 64)
    assert torch.equal(value[1, 2], dequantize_mxfp4(packed[1, 2:3], scales[1, 2:3])[0])


@pytest.mark.parametrize(
    ("packed", "scales"),
    [((2, 16), (2, 2)), ((2, 16), (1, 1)), ((2, 16), (2,)), ((2, 17), (2, 1)), ((2, 8), (2, 1)), ((2, 32), (2, 1))],
)
def test_shapes_that_do_not_fit(packed: tuple[int, ...], scales: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit packed"):
        dequantize_mxfp4(torch.zeros(packed, dtype=torch.uint8), torch.zeros(scales, dtype=torch.uint8))


def test_round_trip_is_exact_for_mxfp4_numbers() -> None:
    gen = torch.Generator().manual_seed(3)
    packed = torch.randint(0, 256, (64, 48), dtype=torch.uint8, generator=gen)
    # Magnitude 6 in every group pins the scale; without it the same numbers have several encodings.
    packed[:, ::16] = (packed[:, ::16] & 0xF0) | 0x7
    scales = torch.randint(1, 250, (64, 3), dtype=torch.uint8, generator=gen)
    again = quantize_mxfp4(dequantize_mxfp4(packed, scales, torch.float64))
    assert torch.equal(again.packed, packed)
    assert torch.equal(again.scale, scales)


def encode(*numbers: float) -> list[float]:
    """Through MXFP4 at scale 1: a 4 in the group keeps the exponent at 0."""
    group = torch.zeros(1, 32, dtype=torch.float64)
    group[0, : len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    group[0, 31] = 4.0
    quantised = quantize_mxfp4(group)
    assert quantised.scale.tolist() == [[127]]
    return quantised.dequantize(torch.float64)[0, : len(numbers)].tolist()


def test_ties_take_the_even_code() -> None:
    # Middles between neighbours, and the neighbour whose code is even: 0, 1, 2, 4 and so on.
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert encode(*middles) == even
    assert encode(*(-m for m in middles)) == [-e for e in even]


@pytest.mark.parametrize("step", [1e-9, 1e-3])
def test_beside_a_tie_the_nearer_number_wins(step: float) -> None:
    for low, high in zip(MAGNITUDES, MAGNITUDES[1:], strict=False):
        middle = (low + high) / 2
        assert encode(middle - step, middle + step) == [low, high]


def test_scale_puts_the_largest_in_4_to_8_and_saturates_above_6() -> None:
    for largest, byte, stored in (
        (4.0, 127, 4.0), (7.99, 127, 6.0), (8.0, 128, 8.0), (3.99, 126, 3.0), (1.0, 125, 1.0), (0.1, 121, 0.09375),
        (6.5, 127, 6.0), (2.0**-130, 0, 0.0), (2.0**-127, 0, 2.0**-127),
    ):  # fmt: skip
        group = torch.zeros(1, 32, dtype=torch.float64)
        group[0, 5] = -largest
        result = quantize_mxfp4(group)
        assert result.scale.item() == byte, largest
        assert result.dequantize(torch.float64)[0, 5].item() == -stored, largest
    zeros = quantize_mxfp4(torch.zeros(2, 64))
    assert not zeros.scale.any()
    assert not zeros.packed.any()


@pytest.mark.parametrize("columns", [1, 31, 33, 48])
def test_quantising_needs_whole_groups(columns: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of 32 columns, got {columns}"):
        quantize_mxfp4(torch.zeros(2, columns))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_quantising_refuses_what_is_not_finite(bad: float) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 7] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize_mxfp4(weight)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(-100, 100))
def test_error_is_at_most_a_half_step(seed: int, exponent: int) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2.0**exponent
    result = quantize_mxfp4(weight)
    value = result.dequantize(torch.float64)
    unit = scale_values(result.scale, torch.float64).repeat_interleave(32, dim=-1)
    error = (value - weight).abs() / unit
    # Steps of 0.5 below 2, of 1 below 4, of 2 above; beyond 6 everything saturates.
    size = weight.abs() / unit
    allowed = torch.where(size < 2, 0.25, torch.where(size < 4, 0.5, 1.0))
    assert (error <= torch.where(size > 6, size - 6, allowed) + 1e-12).all()
    assert (torch.signbit(value) == torch.signbit(weight)).all()


def test_b60_nibble_order_and_scale_decoding() -> None:
    """ggml-org/llama.cpp#17083: the even element is in the low nibble; 255 is NaN; 33 columns are an error."""
    assert dequantize_mxfp4(row(0x21), scale(127))[0, :2].tolist() == [0.5, 1.0]
    assert dequantize_mxfp4(row(0x9F), scale(127))[0, :2].tolist() == [-6.0, -0.5]
    assert dequantize_mxfp4(row(0x21), scale(128))[0, :2].tolist() == [1.0, 2.0]
    assert dequantize_mxfp4(row(0x21), scale(0))[0, 1].item() == 2.0**-127
    assert dequantize_mxfp4(row(0x21), scale(255)).isnan().all()
    packed = quantize_mxfp4(torch.tensor([[0.5, 1.0, *([0.0] * 29), 4.0]]))
    assert packed.packed[0, 0].item() == 0x21
    with pytest.raises(ValueError, match="got 33"):
        quantize_mxfp4(torch.zeros(1, 33))
    with pytest.raises(ValueError, match="does not fit"):
        dequantize_mxfp4(torch.zeros(1, 17, dtype=torch.uint8), scale(127))
