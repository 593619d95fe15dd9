"""Packed instructions (VOP3P): two f16 or 16-bit integers in a register, two f32 in a pair, mixed-precision fma, dot2.

``op_sel`` and ``op_sel_hi`` choose which half of each source goes into the lower and upper result.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import NUMPY_TYPES, Array, EmuError, Reader, Step, bc, f16, f32, f64, i16, u16, u32
from k3port.testing.amd_isa.formats import pack16
from k3port.testing.amd_isa.mode import saturated16
from k3port.testing.amd_isa.operands import imm_bits, raw32, reader
from k3port.testing.amd_isa.text import Instruction, Operand
from k3port.testing.amd_isa.valu import Function
from k3port.testing.amd_isa.vector_float import fma, fma16, fmax, fmin, maximum3, minimum3
from k3port.testing.amd_isa.wave import Wave


def _add(a: Array, b: Array) -> Array:
    return a + b


def _sub(a: Array, b: Array) -> Array:
    return a - b


def _mul(a: Array, b: Array) -> Array:
    return a * b


def _mad(a: Array, b: Array, c: Array) -> Array:
    return a * b + c


_HALVES: dict[str, tuple[str, int, Function]] = {
    "v_pk_add_f16": ("f16", 2, _add),
    "v_pk_mul_f16": ("f16", 2, _mul),
    "v_pk_fma_f16": ("f16", 3, fma16),
    "v_pk_max_f16": ("f16", 2, fmax),
    "v_pk_min_f16": ("f16", 2, fmin),
    "v_pk_maximum3_f16": ("f16", 3, maximum3),
    "v_pk_minimum3_f16": ("f16", 3, minimum3),
    "v_pk_add_u16": ("u16", 2, _add),
    "v_pk_sub_u16": ("u16", 2, _sub),
    "v_pk_add_i16": ("i16", 2, _add),
    "v_pk_sub_i16": ("i16", 2, _sub),
    "v_pk_mul_lo_u16": ("u16", 2, _mul),
    "v_pk_mad_u16": ("u16", 3, _mad),
    "v_pk_mad_i16": ("i16", 3, _mad),
    "v_pk_lshlrev_b16": ("u16", 2, lambda a, b: b << (a & u16(15))),
    "v_pk_lshrrev_b16": ("u16", 2, lambda a, b: b >> (a & u16(15))),
    "v_pk_ashrrev_i16": ("i16", 2, lambda a, b: b >> (a & i16(15))),
    "v_pk_max_u16": ("u16", 2, np.maximum),
    "v_pk_min_u16": ("u16", 2, np.minimum),
    "v_pk_max_i16": ("i16", 2, np.maximum),
    "v_pk_min_i16": ("i16", 2, np.minimum),
}
_PAIRS: dict[str, tuple[int, Function]] = {
    "v_pk_add_f32": (2, _add),
    "v_pk_mul_f32": (2, _mul),
    "v_pk_fma_f32": (3, fma),
}


def _negated(get: Reader, neg: int) -> Reader:
    return (lambda w: -get(w)) if neg else get


def _clamped(x: Array) -> Array:
    """To 0..1; NaN becomes 0, as DX10_CLAMP says."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))


def _refuse_clamp(inst: Instruction) -> None:
    if "clamp" in inst.mods:
        raise EmuError("clamp")


def _selections(inst: Instruction, n: int) -> list[tuple[list[int], list[int]]]:
    """(op_sel, negation) of the lower and of the upper result."""
    return [
        (inst.bits("op_sel", n, 0), inst.bits("neg_lo", n, 0)),
        (inst.bits("op_sel_hi", n, 1), inst.bits("neg_hi", n, 0)),
    ]


def _halves(t: str, n: int, fn: Function, target: Target, inst: Instruction) -> Step:
    o, nt, clamp, dst = inst.ops, NUMPY_TYPES[t], "clamp" in inst.mods, inst.ops[0].index
    if clamp and t != "f16":
        raise EmuError("integer clamp")
    lo, hi = (
        [_negated(reader(o[1 + k], t, bool(sel[k])), neg[k]) for k in range(n)] for sel, neg in _selections(inst, n)
    )

    def step(w: Wave) -> None:
        x, y = [get(w) for get in lo], [get(w) for get in hi]
        a, b = np.asarray(fn(*x)), np.asarray(fn(*y))
        if t == "f16" and w.saturates:
            a, b = saturated16(a, x), saturated16(b, y)
        if clamp:
            a, b = _clamped(a), _clamped(b)
        w.put(dst, pack16(a.astype(nt).view(u16), b.astype(nt).view(u16)))

    return step


def _float_of_pair(o: Operand, upper: int) -> Reader:
    i = o.index + upper
    if o.kind == "v":
        return lambda w: w.VF[i]
    if o.kind == "s":
        return lambda w: u32(w.r32(i)).view(f32)
    if upper and o.value not in (0, 0.0):
        # LLVM selects the lower half of a constant for both results, and no document says what the upper one holds
        raise EmuError(f"upper half of the constant {o.text} as f32")
    c = u32(imm_bits(o.value, "u32")).view(f32)
    return lambda w: c


def _pairs(n: int, fn: Function, target: Target, inst: Instruction) -> Step:
    _refuse_clamp(inst)
    o, dst = inst.ops, inst.ops[0].index
    lo, hi = (
        [_negated(_float_of_pair(o[1 + k], sel[k]), neg[k]) for k in range(n)] for sel, neg in _selections(inst, n)
    )

    def step(w: Wave) -> None:
        a, b = fn(*[get(w) for get in lo]), fn(*[get(w) for get in hi])
        w.put(dst, a)
        w.put(dst + 1, b)

    return step


def _pk_mov(target: Target, inst: Instruction) -> Step:
    o, sel = inst.ops, inst.bits("op_sel", 2, 0)
    a, b, dst = raw32(o[1].shifted(sel[0])), raw32(o[2].shifted(sel[1])), o[0].index

    def step(w: Wave) -> None:
        x, y = np.array(a(w)), np.array(b(w))
        w.put(dst, x)
        w.put(dst + 1, y)

    return step


def _mix(part: str, target: Target, inst: Instruction) -> Step:
    """fma whose sources are f32, or the half of a register as f16 where ``op_sel_hi`` says so."""
    o, dst, clamp = inst.ops, inst.ops[0].index, "clamp" in inst.mods
    sel, half = inst.bits("op_sel", 3, 0), inst.bits("op_sel_hi", 3, 0)
    readers = [reader(o[1 + k], "f16" if half[k] else "f32", bool(half[k] and sel[k])) for k in range(3)]

    def step(w: Wave) -> None:
        a, b, c = (np.asarray(get(w)).astype(f64) for get in readers)
        x = (a * b + c).astype(f32)
        if clamp:
            x = _clamped(x)
        if part == "all":
            w.put(dst, bc(x))
            return
        half16 = x.astype(f16)
        if w.saturates:
            half16 = saturated16(half16, (a, b, c))
        h, old = bc(half16.view(u16).astype(u32)), w.V[dst]
        w.put(dst, (old & u32(0xFFFF0000)) | h if part == "lower" else (old & u32(0xFFFF)) | (h << u32(16)))

    return step


def _dot2(t: str, accumulates: bool, target: Target, inst: Instruction) -> Step:
    _refuse_clamp(inst)
    o, dst = inst.ops, inst.ops[0].index
    (lo, neg_lo), (hi, neg_hi) = _selections(inst, 2)
    al, ah = (reader(o[1], t, bool(sel[0])) for sel in (lo, hi))
    bl, bh = (reader(o[2], t, bool(sel[1])) for sel in (lo, hi))
    if any(neg_lo + neg_hi):
        raise EmuError("negated halves of dot2")
    c = reader(o[0], "f32") if accumulates else reader(o[3], "f32")

    def step(w: Wave) -> None:
        r = al(w).astype(f64) * bl(w).astype(f64) + ah(w).astype(f64) * bh(w).astype(f64) + c(w).astype(f64)
        w.put(dst, bc(r.astype(f32)))

    return step


_OPCODES: dict[str, Builder] = {
    **{name: partial(_halves, *entry) for name, entry in _HALVES.items()},
    **{name: partial(_pairs, *entry) for name, entry in _PAIRS.items()},
    "v_pk_mov_b32": _pk_mov,
    "v_fma_mix_f32": partial(_mix, "all"),
    "v_fma_mixlo_f16": partial(_mix, "lower"),
    "v_fma_mixhi_f16": partial(_mix, "upper"),
    "v_dot2_f32_f16": partial(_dot2, "f16", False),
    "v_dot2c_f32_f16": partial(_dot2, "f16", True),
    "v_dot2_f32_bf16": partial(_dot2, "bf16", False),
    "v_dot2c_f32_bf16": partial(_dot2, "bf16", True),
}
FAMILY = Family("packed", _OPCODES, frozenset({"op_sel", "op_sel_hi", "neg_lo", "neg_hi", "clamp"}))
