"""Number formats: bf16, f16 with truncation, and the fp8, fp6 and fp4 formats as tables of all their values.

gfx942 has the FNUZ flavours of fp8 (no infinity, no negative zero, bias one larger), gfx950 those of the OCP
specification ("OCP 8-bit Floating Point Specification", "OCP Microscaling Formats").
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from k3port.testing.amd_isa.core import Array, f16, f32, f64, u16, u32

Kind = Literal["ieee", "fn", "fnuz", "finite"]


def bf16_to_f32(h: Array) -> Array:
    """Bits of bf16 -> f32."""
    return (np.asarray(h).astype(u32) << u32(16)).view(f32)


def f32_to_bf16(x: Array) -> Array:
    """f32 -> bits of bf16, to nearest even; a NaN stays one."""
    x = np.asarray(x, f32)
    b = x.view(u32)
    high = b >> u32(16)
    r = (b + u32(0x7FFF) + (high & u32(1))) >> u32(16)
    nan = np.isnan(x)
    return (np.where(nan, high | u32(0x40), r) if nan.any() else r).astype(u16)


def f32_to_f16_rtz(x: Array) -> Array:
    """f32 -> bits of f16, towards zero."""
    x = np.asarray(x, f32)
    with np.errstate(over="ignore"):
        h = x.astype(f16)
    over = np.abs(h.astype(f32)) > np.abs(x)
    b = h.view(u16)
    return np.where(over & ~np.isnan(x), b - u16(1), b).astype(u16)


def f16_bits(x: Array) -> Array:
    return np.asarray(x, f16).view(u16)


def pack16(lo: Array, hi: Array) -> Array:
    """Two 16-bit numbers -> one 32-bit register."""
    return np.asarray(lo).astype(u32) | (np.asarray(hi).astype(u32) << u32(16))


def _values(ebits: int, mbits: int, bias: int, kind: Kind) -> np.ndarray:
    """The number that each code stands for."""
    n = 1 << (1 + ebits + mbits)
    out = np.zeros(n, f64)
    top_e, top_m = (1 << ebits) - 1, (1 << mbits) - 1
    for code in range(n):
        e, m = (code >> mbits) & top_e, code & top_m
        fraction = m / (1 << mbits)
        v = fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias)
        if kind == "ieee" and e == top_e:
            v = np.inf if m == 0 else np.nan
        if kind == "fn" and e == top_e and m == top_m:
            v = np.nan
        if code >> (ebits + mbits):
            v = -v
        if kind == "fnuz" and code == n >> 1:
            v = np.nan
        out[code] = v
    return out


class MiniFloat:
    """A small float format.

    Kinds: ``ieee`` has infinities and NaNs, ``fn`` one NaN per sign (all ones), ``fnuz`` one NaN (the code of negative
    zero), ``finite`` neither.
    """

    def __init__(self, ebits: int, mbits: int, bias: int, kind: Kind, nan: int):
        self.table = _values(ebits, mbits, bias, kind)
        self.half = len(self.table) // 2
        positive = self.table[: self.half]
        self._codes = np.flatnonzero(np.isfinite(positive))
        self._values = positive[self._codes]
        self.nan, self.kind = nan, kind

    def dec(self, code: Array) -> np.ndarray:
        """Codes -> f64."""
        return self.table[np.asarray(code).astype(np.intp)]

    def enc(self, x: Array, sat: bool = True) -> np.ndarray:
        """f64 -> codes (u32), to nearest even. What is too large saturates, or becomes infinity or NaN."""
        x = np.asarray(x, f64)
        a = np.abs(x)
        k = np.clip(np.searchsorted(self._values, a), 1, len(self._values) - 1)
        lo, hi = self._values[k - 1], self._values[k]
        mid = (lo + hi) / 2
        index = np.where(a < mid, k - 1, np.where(a > mid, k, np.where((k - 1) % 2 == 0, k - 1, k)))
        overflow = a >= self._values[-1] + (self._values[-1] - self._values[-2]) / 2
        r = self._codes[index]
        if not sat:
            r = np.where(overflow, 0x7C if self.kind == "ieee" else self.nan & (self.half - 1), r)
        r = np.where(np.signbit(x) & ((r != 0) | (self.kind != "fnuz")), r | self.half, r)
        r = np.where(np.isnan(x), self.nan, r)
        if not sat and self.kind == "fnuz":
            r = np.where(overflow, self.nan, r)
        return r.astype(u32)


FP8_OCP, BF8_OCP = MiniFloat(4, 3, 7, "fn", 0x7F), MiniFloat(5, 2, 15, "ieee", 0x7F)
FP8_FNUZ, BF8_FNUZ = MiniFloat(4, 3, 8, "fnuz", 0x80), MiniFloat(5, 2, 16, "fnuz", 0x80)
FP6, BF6, FP4 = MiniFloat(2, 3, 1, "finite", 0), MiniFloat(3, 2, 3, "finite", 0), MiniFloat(2, 1, 1, "finite", 0)
