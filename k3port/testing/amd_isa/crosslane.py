"""Instructions that move numbers between lanes: readlane and its kin, permlane swaps, ds_permute, ds_swizzle.

The ds_ ones touch no memory. Reads from an inactive lane give zero.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import LANES, EmuError, Step, u32
from k3port.testing.amd_isa.operands import scalar32
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.wave import Wave


def _readfirstlane(target: Target, inst: Instruction) -> Step:
    dst, i = inst.ops[0].index, inst.ops[1].index

    def step(w: Wave) -> None:
        lane = (w.ex & -w.ex).bit_length() - 1 if w.ex else 0
        w.w32(dst, int(w.V[i, lane]))

    return step


def _readlane(target: Target, inst: Instruction) -> Step:
    dst, i, lane = inst.ops[0].index, inst.ops[1].index, scalar32(inst.ops[2])
    return lambda w: w.w32(dst, int(w.V[i, lane(w) & 63]))


def _writelane(target: Target, inst: Instruction) -> Step:
    dst, value, lane = inst.ops[0].index, scalar32(inst.ops[1]), scalar32(inst.ops[2])

    def step(w: Wave) -> None:
        w.V[dst, lane(w) & 63] = value(w)

    return step


def _permlane_swap(n: int, target: Target, inst: Instruction) -> Step:
    """Odd groups of ``n`` lanes of the first register change places with the even groups of the second."""
    a, b = inst.ops[0].index, inst.ops[1].index
    even = (LANES // n) % 2 == 0

    def step(w: Wave) -> None:
        x = w.V[a, ~even].copy()
        w.V[a, ~even] = w.V[b, even]
        w.V[b, even] = x

    return step


def _permute(pull: bool, target: Target, inst: Instruction) -> Step:
    dst, address, data = (o.index for o in inst.ops[:3])
    offset = u32(inst.num("offset"))

    def step(w: Wave) -> None:
        lane = ((w.V[address] + offset) >> u32(2)) & u32(63)
        if pull:
            r = np.where(w.exm[lane], w.V[data][lane], u32(0))
        else:
            r = np.zeros(64, u32)
            r[lane[w.exm]] = w.V[data][w.exm]
        w.put(dst, r)

    return step


def _bitmask(low: int, set_bits: int, flip: int) -> np.ndarray:
    return (LANES & 32) | ((((LANES & 31) & low) | set_bits) ^ flip)


def swizzle_lanes(v: str) -> np.ndarray:
    """Source lane of each lane for the ``offset`` of ds_swizzle_b32, a number or ``swizzle(...)``."""
    if not v.startswith("swizzle("):
        x = int(v, 0)
        if x & 0x8000:
            return (LANES & ~3) + np.array([(x >> (2 * k)) & 3 for k in range(4)])[LANES & 3]
        return _bitmask(x & 31, (x >> 5) & 31, (x >> 10) & 31)
    kind, *rest = (p.strip().strip('"') for p in v[8:-1].split(","))
    if kind == "QUAD_PERM":
        return (LANES & ~3) + np.array([int(x) for x in rest])[LANES & 3]
    if kind == "SWAP":
        return LANES ^ int(rest[0])
    if kind == "REVERSE":
        return LANES ^ (int(rest[0]) - 1)
    if kind == "BROADCAST":
        return (LANES & ~(int(rest[0]) - 1)) + int(rest[1])
    if kind == "BITMASK_PERM":
        bits = list(zip(rest[0], (16, 8, 4, 2, 1), strict=True))
        return _bitmask(
            sum(b for c, b in bits if c in "pi"),
            sum(b for c, b in bits if c == "1"),
            sum(b for c, b in bits if c == "i"),
        )
    raise EmuError(f"swizzle {v}")


def _swizzle(target: Target, inst: Instruction) -> Step:
    dst, i = inst.ops[0].index, inst.ops[1].index
    lane = swizzle_lanes(inst.mods.get("offset", "0"))
    return lambda w: w.put(dst, np.where(w.exm[lane], w.V[i][lane], u32(0)))


_OPCODES: dict[str, Builder] = {
    "v_readfirstlane_b32": _readfirstlane,
    "v_readlane_b32": _readlane,
    "v_writelane_b32": _writelane,
    "v_permlane16_swap_b32": partial(_permlane_swap, 16),
    "v_permlane32_swap_b32": partial(_permlane_swap, 32),
    "ds_bpermute_b32": partial(_permute, True),
    "ds_permute_b32": partial(_permute, False),
    "ds_swizzle_b32": _swizzle,
}
FAMILY = Family("between lanes", _OPCODES, frozenset({"offset"}))
