"""LDS: reads, writes, pairs, transposing reads (gfx950), atomics. CDNA3 and CDNA4 ISA documents, "LDS Instructions".

Base and offset are added modulo 2**32: LLVM folds a negative base together with a positive offset.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import M32, EmuError, Step, f32, i32, nothing, u8, u16, u32
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.transfer import LOADS, STORES, Convert, stored_bytes, write_loaded
from k3port.testing.amd_isa.wave import Wave

_READS = {
    "b32": "dword", "b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4", "u8": "ubyte", "i8": "sbyte",
    "u16": "ushort", "i16": "sshort", "u16_d16": "short_d16", "u16_d16_hi": "short_d16_hi", "u8_d16": "ubyte_d16",
    "u8_d16_hi": "ubyte_d16_hi", "i8_d16": "sbyte_d16", "i8_d16_hi": "sbyte_d16_hi",
}  # fmt: skip
_WRITES = {
    "b8": "byte", "b16": "short", "b32": "dword", "b64": "dwordx2", "b96": "dwordx3", "b128": "dwordx4",
    "b8_d16_hi": "byte_d16_hi", "b16_d16_hi": "short_d16_hi",
}  # fmt: skip


def _read(nb: int, convert: Convert | None, target: Target, inst: Instruction) -> Step:
    dst, ai, offset = inst.ops[0].index, inst.ops[1].index, u32(inst.num("offset"))

    def step(w: Wave) -> None:
        if w.ex:
            write_loaded(w, dst, w.exm, w.lds.load(w, w.active(ai) + offset, nb), convert)

    return step


def _write(nb: int, upper: bool, target: Target, inst: Instruction) -> Step:
    ai, data, offset = inst.ops[0].index, inst.ops[1].index, u32(inst.num("offset"))

    def step(w: Wave) -> None:
        if w.ex:
            w.lds.store(w, w.active(ai) + offset, stored_bytes(w, data, w.exm, nb, upper))

    return step


def _read2(nb: int, stride: int, target: Target, inst: Instruction) -> Step:
    dst, ai = inst.ops[0].index, inst.ops[1].index
    first, second = u32(inst.num("offset0") * stride), u32(inst.num("offset1") * stride)

    def step(w: Wave) -> None:
        if w.ex:
            a = w.active(ai)
            lower, upper = w.lds.load(w, a + first, nb), w.lds.load(w, a + second, nb)
            write_loaded(w, dst, w.exm, lower, None)
            write_loaded(w, dst + nb // 4, w.exm, upper, None)

    return step


def _write2(nb: int, stride: int, target: Target, inst: Instruction) -> Step:
    ai, lower, upper = (o.index for o in inst.ops[:3])
    first, second = u32(inst.num("offset0") * stride), u32(inst.num("offset1") * stride)

    def step(w: Wave) -> None:
        if w.ex:
            a, m = w.active(ai), w.exm
            w.lds.store(w, a + first, stored_bytes(w, lower, m, nb))
            w.lds.store(w, a + second, stored_bytes(w, upper, m, nb))

    return step


def _transposed16(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw.view(u16).reshape(4, 4, 16).transpose(0, 2, 1)).reshape(64, 4).view(u8)


def _transposed8(raw: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(raw.reshape(4, 8, 16).transpose(0, 2, 1)).reshape(64, 8)


def _transposed4(raw: np.ndarray) -> np.ndarray:
    x = np.stack([raw & 15, raw >> 4], -1).reshape(4, 16, 16).transpose(0, 2, 1).reshape(64, 8, 2)
    return (x[..., 0] | (x[..., 1] << 4)).astype(u8)


def _transposed6(raw: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(raw, axis=1, bitorder="little").reshape(4, 16, 16, 6).transpose(0, 2, 1, 3)
    return np.packbits(np.ascontiguousarray(bits).reshape(64, 96), axis=1, bitorder="little")


def _read_transposed(
    nb: int, transposed: Callable[[np.ndarray], np.ndarray], target: Target, inst: Instruction
) -> Step:
    """Each group of 16 lanes reads a matrix, row after row, and gets its columns."""
    dst, ai, offset = inst.ops[0].index, inst.ops[1].index, u32(inst.num("offset"))

    def step(w: Wave) -> None:
        if not w.full:
            raise EmuError("transposing LDS read with inactive lanes")
        raw = w.lds.load(w, w.V[ai] + offset, nb)
        write_loaded(w, dst, w.exm, transposed(raw), None)

    return step


def _atomic(t: Any, combine: Callable[[Any, Any], Any], returns: bool, target: Target, inst: Instruction) -> Step:
    """Lane after lane. Atomics of several waves on one address are no race; a plain access besides them goes unseen."""
    o, offset = inst.ops, inst.num("offset")
    dst, ai, data = (o[0].index, o[1].index, o[2].index) if returns else (None, o[0].index, o[1].index)

    def step(w: Wave) -> None:
        for lane in np.flatnonzero(w.exm):
            a = (int(w.V[ai, lane]) + offset) & M32
            if a % 4:
                raise EmuError(f"LDS atomic at the unaligned byte {a}")
            if a + 4 > w.lds.size:
                raise EmuError(f"LDS access out of bounds: byte {a}+4 of {w.lds.size}")
            w.lds.require_written(w, a, 4)
            old = w.lds.data[a : a + 4].view(t)[0]
            w.lds.data[a : a + 4] = np.array([combine(old, w.V[data, lane].view(t))], t).view(u8)
            if dst is not None:
                w.V[dst, lane] = old.view(u32)

    return step


def _all_opcodes() -> dict[str, Builder]:
    found: dict[str, Builder] = {"ds_nop": lambda target, inst: nothing}
    found |= {f"ds_read_{name}": partial(_read, *LOADS[like]) for name, like in _READS.items()}
    found |= {f"ds_write_{name}": partial(_write, *STORES[like]) for name, like in _WRITES.items()}
    for nb in (4, 8):
        for far, stride in (("", nb), ("st64", 64 * nb)):
            found[f"ds_read2{far}_b{8 * nb}"] = partial(_read2, nb, stride)
            found[f"ds_write2{far}_b{8 * nb}"] = partial(_write2, nb, stride)
    transposing = {
        "b64_tr_b16": _transposed16,
        "b64_tr_b8": _transposed8,
        "b64_tr_b4": _transposed4,
        "b96_tr_b6": _transposed6,
    }
    for name, fn in transposing.items():
        found[f"ds_read_{name}"] = partial(_read_transposed, int(name[1:3]) // 8, fn)
    for returns in (False, True):
        rtn = "rtn_" if returns else ""
        for suffix, t in {"u32": u32, "i32": i32, "f32": f32}.items():
            found[f"ds_max_{rtn}{suffix}"] = partial(_atomic, t, max, returns)
            found[f"ds_min_{rtn}{suffix}"] = partial(_atomic, t, min, returns)
        found[f"ds_add_{rtn}u32"] = partial(_atomic, u32, operator.add, returns)
        found[f"ds_add_{rtn}f32"] = partial(_atomic, f32, operator.add, returns)
        found[f"ds_sub_{rtn}u32"] = partial(_atomic, u32, operator.sub, returns)
        for name, fn in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
            found[f"ds_{name}_{rtn}b32"] = partial(_atomic, u32, fn, returns)
    return found


FAMILY = Family("LDS", _all_opcodes(), frozenset({"offset", "offset0", "offset1"}))
