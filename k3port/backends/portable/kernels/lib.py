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
def rounded(x):  # type: ignore[no-untyped-def]
    """``x`` itself, as a number of its own: a product is not fused into the sum that follows.

    In a sum across lanes each of two lanes would fuse its own product and get other last bits than its neighbour, where
    both are to hold the same sum.
    """
    return tl.where(x < 0.0, x, tl.abs(x))


@triton.jit
def exp2(x):  # type: ignore[no-untyped-def]
    """float32 ``2^x``; results below the smallest normal number may become zero.

    ``tl.exp2`` keeps those, which costs three more instructions each time.
    """
    if INTERPRETED:
        return tl.exp2(x)
    return libdevice.exp2(x)


@triton.jit
def exp(x):  # type: ignore[no-untyped-def]
    """float32 ``e^x`` as ``2^(x * log2(e))``, rounded between; results below the smallest normal number may be zero.

    On AMD five instructions fewer than :func:`exp2` of the product, on NVIDIA the same.
    """
    if INTERPRETED:
        return tl.exp(x)
    return libdevice.fast_expf(x)


@triton.jit
def divide(x, y):  # type: ignore[no-untyped-def]
    """float32 ``x / y`` through the hardware's reciprocal, within two units in the last place.

    For ``|y|`` from the smallest normal number to 2^126; beyond that a finite ``x`` gives 0, as it does for infinite
    ``y``. A result below the smallest normal number may become zero. An ordinary division costs about four more
    instructions on NVIDIA, nine on AMD.
    """
    if INTERPRETED:
        return x / y
    return libdevice.fast_dividef(x, y)


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """float32 ``1 / (1 + exp(-x))``; -inf and inf give 0 and 1, below about -87 the result is 0."""
    # Triton 3.6 subtracts from zero for -x; a product joins the one inside exp.
    return divide(1.0, 1.0 + exp(x * -1.0))


@triton.jit
def gated(y, x):  # type: ignore[no-untyped-def]
    """float32 ``y * sigmoid(x)``, one instruction less than the product; ``gated(x, x)`` is SiLU."""
    return divide(y, 1.0 + exp(x * -1.0))


@triton.jit
def norm_gated(y, gate, weight, eps, D: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMSNorm over the last axis, of which ``D`` numbers are not padding, times ``sigmoid(gate)``, in ``dtype``."""
    square = tl.sum(rounded(y * y), axis=len(y.shape) - 1, keep_dims=True)
    return cast(gated(y * tl.rsqrt(square / D + eps) * weight, gate), dtype)


@triton.jit
def softplus(z):  # type: ignore[no-untyped-def]
    """float32 ``log(1 + exp(z))``, from 20 on ``z`` itself.

    ``max(z, 0) + log(1 + e)`` with ``e = exp(-|z|)``, and the logarithm as ``2 atanh(e / (2 + e))``, whose series has
    an argument of at most 1/3: small results keep their relative accuracy, which the hardware's logarithm near 1 has
    not.
    """
    e = exp2(tl.abs(z) * -LOG2E)
    s = e / (2.0 + e)
    q = s * s
    # Doubled coefficients, not a product with 2: the compiler for gfx9 pairs that product with the sum beside it into a
    # packed instruction whose inline constant counts for the lower half only (seen in emulation, Triton 3.9).
    log = s * (
        2.0
        + q
        * (0.6666666667 + q * (0.4 + q * (0.2857142857 + q * (0.2222222222 + q * (0.1818181818 + q * 0.1538461538)))))
    )
    return tl.where(z > 20.0, z, tl.maximum(z, 0.0) + log)


@triton.jit
def capped(x, cap, inverse_cap, FINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``cap * tanh(x / cap)`` in float32 as a numerator and the ``e`` of its denominator ``1 + e``.

    With ``e = exp(-2 |x / cap|)`` the tanh is ``(1 - e) / (1 + e)``, so that a product of several such terms takes one
    reciprocal. Near zero, where ``1 - e`` cancels, the numerator is the series times ``1 + e``. ``e`` lies between 0
    and 1; NaN stays NaN in both.

    Args:
        cap, inverse_cap: scalars; ``inverse_cap`` is ``1 / cap``, rounded once.
        FINE: for float32 results: the largest relative error is below 1e-6. Otherwise it is 2e-5, a tenth of what
            rounding to float16 costs.
    """
    e = exp2(tl.abs(x) * (inverse_cap * (-2.0 * LOG2E)))
    # The sign bit alone: a comparison and a selection would be one instruction more.
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    # The interpreter hands scalars over as Python's numbers.
    signed_cap = (tl.cast(cap, tl.float32).to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    far = signed_cap - signed_cap * e
    near = x + x * e
    if FINE:
        s = x * inverse_cap
        s = s * s
        near *= 1.0 + s * (-0.33333333333 + s * (0.13333333333 + s * (-0.053968253968 + s * 0.021869488536)))
        return tl.where(s < 0.04, near, far), e
    return tl.where(tl.abs(x) < cap * 0.0078125, near, far), e
