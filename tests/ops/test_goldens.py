"""Published operator goldens and hand-computed ones, on every kernel that runs here."""

from __future__ import annotations

import math

import pytest
import torch
from builtin_kernels import KERNELS, dtype_name, runnable
from op_goldens import CHECKS

from k3port.model.config_file import parse_config
from k3port.ops.activation import situ_mul
from k3port.ops.quant import dequantize_mxfp4
from k3port.oracle.spec import KernelSpec
from k3port.testing.harness import build_kernel
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config

CASES = [
    (name, spec, dtype)
    for name, (op, phase, _) in CHECKS.items()
    for dtype in (torch.float64, torch.float32)
    for spec in runnable(op, phase, dtype)
]


@pytest.mark.parametrize(("name", "spec", "dtype"), CASES, ids=[f"{n}-{s.name}-{dtype_name(d)}" for n, s, d in CASES])
def test_golden(name: str, spec: KernelSpec, dtype: torch.dtype) -> None:
    _, phase, check = CHECKS[name]
    check(build_kernel(spec, KERNELS, phase), dtype)


def test_every_op_with_arithmetic_has_a_golden() -> None:
    assert {op for op, _, _ in CHECKS.values()} == {
        "situ_mul", "kda_core", "kda", "attn_res", "moe_route", "short_conv", "rms_norm", "gated_norm", "mla", "sample",
    }  # fmt: skip
    reached = {spec.name for _, spec, _ in CASES}
    cpu = {"cpu.kda_core_chunk", "cpu.kda_core_step", "cpu.short_conv_chunk", "cpu.short_conv_step", "cpu.rms_norm"}
    assert cpu | {"cpu.attn_res", "reference.mla_absorbed", "reference.kda"} <= reached


@pytest.mark.parametrize(
    ("byte", "low", "high"),
    [(0x21, 0.125, 0.25), (0x98, -0.0, -0.125), (0x7F, -1.5, 1.5), (0xA5, 0.75, -0.25)],
)
def test_mxfp4_bytes(byte: int, low: float, high: float) -> None:
    packed = torch.full((1, 16), byte, dtype=torch.uint8)
    value = dequantize_mxfp4(packed, torch.tensor([[125]], dtype=torch.uint8))
    assert value[0].tolist() == [low, high] * 16
    assert math.copysign(1, value[0, 0].item()) == math.copysign(1, low)


def test_activation_is_bounded_by_the_product_of_the_caps() -> None:
    grid = torch.linspace(-200, 200, 801, dtype=torch.float64)
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    y = situ_mul(torch.stack((a.flatten(), b.flatten()), dim=-1), 4.0, 25.0)
    assert float(y.abs().max()) <= 100.0
    assert float(y.abs().max()) > 99.99


def test_scales_and_epsilons_of_the_configurations() -> None:
    """Numbers that no golden of an op can see, because the config hands them over."""
    k3, linear = parse_config(tiny_k3_config()), parse_config(tiny_kimi_linear_config())
    assert k3.mla is not None
    assert linear.moe is not None
    assert k3.mla.scale == pytest.approx(24**-0.5, rel=1e-15)
    assert k3.mla.inner_norm_eps == 1e-6
    assert (k3.norm_eps, k3.activation.beta, k3.activation.linear_beta) == (1e-5, 4.0, 25.0)
    assert (linear.moe.scaling_factor, linear.moe.renormalize) == (2.446, True)
    published = tiny_k3_config()
    published["text_config"] |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    mla = parse_config(published).mla
    assert mla is not None
    assert mla.scale == pytest.approx(0.07216878364870322, rel=1e-15)
