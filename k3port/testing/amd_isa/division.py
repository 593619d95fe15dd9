"""The steps of the division sequence: div_scale, div_fmas, div_fixup (CDNA3 ISA, VOP3B and VOP3).

f32 follows the pseudo-code of the ISA document. f64 does not scale: the sequence then computes the quotient without the
protection for extreme exponents, and div_fixup returns the quotient itself.
"""

from __future__ import annotations

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import VCC, Array, Step, bc, f32, f64, int2mask, mask2int
from k3port.testing.amd_isa.fused64 import fma64
from k3port.testing.amd_isa.operands import put_wide, reader
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.valu import Table
from k3port.testing.amd_isa.wave import Wave

table = Table()
_TINY = 2.0**-126
_ORDINARY = f32(2.0**-40), f32(2.0**40)
"""Operands of these magnitudes need no scaling: 1/d and n/d stay above 2**-80, exponents differ by at most 80."""


def _fixup(q: Array, d: Array, n: Array) -> Array:
    """The quotient as computed, except in the special and extreme ranges, where the exact quotient is returned."""
    e = (n.astype(f64) / d).astype(f32)
    exact = e.astype(f64)
    size = np.abs(exact)
    normal = (size > 1e-30) & (size < 1e30)
    near = np.abs(q - exact) <= 2e-7 * size
    return np.where(normal & ~near, q, e)


table("v_div_fixup_f32", "f32", "f32 f32 f32", _fixup)
table("v_div_fixup_f64", "f64", "f64 f64 f64", lambda q, d, n: n / d)


def _ordinary(v: Array) -> Array:
    size = np.abs(v)
    return (size >= _ORDINARY[0]) & (size <= _ORDINARY[1])


def _biased_exponent(v: Array) -> Array:
    return np.frexp(np.where(np.isfinite(v), v, 1.0))[1] + 126


def _div_scale_f32(target: Target, inst: Instruction) -> Step:
    o = inst.ops
    dst, flag = o[0].index, o[1].index
    value, denominator, numerator = (reader(x, "f32") for x in o[2:5])

    def step(w: Wave) -> None:
        x, y, z = value(w), denominator(w), numerator(w)
        if (_ordinary(y) & _ordinary(z) | ~w.exm).all():
            w.w64(flag, 0)
            w.put(dst, x)
            return
        a, den, num = (bc(v).astype(f64) for v in (x, y, z))
        small_rcp, small_q = np.abs(1 / den) < _TINY, np.abs(num / den) < _TINY
        up, down = np.ldexp(a, 64), np.ldexp(a, -64)
        up_den, up_num = np.where(a == den, up, a), np.where(a == num, up, a)
        cases = [
            ((den == 0) | (num == 0), np.full(64, np.nan), 0),
            (_biased_exponent(num) - _biased_exponent(den) >= 96, up_den, 1),
            (np.abs(den) < _TINY, up, 0),
            (small_rcp & small_q, up_den, 1),
            (small_rcp, down, 0),
            (small_q, up_num, 1),
            (_biased_exponent(num) <= 23, up, 0),
        ]
        r = np.select([c for c, _, _ in cases], [v for _, v, _ in cases], a)
        scaled = np.select([c for c, _, _ in cases], [np.full(64, v) for _, _, v in cases], 0)
        w.w64(flag, mask2int(scaled.astype(bool) & w.exm))
        w.put(dst, r.astype(f32))

    return step


def _div_fmas_f32(target: Target, inst: Instruction) -> Step:
    dst = inst.ops[0].index
    readers = [reader(x, "f32") for x in inst.ops[1:4]]

    def step(w: Wave) -> None:
        a, b, c = (bc(get(w)) for get in readers)
        x = a.astype(f64) * b + c
        if vcc := w.r64(VCC):
            scale = np.where(np.abs(c) >= 2.0, 2.0**64, 2.0**-64)
            x = np.where(int2mask(vcc), x * scale, x)
        w.put(dst, x.astype(f32))

    return step


def _div_scale_f64(target: Target, inst: Instruction) -> Step:
    o = inst.ops
    dst, flag, get = o[0].index, o[1].index, reader(o[2], "f64")

    def step(w: Wave) -> None:
        w.w64(flag, 0)
        put_wide(w, dst, bc(get(w)), "f64")

    return step


def _div_fmas_f64(target: Target, inst: Instruction) -> Step:
    dst, readers = inst.ops[0].index, [reader(x, "f64") for x in inst.ops[1:4]]

    def step(w: Wave) -> None:
        a, b, c = (bc(get(w)) for get in readers)
        put_wide(w, dst, fma64(a, b, c), "f64")

    return step


_SEQUENCE: dict[str, Builder] = {
    "v_div_scale_f32": _div_scale_f32,
    "v_div_fmas_f32": _div_fmas_f32,
    "v_div_scale_f64": _div_scale_f64,
    "v_div_fmas_f64": _div_fmas_f64,
}
FAMILY = Family("division", {**table.opcodes(), **_SEQUENCE})
