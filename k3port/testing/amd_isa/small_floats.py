"""Conversions from and to fp8, bf8 and fp4, plain and with a power of two as scale.

The plain ones use the flavour of the architecture (FNUZ on gfx942, OCP on gfx950). With MODE.FP16_OVFL, which Triton
sets, numbers beyond the range become the largest number, without it NaN or infinity; an infinity is taken to saturate
too. Those with a scale exist on gfx950 only, are OCP, and saturate (CDNA4 ISA document, "v_cvt_scalef32_*").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import M32, Array, Step, bc, f16, f32, f64, i32, u32
from k3port.testing.amd_isa.dpp_sdwa import SDWA_MODIFIERS, sdwa_source
from k3port.testing.amd_isa.formats import BF8_OCP, FP4, FP8_OCP, MiniFloat, f16_bits, f32_to_bf16, pack16
from k3port.testing.amd_isa.mode import saturated16
from k3port.testing.amd_isa.operands import raw32, reader
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.wave import Wave

Flavour = Callable[[Target], MiniFloat]
_SCALED = {"fp8": FP8_OCP, "bf8": BF8_OCP, "fp4": FP4}


def _fp8(target: Target) -> MiniFloat:
    return target.fp8


def _bf8(target: Target) -> MiniFloat:
    return target.bf8


def _to_f32(flavour: Flavour, packed: bool, target: Target, inst: Instruction) -> Step:
    """One byte, or the two bytes of a half word, to f32."""
    o, fmt, dst = inst.ops, flavour(target), inst.ops[0].index
    raw = raw32(o[1])
    shift = u32(0)
    if inst.enc == "sdwa":
        raw = sdwa_source(raw, inst.mods.get("src0_sel"), False)
    elif packed:
        shift = u32(16 * inst.bits("op_sel", 2, 0)[0])
    else:
        sel = inst.bits("op_sel", 2, 0)
        shift = u32(8 * (sel[0] + 2 * sel[1]))

    def step(w: Wave) -> None:
        x = bc(raw(w)) >> shift
        a, b = x & u32(255), (x >> u32(8)) & u32(255)
        w.put(dst, fmt.dec(a).astype(f32))
        if packed:
            w.put(dst + 1, fmt.dec(b).astype(f32))

    return step


def _from_f32(flavour: Flavour, target: Target, inst: Instruction) -> Step:
    """Two f32 into one half of the destination; op_sel's last bit chooses the upper one."""
    o, fmt, dst = inst.ops, flavour(target), inst.ops[0].index
    a, b = reader(o[1], "f32"), reader(o[2], "f32")
    sel = inst.bits("op_sel", 0, 0)
    upper = bool(sel and sel[-1])

    def step(w: Wave) -> None:
        v = fmt.enc(bc(a(w)), w.saturates) | (fmt.enc(bc(b(w)), w.saturates) << u32(8))
        old = w.V[dst]
        w.put(dst, (old & u32(0xFFFF)) | (v << u32(16)) if upper else (old & u32(0xFFFF0000)) | v)

    return step


def _power(scale: Array, sign: int) -> Array:
    """2 ** (sign * exponent) of an f32 whose exponent alone counts."""
    return np.ldexp(1.0, sign * (((bc(scale) >> u32(23)) & u32(255)).astype(i32) - 127))


def _unscale(to: str, frm: str, packed: bool, target: Target, inst: Instruction) -> Step:
    """v_cvt_scalef32_[pk_]{f32,f16,bf16}_{fp8,bf8,fp4}: value times scale."""
    o, fmt, dst = inst.ops, _SCALED[frm], inst.ops[0].index
    raw, scale = raw32(o[1]), reader(o[2], "u32")
    sel = inst.bits("op_sel", 4, 0)
    byte = 2 * sel[0] if packed and frm != "fp4" else sel[0] + 2 * sel[1]
    bits = 4 if frm == "fp4" else 8
    mask = u32((1 << bits) - 1)

    def step(w: Wave) -> None:
        x, s = bc(raw(w)) >> u32(8 * byte), _power(scale(w), 1)
        a, b = fmt.dec(x & mask) * s, fmt.dec((x >> u32(bits)) & mask) * s
        if to == "f32":
            w.put(dst, a.astype(f32))
            if packed:
                w.put(dst + 1, b.astype(f32))
        elif to == "bf16":
            w.put(dst, pack16(f32_to_bf16(a), f32_to_bf16(b)))
        else:
            h, k = a.astype(f16), b.astype(f16)
            if w.saturates:
                h, k = saturated16(h, [a]), saturated16(k, [b])
            w.put(dst, pack16(f16_bits(h), f16_bits(k)))

    return step


def _scale(to: str, frm: str, target: Target, inst: Instruction) -> Step:
    """v_cvt_scalef32_pk_{fp8,bf8,fp4}_{f32,f16,bf16}: value divided by scale, into one byte or half word."""
    o, fmt, dst = inst.ops, _SCALED[to], inst.ops[0].index
    if frm == "f32":
        a, b, scale = reader(o[1], "f32"), reader(o[2], "f32"), reader(o[3], "u32")
    else:
        a, b, scale = reader(o[1], frm), reader(o[1], frm, True), reader(o[2], "u32")
    sel = inst.bits("op_sel", 4, 0)
    if to == "fp4":
        position, bits = 8 * (sel[2] + 2 * sel[3]), 4
    else:
        position, bits = 16 * (sel[3] if frm == "f32" else sel[2]), 8
    keep, at = u32(M32 ^ (((1 << 2 * bits) - 1) << position)), u32(position)

    def step(w: Wave) -> None:
        s = _power(scale(w), -1)
        lo, hi = fmt.enc(bc(a(w)).astype(f64) * s), fmt.enc(bc(b(w)).astype(f64) * s)
        w.put(dst, (w.V[dst] & keep) | ((lo | (hi << u32(bits))) << at))

    return step


def _scaled() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    for small in _SCALED:
        for large in ("f32", "f16", "bf16"):
            found[f"v_cvt_scalef32_pk_{large}_{small}"] = partial(_unscale, large, small, True)
            found[f"v_cvt_scalef32_pk_{small}_{large}"] = partial(_scale, small, large)
    for small in ("fp8", "bf8"):
        found[f"v_cvt_scalef32_f32_{small}"] = partial(_unscale, "f32", small, False)
    return found


_OPCODES: dict[str, Builder] = {
    "v_cvt_pk_f32_fp8": partial(_to_f32, _fp8, True),
    "v_cvt_pk_f32_bf8": partial(_to_f32, _bf8, True),
    "v_cvt_f32_fp8": partial(_to_f32, _fp8, False),
    "v_cvt_f32_bf8": partial(_to_f32, _bf8, False),
    "v_cvt_pk_fp8_f32": partial(_from_f32, _fp8),
    "v_cvt_pk_bf8_f32": partial(_from_f32, _bf8),
    **_scaled(),
}
FAMILY = Family("small floats", _OPCODES, SDWA_MODIFIERS | {"op_sel"})
