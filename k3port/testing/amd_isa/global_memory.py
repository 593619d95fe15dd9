"""Global, flat and scratch memory. Flat addresses are taken as global ones.

Every load, store and atomic counts as an outstanding vector memory operation; its effect is immediate, except that of a
direct-to-LDS load.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from k3port.testing.amd_isa.atomics import ATOMICS, Atomic, run_atomic
from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import LANES, M64, EmuError, Reader, Step, i64, nothing, u64
from k3port.testing.amd_isa.operands import scalar32
from k3port.testing.amd_isa.text import Instruction, Operand
from k3port.testing.amd_isa.transfer import LOADS, STORES, Convert, copy_to_lds, stored_bytes, write_loaded
from k3port.testing.amd_isa.wave import Wave

MODIFIERS = frozenset({"offset", "sc0", "sc1", "nt"})


def _address(va: Operand, sa: Operand | None, offset: int) -> Reader:
    """Reader of 64 addresses: a scalar base with 32-bit offsets per lane, or a 64-bit address per lane."""
    if sa is not None and sa.kind == "s":
        si, vi = sa.index, va.index
        if va.kind != "v":
            return lambda w: np.full(64, u64((w.r64(si) + offset) & M64))
        return lambda w: w.V[vi].astype(u64) + u64((w.r64(si) + offset) & M64)
    if va.kind != "v":
        raise EmuError(f"address {va.text}")
    vi, off = va.index, u64(offset & M64)
    return lambda w: (w.V[vi].astype(u64) | (w.V[vi + 1].astype(u64) << u64(32))) + off


def _at(o: list[Operand], k: int) -> Operand | None:
    return o[k] if k < len(o) else None


def _load(nb: int, convert: Convert | None, target: Target, inst: Instruction) -> Step:
    o, dst = inst.ops, inst.ops[0].index
    address = _address(o[1], _at(o, 2), inst.num("offset"))

    def step(w: Wave) -> None:
        w.vmq.append(None)
        if w.full:
            write_loaded(w, dst, w.exm, w.glob.load(address(w), nb), convert)
        elif w.ex:
            write_loaded(w, dst, w.exm, w.glob.load(address(w)[w.exm], nb), convert)

    return step


def _load_to_lds(nb: int, convert: Convert | None, target: Target, inst: Instruction) -> Step:
    o, offset = inst.ops, inst.num("offset")
    address = _address(o[0], o[1], offset)

    def step(w: Wave) -> None:
        w.vmq.append(None)
        if w.ex:
            copy_to_lds(w, w.exm, w.glob.load(address(w)[w.exm], nb), offset, convert)

    return step


def _store(nb: int, upper: bool, target: Target, inst: Instruction) -> Step:
    o, data = inst.ops, inst.ops[1].index
    address = _address(o[0], _at(o, 2), inst.num("offset"))

    def step(w: Wave) -> None:
        w.vmq.append(None)
        if w.ex:
            w.glob.store(address(w)[w.exm], stored_bytes(w, data, w.exm, nb, upper))

    return step


def _atomic(atomic: Atomic, flat: bool, target: Target, inst: Instruction) -> Step:
    o = inst.ops
    returns = len(o) == (3 if flat else 4)
    first = 1 if returns else 0
    address = _address(o[first], _at(o, first + 2), inst.num("offset"))
    dst, data = (o[0].index if returns else None), o[first + 1].index

    def step(w: Wave) -> None:
        w.vmq.append(None)
        run_atomic(w, atomic, address(w), w.exm, dst, data)

    return step


def _scratch(nb: int, convert: Convert | None, load: bool, upper: bool, target: Target, inst: Instruction) -> Step:
    o = inst.ops
    va, sa, reg = (o[1], o[2], o[0].index) if load else (o[0], o[2], o[1].index)
    base = scalar32(sa) if sa.kind == "s" else lambda w: 0
    offset, vi, per_lane = inst.num("offset"), va.index, va.kind == "v"

    def step(w: Wave) -> None:
        w.vmq.append(None)
        if not w.ex:
            return
        m = w.exm
        a = ((w.V[vi].astype(i64) if per_lane else np.zeros(64, i64)) + offset + base(w))[m]
        if int(a.max()) + nb > w.scratch.shape[1] or int(a.min()) < 0:
            raise EmuError(f"scratch access out of bounds: byte {int(a.max())}+{nb} of {w.scratch.shape[1]} per lane")
        index, lane = a[:, None] + np.arange(nb), LANES[m][:, None]
        if load:
            write_loaded(w, reg, m, w.scratch[lane, index], convert)
        else:
            w.scratch[lane, index] = stored_bytes(w, reg, m, nb, upper)

    return step


def _all_opcodes() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    for name, (nb, convert) in LOADS.items():
        found[f"global_load_{name}"] = found[f"flat_load_{name}"] = partial(_load, nb, convert)
        found[f"scratch_load_{name}"] = partial(_scratch, nb, convert, True, False)
        if convert is None or name in ("ubyte", "sbyte", "ushort", "sshort"):
            found[f"global_load_lds_{name}"] = partial(_load_to_lds, nb, convert)
    for name, (nb, upper) in STORES.items():
        found[f"global_store_{name}"] = found[f"flat_store_{name}"] = partial(_store, nb, upper)
        found[f"scratch_store_{name}"] = partial(_scratch, nb, None, False, upper)
    for name, atomic in ATOMICS.items():
        found[f"global_atomic_{name}"] = partial(_atomic, atomic, False)
        found[f"flat_atomic_{name}"] = partial(_atomic, atomic, True)
    for name in ("wbinvl1", "inv", "wb"):
        found[f"global_{name}"] = lambda target, inst: nothing
    return found


FAMILY = Family("global, flat and scratch memory", _all_opcodes(), MODIFIERS)
