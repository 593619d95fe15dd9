"""Vector instructions that read or write masks and pairs: cndmask, add and subtract with carry, 64-bit multiply-add,
bitop3, swap."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import M32, VCC, EmuError, Step, bc, i64, int2mask, mask2int, nothing, u16, u32, u64
from k3port.testing.amd_isa.dpp_sdwa import SDWA_MODIFIERS, sdwa_merge, source
from k3port.testing.amd_isa.operands import put_wide, reader
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.wave import Wave


def _cndmask(target: Target, inst: Instruction) -> Step:
    o = inst.ops
    if inst.enc.endswith("dpp"):
        raise EmuError("v_cndmask with DPP")
    signs = o[1].neg or o[1].abs or o[2].neg or o[2].abs
    t = "f32" if signs else "u32"
    off, on = source(inst, 0, o[1], t), source(inst, 1, o[2], t)
    mask, dst = o[3].index if len(o) > 3 else VCC, o[0].index
    merge = sdwa_merge(inst)

    def step(w: Wave) -> None:
        r = bc(np.where(int2mask(w.r64(mask)), on(w), off(w))).view(u32)
        w.put(dst, r if merge is None else merge(r, w.V[dst]))

    return step


def _carry(sign: int, reverse: bool, target: Target, inst: Instruction) -> Step:
    o = inst.ops
    a, b = source(inst, 0, o[2], "u32"), source(inst, 1, o[3], "u32")
    if sdwa_merge(inst) is not None or inst.enc.endswith("dpp"):
        raise EmuError("carry with a partial destination or DPP")
    dst, out, carry_in = o[0].index, o[1].index, o[4].index if len(o) > 4 else None

    def step(w: Wave) -> None:
        x, y = bc(a(w)).astype(i64), bc(b(w)).astype(i64)
        if reverse:
            x, y = y, x
        c = 0 if carry_in is None else int2mask(w.r64(carry_in)).astype(i64)
        r = x + sign * (y + c)
        w.w64(out, mask2int(((r < 0) | (r > M32)) & w.exm))
        w.put(dst, (r & M32).astype(u32))

    return step


def _mad64(t: str, wide: str, nt: Any, target: Target, inst: Instruction) -> Step:
    """v_mad_u64_u32, v_mad_i64_i32. The carry out is bit 64 of the sum."""
    o = inst.ops
    out, signed = o[1].index, t == "i32"
    a, b, c = reader(o[2], t), reader(o[3], t), reader(o[4], wide)
    dst = o[0].index

    def step(w: Wave) -> None:
        product, addend = bc(a(w).astype(nt) * b(w).astype(nt)), c(w)
        r = product + addend
        # bit 64 of a signed sum is its sign: that of the operands where they agree, for then it may wrap
        above = np.where((product < 0) == (addend < 0), product < 0, r < 0) if signed else r < addend
        w.w64(out, mask2int(above & w.exm))
        put_wide(w, dst, r, "u64")

    return step


def _bitop3(t: str, target: Target, inst: Instruction) -> Step:
    """Any function of three bits: bit ``4 a + 2 b + c`` of the table is the result."""
    readers = [source(inst, k, x, t) for k, x in enumerate(inst.ops[1:4])]
    truth, dst = inst.num("bitop3"), inst.ops[0].index
    nt: Any = u32 if t == "u32" else u16
    if t == "u16" and inst.bits("op_sel", 4, 0)[3]:
        raise EmuError("v_bitop3_b16 into the upper half")

    def step(w: Wave) -> None:
        a, b, c = (np.asarray(get(w)) for get in readers)
        out: Any = np.zeros(64, nt)
        for k in range(8):
            if truth >> k & 1:
                out = out | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
        w.put(dst, out.astype(u32))

    return step


def _swap(target: Target, inst: Instruction) -> Step:
    a, b = inst.ops[0].index, inst.ops[1].index

    def step(w: Wave) -> None:
        x, y = w.V[a].copy(), w.V[b].copy()
        w.put(a, y)
        w.put(b, x)

    return step


_OPCODES: dict[str, Builder] = {
    "v_nop": lambda target, inst: nothing,
    "v_cndmask_b32": _cndmask,
    "v_add_co_u32": partial(_carry, 1, False),
    "v_addc_co_u32": partial(_carry, 1, False),
    "v_sub_co_u32": partial(_carry, -1, False),
    "v_subb_co_u32": partial(_carry, -1, False),
    "v_subrev_co_u32": partial(_carry, -1, True),
    "v_subbrev_co_u32": partial(_carry, -1, True),
    "v_mad_u64_u32": partial(_mad64, "u32", "u64", u64),
    "v_mad_i64_i32": partial(_mad64, "i32", "i64", i64),
    "v_bitop3_b32": partial(_bitop3, "u32"),
    "v_bitop3_b16": partial(_bitop3, "u16"),
    "v_swap_b32": _swap,
}
FAMILY = Family("masks, carries, bit functions", _OPCODES, SDWA_MODIFIERS | {"bitop3", "op_sel"})
