"""Lane patterns of DPP and sub-dword selection of SDWA, the two encodings that change how a source is read.

CDNA3 ISA document, sections "DPP" and "SDWA". Both exist for 32-bit sources only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from k3port.testing.amd_isa.core import HALF, LANES, M32, WIDE, Array, EmuError, Reader, i8, i16, i32, u8, u16, u32
from k3port.testing.amd_isa.operands import raw32, reader
from k3port.testing.amd_isa.text import Instruction, Operand

DPP_MODIFIERS = frozenset(
    "quad_perm row_shl row_shr row_ror row_mirror row_half_mirror row_newbcast row_bcast wave_shl wave_shr wave_rol "
    "wave_ror row_mask bank_mask bound_ctrl".split()
)
SDWA_MODIFIERS = frozenset("dst_sel dst_unused src0_sel src1_sel".split())

_ROW, _IN_ROW = LANES & ~15, LANES & 15
_ALL = np.ones(64, bool)
Pattern = tuple[np.ndarray, np.ndarray]


def _quad(v: str) -> Pattern:
    order = np.array([int(x) for x in v.strip("[]").split(",")])
    return (LANES & ~3) + order[LANES & 3], _ALL


def _broadcast_last(v: str) -> Pattern:
    if int(v) == 15:  # lane 15 of each row to the next row
        return np.maximum(_ROW - 1, 0), LANES > 15
    return np.maximum((LANES & 32) - 1, 0), LANES > 31  # lane 31 to the upper half


_PATTERNS: dict[str, Callable[[str], Pattern]] = {
    "quad_perm": _quad,
    "row_shl": lambda v: (np.minimum(LANES + int(v), 63), _IN_ROW + int(v) <= 15),
    "row_shr": lambda v: (np.maximum(LANES - int(v), 0), int(v) <= _IN_ROW),
    "row_ror": lambda v: (_ROW + ((_IN_ROW - int(v)) & 15), _ALL),
    "row_mirror": lambda v: (_ROW + 15 - _IN_ROW, _ALL),
    "row_half_mirror": lambda v: ((LANES & ~7) + 7 - (LANES & 7), _ALL),
    "row_newbcast": lambda v: (_ROW + int(v), _ALL),
    "row_bcast": _broadcast_last,
    "wave_shl": lambda v: (np.minimum(LANES + 1, 63), LANES < 63),
    "wave_shr": lambda v: (np.maximum(LANES - 1, 0), LANES > 0),
    "wave_rol": lambda v: ((LANES + 1) & 63, _ALL),
    "wave_ror": lambda v: ((LANES - 1) & 63, _ALL),
}


def dpp_pattern(mods: Mapping[str, str]) -> Pattern:
    """(source lane, whether it exists) for each lane."""
    for key, value in mods.items():
        if key in _PATTERNS:
            return _PATTERNS[key](value)
    raise EmuError(f"DPP control {dict(mods)}")


def dpp_enabled(inst: Instruction) -> np.ndarray:
    """Lanes that ``row_mask`` and ``bank_mask`` let through."""
    rows, banks = inst.num("row_mask", 15), inst.num("bank_mask", 15)
    return (((rows >> (LANES >> 4)) & 1) & ((banks >> ((LANES >> 2) & 3)) & 1)).astype(bool)


def sdwa_bits(sel: str) -> tuple[int, int]:
    """(shift, mask) of ``BYTE_n`` or ``WORD_n``."""
    kind, n = sel.split("_")
    bits = 8 if kind == "BYTE" else 16
    return bits * int(n), (1 << bits) - 1


def sdwa_source(raw: Reader, sel: str | None, sext: bool) -> Reader:
    """The selected byte or half word of a source, extended to 32 bits."""
    if sel in (None, "DWORD"):
        return raw
    shift, mask = sdwa_bits(sel)
    sh, mk = u32(shift), u32(mask)
    if not sext:
        return lambda w: (raw(w) >> sh) & mk
    unsigned, signed = (u8, i8) if mask == 0xFF else (u16, i16)
    return lambda w: ((raw(w) >> sh) & mk).astype(unsigned).view(signed).astype(i32).view(u32)


def sdwa_merge(inst: Instruction) -> Callable[[Array, np.ndarray], Array] | None:
    """Places a result in the selected part of the destination: function of (result, old register), or None."""
    sel, unused = inst.mods.get("dst_sel"), inst.mods.get("dst_unused")
    if inst.enc != "sdwa" or sel in (None, "DWORD"):
        return None
    shift, mask = sdwa_bits(sel)
    sign = u32(mask ^ (mask >> 1))
    above = u32(M32 ^ ((1 << (shift + mask.bit_length())) - 1))

    def merge(r: Array, old: np.ndarray) -> Array:
        v = (r & u32(mask)) << u32(shift)
        if unused == "UNUSED_PRESERVE":
            return v | (old & u32(M32 ^ (mask << shift)))
        if unused == "UNUSED_SEXT":
            return np.where((r & sign) != 0, v | above, v)
        return v

    return merge


def source(inst: Instruction, k: int, o: Operand, t: str) -> Reader:
    """Reader of vector source ``k`` with what SDWA, DPP (lane pattern only) and op_sel do to it."""
    hi, raw = False, None
    if inst.enc == "sdwa" and k < 2:
        raw = sdwa_source(raw32(o), inst.mods.get(f"src{k}_sel"), o.sext)
    elif t in HALF:
        hi = bool(inst.bits("op_sel", 4, 0)[k])
    if inst.enc.endswith("dpp") and k == 0:
        if o.kind != "v":
            raise EmuError("DPP source that is no vector register")
        lane, _ = dpp_pattern(inst.mods)
        i = o.index
        return reader(o, t, hi, lambda w: w.V[i][lane])
    if t in WIDE and raw is not None:
        raise EmuError("64-bit SDWA")
    return reader(o, t, hi, raw)
