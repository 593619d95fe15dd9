"""Device functions that several kernels share, with the traps of Triton's interpreter handled here and nowhere else."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

# The interpreter multiplies bfloat16 bits as if they were integers: its operands are converted first.
INTERPRETED: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
IEEE: tl.constexpr = tl.constexpr("ieee")
"""Triton 3.6 takes a plain string for a default of a device function as a value, not as a constant."""
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def cast(x, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 to another float type, rounded to nearest even, NaN kept.

    Every rounding of a kernel goes through here: the interpreter cuts the low bits off when it makes bfloat16, which
    doubles the error, and gets subnormal numbers wrong.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        high = tl.where(x != x, (bits >> 16) | 0x40, high)
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc=None, precision: tl.constexpr = IEEE):  # type: ignore[no-untyped-def]
    """``a @ b (+ acc)`` with float32 sums. ``precision`` counts for float32 operands only."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=precision, out_dtype=tl.float32)


@triton.jit
def exp2(x):  # type: ignore[no-untyped-def]
    """float32 ``2^x``; results below the smallest normal number may become zero.

    ``tl.exp2`` keeps those, which costs three more instructions each time.
    """
    if INTERPRETED:
        return tl.exp2(x)
    return libdevice.exp2(x)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """float32 ``1 / (1 + exp(-x))`` through exp2; -inf and inf give 0 and 1."""
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """float32 tanh, accurate near zero, where ``1 - 2 / (exp(2x) + 1)`` would cancel."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    large = (1.0 - e) / (1.0 + e)
    s = x * x
    small = x * (1.0 + s * (-0.33333333333 + s * (0.13333333333 + s * (-0.053968253968 + s * 0.021869488536))))
    return tl.where(s < 0.04, small, tl.where(x < 0, -large, large))
