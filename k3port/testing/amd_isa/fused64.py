"""Fused multiply-add of f64, rounded once.

Error-free product and sums, the last of them rounded to odd, so that the final addition rounds as if from the exact
value (S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd").
Where a product, a sum or their errors leave the range of normal numbers, exact fractions do it.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from k3port.testing.amd_isa.core import Array, f64, i64

_SPLIT = f64(2**27 + 1)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """(sum, its error)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """(product, its error)."""
    p = a * b
    x, y = a * _SPLIT, b * _SPLIT
    ah, bh = x - (x - a), y - (y - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _odd_sum(a: Array, b: Array) -> Array:
    """The sum; if it is not exact, that of the two neighbours whose last bit is set."""
    s, error = _two_sum(a, b)
    even = (np.ascontiguousarray(s).view(i64) & 1) == 0
    return np.where((error != 0) & even, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)


def _exact(a: float, b: float, c: float, zero: float) -> float:
    x = Fraction(a) * Fraction(b) + Fraction(c)
    if x == 0:
        return zero
    try:
        return float(x)
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


def fma64(a: Array, b: Array, c: Array) -> Array:
    """f64 numbers -> a * b + c with one rounding."""
    with np.errstate(all="ignore"):
        return _fused(a, b, c)


def _fused(a: Array, b: Array, c: Array) -> Array:
    a, b, c = np.broadcast_arrays(np.asarray(a, f64), np.asarray(b, f64), np.asarray(c, f64))
    plain = np.where(np.isfinite(a) & np.isfinite(b) & np.isinf(c), c, a * b + c)
    high, low = _two_product(a, b)
    middle, rest = _two_sum(c, low)
    top, error = _two_sum(high, middle)
    r = np.asarray(top + _odd_sum(rest, error))
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    r = np.where(finite & (r != 0), r, plain)  # infinities, NaN and the sign of a zero follow the plain formula
    size = [np.abs(x) for x in (a, b, c, high)]
    safe = np.all([((s > 1e-140) | (s == 0)) & (s < 1e150) for s in size], 0) & ((high != 0) | (a == 0) | (b == 0))
    for k in np.argwhere(finite & ~safe):
        i = tuple(k)
        r[i] = _exact(float(a[i]), float(b[i]), float(c[i]), float(plain[i]))
    return r
