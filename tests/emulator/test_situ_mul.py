"""SiTU and SwiGLU as AMD machine code in emulation: single numbers, where an RMS over a tensor sees nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so there is no machine code to execute")

import torch

from k3port.backends.portable.kernels.situ_mul import situ_mul
from k3port.backends.portable.launch import pretend_arch
from k3port.ops import activation
from k3port.testing.amd_isa import emulate

CAPS = [(4.0, 25.0), (1.0, 25.0), (4.0, None), (None, None)]
# Half of the last bit by the rounding, and little else: two caps of 2e-5.
LARGEST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8 + 5e-5, torch.float16: 2.0**-11 + 5e-5}


def emulated(x: torch.Tensor, beta: float | None, linear_beta: float | None, arch: str = "gfx942") -> torch.Tensor:
    with pretend_arch(arch), emulate(arch):
        return situ_mul(x, beta, linear_beta)


@pytest.mark.parametrize(("beta", "linear_beta"), CAPS)
@pytest.mark.parametrize("dtype", LARGEST_ERROR, ids=str)
def test_every_number_is_accurate_down_to_where_the_caps_are_straight_lines(
    dtype: torch.dtype, beta: float | None, linear_beta: float | None
) -> None:
    gen = torch.Generator().manual_seed(4)
    low, high = (-1.5, 1.5) if dtype == torch.float16 else (-8.0, 1.0)
    size = 10 ** (torch.rand(8, 256, generator=gen) * (high - low) + low)
    x = (size * torch.randint(0, 2, size.shape, generator=gen).mul(2).sub(1)).to(dtype)
    # The exponent of a gate far below zero carries its rounding into the result.
    x[:, :128] = x[:, :128].clamp(min=-8)
    wanted = activation.situ_mul(x.double(), beta, linear_beta)
    error = (emulated(x, beta, linear_beta).double() / wanted - 1).abs()
    # Subnormal numbers have fewer bits.
    normal = wanted.abs() >= torch.finfo(dtype).tiny
    assert int(normal.sum()) > 900
    assert float(error[normal].max()) < LARGEST_ERROR[dtype]


@pytest.mark.parametrize(("beta", "linear_beta"), CAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_and_infinities_are_where_the_reference_has_them(
    dtype: torch.dtype, beta: float | None, linear_beta: float | None
) -> None:
    # Gates of -70: further down the reference has subnormal numbers, which the kernel may make zero.
    line = torch.tensor([torch.nan, -torch.inf, torch.inf, -70.0, -1.0, -0.0, 0.0, 1.0, 3e38])
    a, b = torch.meshgrid(line, line, indexing="ij")
    x = torch.stack((a.flatten(), b.flatten()), dim=1).to(dtype)
    wanted, y = activation.situ_mul(x, beta, linear_beta), emulated(x, beta, linear_beta)
    assert torch.equal(y.isnan(), wanted.isnan())
    assert torch.equal(y.isinf(), wanted.isinf())
    kept = ~wanted.isnan()
    assert torch.equal(y.signbit()[kept], wanted.signbit()[kept])
    torch.testing.assert_close(y[kept], wanted[kept], rtol=1e-2 if dtype == torch.bfloat16 else 2e-5, atol=1e-30)


def test_a_gate_far_below_zero_gives_zero() -> None:
    """Its sigmoid's denominator is infinite there: no NaN, whatever the linear branch is."""
    a, b = torch.full((8,), -3e38), torch.tensor([-3e38, -1e4, -1.0, -1e-30, 0.0, 1.0, 1e4, 3e38])
    for beta, linear_beta in CAPS:
        y = emulated(torch.stack((a, b), dim=1), beta, linear_beta)
        assert torch.equal(y, torch.zeros(8, 1)), (beta, linear_beta, y)
