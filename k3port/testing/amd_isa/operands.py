"""Readers of operands: from an operand and a type to a function of the wave.

Immediates follow the inline-constant and literal rules of the CDNA3 ISA document (section "Scalar ALU operands"): a
floating constant takes the type of its operand, an integer its bits; a 32-bit literal of an f64 operand is the
upper half.
"""

from __future__ import annotations

import struct

import numpy as np

from k3port.testing.amd_isa.core import M32, M64, NUMPY_TYPES, WIDE, Array, EmuError, Reader, f16, f32, u16, u32, u64
from k3port.testing.amd_isa.formats import bf16_to_f32, f32_to_bf16
from k3port.testing.amd_isa.text import Operand
from k3port.testing.amd_isa.wave import Wave


def imm_bits(v: object, t: str) -> int:
    """Bit pattern of an immediate for an operand of type ``t``."""
    if isinstance(v, float):
        if t in ("f16", "u16", "i16"):
            return int(f16(v).view(u16))
        if t == "bf16":
            return int(f32_to_bf16(f32(v)))
        return struct.unpack("<Q", struct.pack("<d", v))[0] if t in WIDE else int(f32(v).view(u32))
    if not isinstance(v, int):
        raise EmuError(f"cannot read operand {v}")
    if t in ("u64", "i64"):
        return v & M64
    if t == "f64":
        return (v & M32) << 32 if v > 64 or v < -16 else v & M64
    return v & (0xFFFF if t in ("f16", "bf16", "u16", "i16") else M32)


def raw32(o: Operand) -> Reader:
    """Reader of the 32 bits of an operand, without type or modifier."""
    i = o.index
    if o.kind == "v":
        return lambda w: w.V[i]
    if o.kind == "s":
        return (lambda w: u32(w.S[i])) if i < 126 else (lambda w: u32(w.r32(i)))
    if o.kind == "imm":
        c = u32(imm_bits(o.value, "u32"))
        return lambda w: c
    if o.kind == "scc":
        return lambda w: u32(w.scc)
    raise EmuError(f"cannot read operand {o.text}")


def _constant(o: Operand, t: str, hi: bool) -> Reader:
    b = imm_bits(o.value, t)
    c: Array
    if t in WIDE:
        c = u64(b).view(NUMPY_TYPES[t])
    elif t == "bf16":
        c = bf16_to_f32(u16(b))[()]
    elif t in ("f16", "u16", "i16"):
        c = u16(0 if hi else b).view(NUMPY_TYPES[t])  # the upper half of a 16-bit constant is zero
    else:
        c = u32(b).view(NUMPY_TYPES[t])
    if o.neg and t[0] in "fb":
        c = -c
    return lambda w: c


def reader(o: Operand, t: str, hi: bool = False, raw: Reader | None = None) -> Reader:
    """Reader of type ``t`` (``bf16`` is read as f32): lanes, or a scalar.

    ``hi``: from the upper 16 bits. ``raw`` replaces the read of 32 bits (DPP, SDWA).
    """
    if o.kind == "imm":
        return _constant(o, t, hi)
    if (o.neg or o.abs) and t[0] in "ui":
        raise EmuError(f"sign modifier of the integer operand {o.text}")
    if t in WIDE and raw is None:
        return _signs(_wide(o, t), o)
    if t == "f32" and o.kind == "v" and raw is None:
        i = o.index
        return _signs(lambda w: w.VF[i], o)
    get = raw or raw32(o)
    if t == "u32":
        return get
    if t in ("f32", "i32"):
        nt = NUMPY_TYPES[t]
        return _signs(lambda w: get(w).view(nt), o)
    if t in ("u16", "i16", "f16"):
        nt = NUMPY_TYPES[t]
        shift = u32(16 if hi else 0)
        return _signs(lambda w: (get(w) >> shift).astype(u16).view(nt), o)
    if t == "bf16":
        if hi:
            return _signs(lambda w: (get(w) & u32(0xFFFF0000)).view(f32), o)
        return _signs(lambda w: (get(w) << u32(16)).view(f32), o)
    raise EmuError(f"operand {o.text} of type {t}")


def _wide(o: Operand, t: str) -> Reader:
    nt, i = NUMPY_TYPES[t], o.index
    if o.kind == "v":
        return lambda w: (w.V[i].astype(u64) | (w.V[i + 1].astype(u64) << u64(32))).view(nt)
    if o.kind == "s":
        return lambda w: u64(w.r64(i)).view(nt)
    raise EmuError(f"cannot read operand {o.text}")


def _signs(get: Reader, o: Operand) -> Reader:
    if o.abs and o.neg:
        return lambda w: -np.abs(get(w))
    if o.abs:
        return lambda w: np.abs(get(w))
    return (lambda w: -get(w)) if o.neg else get


def scalar32(o: Operand) -> Reader:
    """Reader of a 32-bit scalar operand as a Python integer."""
    if o.kind == "imm":
        c = imm_bits(o.value, "u32")
        return lambda w: c
    i = o.index
    if o.kind == "s":
        return (lambda w: w.S[i]) if i < 126 else (lambda w: w.r32(i))
    if o.kind == "scc":
        return lambda w: w.scc
    raise EmuError(f"scalar operand {o.text}")


def scalar64(o: Operand) -> Reader:
    """Reader of a 64-bit scalar operand as a Python integer."""
    if o.kind == "imm":
        c = imm_bits(o.value, "u64")
        return lambda w: c
    i = o.index
    if o.kind == "s":
        return lambda w: w.r64(i)
    raise EmuError(f"scalar operand {o.text}")


def to_rows(r: Array, t: str) -> list[np.ndarray]:
    """A result of type ``t`` as 32-bit registers."""
    r = np.asarray(r)
    if t in WIDE:
        r = np.ascontiguousarray(r).view(u64)
        return [r.astype(u32), (r >> u64(32)).astype(u32)]
    if t in ("f16", "u16", "i16"):
        return [r.astype(NUMPY_TYPES[t]).view(u16).astype(u32)]
    return [r.astype(NUMPY_TYPES[t], copy=False).view(u32)]


def put_wide(w: Wave, dst: int, r: Array, t: str) -> None:
    """Writes a 64-bit result under EXEC."""
    lo, hi = to_rows(r, t)
    w.put(dst, lo)
    w.put(dst + 1, hi)
