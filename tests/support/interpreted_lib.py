"""Prints, as JSON, how the interpreted device functions of ``kernels/lib.py`` differ from torch."""

from __future__ import annotations

import json

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels import lib


@triton.jit
def cast_kernel(x_ptr, y_ptr, N: tl.constexpr, OWN: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = lib.cast(x, dtype) if OWN else x.to(dtype)
    tl.store(y_ptr + i, y)


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, OWN: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    c = lib.dot(a, b) if OWN else tl.dot(a, b)
    tl.store(c_ptr + at, c)


@triton.jit
def function_kernel(x_ptr, y_ptr, N: tl.constexpr, NAME: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    if NAME == "sigmoid":
        y = lib.sigmoid(x)
    elif NAME == "softplus":
        y = lib.softplus(x)
    elif NAME == "silu":
        y = lib.gated(x, x)
    else:
        numerator, e = lib.capped(x, 1.0, 1.0, FINE=NAME == "capped")
        y = lib.divide(numerator, 1.0 + e)
    tl.store(y_ptr + i, y)


def wrong_bits(x: torch.Tensor, dtype: torch.dtype, own: bool) -> int:
    y = torch.empty(x.shape, dtype=dtype)
    cast_kernel[(1,)](x, y, N=x.numel(), OWN=own)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    different = y.view(bits) != x.to(dtype).view(bits)
    return int((different & ~(y.isnan() & x.isnan())).sum())


def dot_error(dtype: torch.dtype, own: bool) -> float:
    gen = torch.Generator().manual_seed(1)
    a, b = (torch.randn(16, 16, generator=gen).to(dtype) for _ in range(2))
    c, wanted = torch.empty(16, 16), a.double() @ b.double()
    dot_kernel[(1,)](a, b, c, OWN=own)
    return float((c - wanted).norm() / wanted.norm())


def numbers() -> torch.Tensor:
    """4096 float32 bit patterns of all exponents, and those at which rounding is decided."""
    gen = torch.Generator().manual_seed(2)
    random = (
        torch.randint(-(2**31), 2**31, (4064,), generator=gen, dtype=torch.int64).to(torch.int32).view(torch.float32)
    )
    halfway = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 1])
    halfway = torch.cat((halfway, halfway - 2**31, torch.arange(16) * 0x10001)).to(torch.int32).view(torch.float32)
    return torch.cat((random, halfway))


def main() -> None:
    x, found = numbers(), {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        found[f"cast {name}: wrong bits"] = wrong_bits(x, dtype, True)
        found[f"dot {name}: relative RMS"] = dot_error(dtype, True)
    found["plain bfloat16: wrong bits"] = wrong_bits(x, torch.bfloat16, False)
    found["plain dot bfloat16: relative RMS"] = dot_error(torch.bfloat16, False)
    grid = torch.cat((torch.logspace(-30, 1.9, 2045), torch.tensor([0.0, 1e4, torch.inf])))
    points = torch.cat((grid, -grid))
    functions = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "softplus": torch.nn.functional.softplus}
    functions |= dict.fromkeys(("capped", "coarsely capped"), torch.tanh)
    for name, function in functions.items():
        y, wanted = torch.empty_like(points), function(points.double())
        function_kernel[(1,)](points, y, N=points.numel(), NAME=name)
        # The exponent of a number far below zero carries its rounding into the result.
        inner = (points > -8) & (points.abs() > 0) & wanted.isfinite()
        error = ((y - wanted) / wanted)[inner].abs().max()
        found[f"{name}: largest relative error"] = float(error)
        # Infinity times nothing is NaN for SiLU.
        ends = (points.abs() >= 1e4) & wanted.isfinite()
        found[f"{name}: ends"] = float((y.double() - wanted)[ends].abs().max())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
