"""Buffer memory: an address is base + offsets, and the descriptor's size turns what lies beyond into zeros or nothing.

Hardware does not fault there, and Triton uses it for masks: it gives a masked lane the offset 0x80000000. Any other
offset beyond the size is an access before or behind the tensor that hardware hides, so here it is an error. What is
inside the size must lie in a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from k3port.testing.amd_isa.atomics import ATOMICS, Atomic, run_atomic
from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import EmuError, Step, i64, nothing, u8, u64
from k3port.testing.amd_isa.operands import scalar32
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.transfer import LOADS, STORES, Convert, copy_to_lds, stored_bytes, write_loaded
from k3port.testing.amd_isa.wave import Wave

Address = Callable[[Wave], tuple[np.ndarray, np.ndarray]]
MASKED_OFFSET = 0x80000000
"""What Triton puts into the offset of a lane that its mask turns off."""


def _address(inst: Instruction, first: int, nb: int) -> Address:
    """(addresses, active lanes inside the buffer); operands from ``first``: offset, descriptor, scalar offset."""
    va, rs, so = inst.ops[first], inst.ops[first + 1].index, scalar32(inst.ops[first + 2])
    offset, vi, per_lane = inst.num("offset"), va.index, "offen" in inst.mods

    def address(w: Wave) -> tuple[np.ndarray, np.ndarray]:
        base, size = w.r64(rs) & 0xFFFFFFFFFFFF, w.r32(rs + 2)
        if per_lane and int(w.V[vi].max()) + (ahead := offset + so(w)) + nb <= size:
            return w.V[vi] + u64(base + ahead), w.exm
        rel = (w.V[vi].astype(i64) if per_lane else np.zeros(64, i64)) + (offset + so(w))
        inside = rel + nb <= size
        if not inside.all():
            stray = w.exm & ~inside
            if per_lane:
                stray &= w.V[vi] != MASKED_OFFSET
            if stray.any():
                x = int(rel[stray][0])
                signed = f" ({x - 2**32} as a signed number)" if x >= 2**31 else ""
                raise EmuError(
                    f"buffer access out of bounds: offset {x}{signed}, {nb} bytes of {size}, lane not masked"
                )
        return (rel + base).astype(u64), w.exm & inside

    return address


def _fetch(w: Wave, address: Address, nb: int) -> np.ndarray:
    """Bytes of the active lanes, zero beyond the buffer."""
    a, m = address(w)
    if m.all():
        return w.glob.load(a, nb)
    data = np.zeros((64, nb), u8)
    if m.any():
        data[m] = w.glob.load(a[m], nb)
    return data[w.exm]


def _load(nb: int, convert: Convert | None, target: Target, inst: Instruction) -> Step:
    if "lds" in inst.mods:
        return _load_to_lds(nb, convert, inst)
    dst, address = inst.ops[0].index, _address(inst, 1, nb)

    def step(w: Wave) -> None:
        w.vmq.append(None)
        if w.ex:
            write_loaded(w, dst, w.exm, _fetch(w, address, nb), convert)

    return step


def _load_to_lds(nb: int, convert: Convert | None, inst: Instruction) -> Step:
    address, offset = _address(inst, 0, nb), inst.num("offset")

    def step(w: Wave) -> None:
        w.vmq.append(None)
        if w.ex:
            copy_to_lds(w, w.exm, _fetch(w, address, nb), offset, convert)

    return step


def _store(nb: int, upper: bool, target: Target, inst: Instruction) -> Step:
    data, address = inst.ops[0].index, _address(inst, 1, nb)

    def step(w: Wave) -> None:
        w.vmq.append(None)
        if w.ex:
            a, m = address(w)
            if m.any():
                w.glob.store(a[m], stored_bytes(w, data, m, nb, upper))

    return step


def _atomic(atomic: Atomic, target: Target, inst: Instruction) -> Step:
    data, address = inst.ops[0].index, _address(inst, 1, atomic.nbytes)
    dst = data if "sc0" in inst.mods else None

    def step(w: Wave) -> None:
        w.vmq.append(None)
        a, m = address(w)
        run_atomic(w, atomic, a, m, dst, data)

    return step


def _all_opcodes() -> dict[str, Builder]:
    found: dict[str, Builder] = {f"buffer_load_{name}": partial(_load, *entry) for name, entry in LOADS.items()}
    found |= {f"buffer_store_{name}": partial(_store, *entry) for name, entry in STORES.items()}
    found |= {f"buffer_atomic_{name}": partial(_atomic, atomic) for name, atomic in ATOMICS.items()}
    for name in ("inv", "wbl2", "wbinvl1", "wbinvl1_vol", "gl0_inv", "gl1_inv", "wb"):
        found[f"buffer_{name}"] = lambda target, inst: nothing
    return found


FAMILY = Family("buffer memory", _all_opcodes(), frozenset({"offset", "offen", "lds", "sc0", "sc1", "nt"}))
