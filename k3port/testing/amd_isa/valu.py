"""Vector instructions that are a function of their sources: the table format and the step that runs an entry.

The step applies what an encoding may add: source and output modifiers (``neg``, ``abs``, ``omod``, ``clamp``), op_sel,
DPP and SDWA. CDNA3 ISA document, section "Vector ALU operations".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3port.testing.amd_isa.build import Builder, Target
from k3port.testing.amd_isa.core import M32, NUMPY_TYPES, WIDE, Array, EmuError, Reader, Step, f32, f64, i32, i64, u32
from k3port.testing.amd_isa.dpp_sdwa import dpp_enabled, dpp_pattern, sdwa_merge, source
from k3port.testing.amd_isa.mode import saturated16
from k3port.testing.amd_isa.operands import reader, to_rows
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.wave import Wave

Function = Callable[..., Array]
_FLOATS = ("f32", "f16", "f64")
_POLES = ("v_rcp_f16", "v_rsq_f16", "v_log_f16")
_OMOD = {("mul", "2"): 2.0, ("mul", "4"): 4.0, ("div", "2"): 0.5}


@dataclass(frozen=True)
class Entry:
    """What one opcode computes.

    ``sources`` are types; ``D`` reads the destination. ``noisy`` takes the place of ``fn`` where hardware is allowed an
    error of one ulp and the caller asked for it.
    """

    dst: str
    sources: tuple[str, ...]
    fn: Function
    noisy: Function | None = None


class Table:
    """A family of opcodes: ``table("v_a v_b", "u32", "u32 u32", function)``."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}

    def __call__(self, names: str, dst: str, sources: str, fn: Function, noisy: Function | None = None) -> None:
        for name in names.split():
            if name in self.entries:
                raise ValueError(f"{name} is defined twice")
            self.entries[name] = Entry(dst, tuple(sources.split()), fn, noisy)

    def opcodes(self) -> dict[str, Builder]:
        return {name: _builder(entry) for name, entry in self.entries.items()}


def _builder(entry: Entry) -> Builder:
    return lambda target, inst: build(entry, target, inst)


def nearest(x: Array) -> Array:
    """f64 -> f32."""
    return np.asarray(x, f64).astype(f32)


def one_ulp(x: Array) -> Array:
    """f64 -> f32: the nearest, or (chosen by a hash of the value) the neighbour beyond the exact number."""
    x = np.asarray(x, f64)
    r = x.astype(f32)
    other = np.nextafter(r, np.where(x > r, f32(np.inf), f32(-np.inf)))
    pick = ((r.view(u32) * u32(2654435761)) >> u32(13)) & u32(1)
    return np.where((pick == 1) & (x != r) & np.isfinite(r) & (np.abs(r) > f32(1e-37)), other, r)


def _saturating(inst: Instruction, dst: str) -> Function:
    """Integer addition and subtraction with ``clamp``."""
    base = inst.base
    sign = -1 if "sub" in base else 1
    if base in ("v_add_u32", "v_sub_u32", "v_add_u16", "v_sub_u16"):
        top, nt = 0xFFFF if dst == "u16" else M32, NUMPY_TYPES[dst]
        return lambda a, c: np.clip(a.astype(i64) + sign * c.astype(i64), 0, top).astype(nt)
    if base in ("v_add_i32", "v_sub_i32"):
        return lambda a, c: (
            np.clip(a.view(i32).astype(i64) + sign * c.view(i32).astype(i64), -(2**31), 2**31 - 1).astype(i32).view(u32)
        )
    raise EmuError("integer clamp")


def _output(inst: Instruction, dst: str) -> Function | None:
    """``omod`` and ``clamp`` of a floating result."""
    scale = next((f for (key, value), f in _OMOD.items() if inst.mods.get(key) == value), None)
    clamp = "clamp" in inst.mods and dst in _FLOATS
    if scale is None and not clamp:
        return None
    nt = NUMPY_TYPES[dst]

    def change(r: Array) -> Array:
        r = np.asarray(r)
        if scale is not None:
            r = r * nt(scale)
        return np.where(np.isnan(r), nt(0), np.clip(r, nt(0), nt(1))).astype(nt) if clamp else r

    return change


def _sources(entry: Entry, inst: Instruction) -> list[Reader]:
    readers, k = [], 0
    for t in entry.sources:
        if t == "D":
            readers.append(reader(inst.ops[0], entry.dst))
        else:
            readers.append(source(inst, k, inst.ops[1 + k], t))
            k += 1
    return readers


def build(entry: Entry, target: Target, inst: Instruction) -> Step:
    """The step of an instruction whose opcode is in a table."""
    dst, row = entry.dst, inst.ops[0].index
    fn = entry.noisy if target.ulp_noise and entry.noisy is not None else entry.fn
    if "clamp" in inst.mods and dst not in _FLOATS:
        fn = _saturating(inst, dst)
    readers = _sources(entry, inst)
    change = _output(inst, dst)
    pole = inst.base in _POLES
    upper = dst in ("f16", "u16", "i16") and inst.enc != "sdwa" and inst.bits("op_sel", 4, 0)[len(entry.sources)] == 1
    merge = sdwa_merge(inst)
    dpp, half = inst.enc.endswith("dpp"), dst == "f16"
    if not (upper or merge or dpp or change):
        return _half(fn, readers, row, pole) if dst == "f16" else _plain(fn, readers, dst, row)
    mask: Callable[[Wave], np.ndarray] | None = None
    if dpp:
        readers[0], mask = _dpp(entry, inst)

    def step(w: Wave) -> None:
        args = [get(w) for get in readers]
        r = fn(*args)
        if half and w.saturates:
            r = saturated16(r, args, pole)
        rows = to_rows(r if change is None else change(r), dst)
        if upper:
            rows = [(w.V[row] & u32(0xFFFF)) | (rows[0] << u32(16))]
        elif merge is not None:
            rows = [merge(rows[0], w.V[row])]
        where = mask(w) if mask is not None else None
        for k, x in enumerate(rows):
            w.put(row + k, x, where)

    return step


def _half(fn: Function, readers: list[Reader], row: int, pole: bool) -> Step:
    """An f16 result in the lower half, without detours."""

    def step(w: Wave) -> None:
        args = [get(w) for get in readers]
        r = fn(*args)
        w.put(row, to_rows(saturated16(r, args, pole) if w.saturates else r, "f16")[0])

    return step


def _dpp(entry: Entry, inst: Instruction) -> tuple[Reader, Callable[[Wave], np.ndarray]]:
    """Source 0, and the lanes written. Lanes without a source read zero and are written only with bound_ctrl."""
    lane, valid = dpp_pattern(inst.mods)
    enabled = dpp_enabled(inst)
    i, zero = inst.ops[1].index, "bound_ctrl" in inst.mods

    def raw(w: Wave) -> np.ndarray:
        return np.where(valid & w.exm[lane], w.V[i][lane], u32(0))

    def mask(w: Wave) -> np.ndarray:
        return enabled & w.exm if zero else enabled & w.exm & valid & w.exm[lane]

    return reader(inst.ops[1], entry.sources[0], False, raw), mask


def _plain(fn: Function, readers: list[Reader], dst: str, row: int) -> Step:
    """The common case, without detours."""
    if dst in ("u32", "i32", "f32") and len(readers) == 1:
        (a,) = readers

        def one(w: Wave) -> None:
            w.put(row, fn(a(w)))

        return one
    if dst in ("u32", "i32", "f32") and len(readers) == 2:
        a, b = readers

        def two(w: Wave) -> None:
            w.put(row, fn(a(w), b(w)))

        return two
    if dst in ("u32", "i32", "f32") and len(readers) == 3:
        a, b, c = readers

        def three(w: Wave) -> None:
            w.put(row, fn(a(w), b(w), c(w)))

        return three
    wide = dst in WIDE

    def step(w: Wave) -> None:
        rows: list[Any] = to_rows(fn(*[get(w) for get in readers]), dst)
        w.put(row, rows[0])
        if wide:
            w.put(row + 1, rows[1])

    return step
