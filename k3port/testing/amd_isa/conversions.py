"""Conversions between f64, f32, f16, bf16 and integers. Float to integer truncates and saturates, NaN gives 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import M32, Array, EmuError, Step, bc, f16, f32, f64, i16, i32, i64, u16, u32
from k3port.testing.amd_isa.dpp_sdwa import DPP_MODIFIERS, SDWA_MODIFIERS
from k3port.testing.amd_isa.formats import f32_to_bf16, f32_to_f16_rtz, pack16
from k3port.testing.amd_isa.mode import saturated16
from k3port.testing.amd_isa.operands import reader
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.valu import Function, Table
from k3port.testing.amd_isa.wave import Wave

table = Table()


def _packed_bf16(a: Array, b: Array) -> Array:
    both = np.empty((2, 64), f32)
    both[0], both[1] = a, b
    return pack16(*f32_to_bf16(both))


def _integer(x: Array, lo: int, hi: int, dt: Any) -> Array:
    y = np.trunc(np.nan_to_num(np.asarray(x, f64), nan=0.0, posinf=float(hi), neginf=float(lo)))
    return np.clip(y, lo, hi).astype(i64).astype(dt)


def _to_i32(x: Array) -> Array:
    return _integer(x, -(2**31), 2**31 - 1, i32)


def _to_u32(x: Array) -> Array:
    return _integer(x, 0, M32, u32)


def _i16_bits(x: Array) -> Array:
    return np.clip(x, -32768, 32767).astype(i16).view(u16)


def _byte(k: int) -> Function:
    return lambda a: ((a >> u32(8 * k)) & u32(255)).astype(f32)


table("v_cvt_f32_f16", "f32", "f16", lambda a: a.astype(f32))
table("v_cvt_f16_f32", "f16", "f32", lambda a: a.astype(f16))
table("v_cvt_f32_bf16", "f32", "bf16", lambda a: a)
table("v_cvt_f32_u32", "f32", "u32", lambda a: a.astype(f32))
table("v_cvt_f32_i32", "f32", "i32", lambda a: a.astype(f32))
table("v_cvt_u32_f32", "u32", "f32", _to_u32)
table("v_cvt_i32_f32", "i32", "f32", _to_i32)
table("v_cvt_rpi_i32_f32", "i32", "f32", lambda a: _to_i32(np.floor(a.astype(f64) + 0.5)))
table("v_cvt_flr_i32_f32", "i32", "f32", lambda a: _to_i32(np.floor(a)))
table("v_cvt_f64_f32", "f64", "f32", lambda a: a.astype(f64))
table("v_cvt_f32_f64", "f32", "f64", lambda a: a.astype(f32))
table("v_cvt_f64_i32", "f64", "i32", lambda a: a.astype(f64))
table("v_cvt_f64_u32", "f64", "u32", lambda a: a.astype(f64))
table("v_cvt_i32_f64", "i32", "f64", _to_i32)
table("v_cvt_u32_f64", "u32", "f64", _to_u32)
table("v_cvt_f16_u16", "f16", "u16", lambda a: a.astype(f16))
table("v_cvt_f16_i16", "f16", "i16", lambda a: a.astype(f16))
table("v_cvt_u16_f16", "u16", "f16", lambda a: _integer(a, 0, 65535, u16))
table("v_cvt_i16_f16", "i16", "f16", lambda a: _integer(a, -32768, 32767, i16))
for _k in range(4):
    table(f"v_cvt_f32_ubyte{_k}", "f32", "u32", _byte(_k))
table("v_cvt_pkrtz_f16_f32", "u32", "f32 f32", lambda a, b: pack16(f32_to_f16_rtz(a), f32_to_f16_rtz(b)))
table("v_cvt_pk_bf16_f32", "u32", "f32 f32", _packed_bf16)
table("v_cvt_pk_i16_i32", "u32", "i32 i32", lambda a, b: pack16(_i16_bits(a), _i16_bits(b)))
table(
    "v_cvt_pk_u16_u32", "u32", "u32 u32",
    lambda a, b: pack16(np.minimum(a, u32(65535)), np.minimum(b, u32(65535))),
)  # fmt: skip


def _pk_f16(target: Target, inst: Instruction) -> Step:
    """v_cvt_pk_f16_f32 (gfx950)."""
    readers, dst = [reader(o, "f32") for o in inst.ops[1:3]], inst.ops[0].index
    if inst.mods:
        raise EmuError(f"modifiers of {inst.base}")

    def step(w: Wave) -> None:
        exact = [bc(get(w)) for get in readers]
        halves = [x.astype(f16) for x in exact]
        if w.saturates:
            halves = [saturated16(h, [x]) for h, x in zip(halves, exact, strict=True)]
        w.put(dst, pack16(*(h.view(u16) for h in halves)))

    return step


_OPCODES: dict[str, Builder] = {**table.opcodes(), "v_cvt_pk_f16_f32": _pk_f16}
FAMILY = Family("conversions", _OPCODES, DPP_MODIFIERS | SDWA_MODIFIERS | {"clamp", "mul", "div", "op_sel"})
