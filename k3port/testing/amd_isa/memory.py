"""Global memory and LDS with the checks: bounds, and LDS races between the waves of a workgroup."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3port.testing.amd_isa.core import EmuError, u8, u16, u32, u64
from k3port.testing.amd_isa.wave import Wave

LDS_POISON = 0xFF
"""What LDS and scratch hold before they are written: NaN in every float format with NaNs, -1 as an integer."""


_UNITS: dict[int, Any] = {1: u8, 2: u16, 4: u32, 8: u64}


def _pieces(offsets: np.ndarray, nb: int, alignment: int = 0) -> tuple[int, np.ndarray]:
    """(unit, index): the ``nb`` bytes at each offset are the numbers ``index`` of memory seen as numbers of ``unit``
    bytes, the largest that the offsets and ``alignment`` (0: any) allow: few large numbers are gathered fastest."""
    bits = int(np.bitwise_or.reduce(offsets)) | nb | alignment
    unit = min(bits & -bits, 8)
    first, count = offsets >> (unit.bit_length() - 1), nb // unit
    return unit, first if count == 1 else first[:, None] + np.arange(count)


class _Views:
    """One piece of memory as numbers of 1, 2, 4 and 8 bytes."""

    def __init__(self, flat: np.ndarray):
        self.flat = flat
        self._views: dict[int, np.ndarray] = {}

    def __getitem__(self, unit: int) -> np.ndarray:
        view = self._views.get(unit)
        if view is None:
            view = self._views[unit] = self.flat[: len(self.flat) // unit * unit].view(_UNITS[unit])
        return view


def _gathered(view: np.ndarray, index: np.ndarray, nb: int) -> np.ndarray:
    return view.take(index).view(u8).reshape(-1, nb)


def _scatter(view: np.ndarray, index: np.ndarray, data: np.ndarray) -> None:
    """Of equal places the last one wins."""
    view[index] = np.ascontiguousarray(data).view(view.dtype).reshape(index.shape)


@dataclass(frozen=True)
class Region:
    """Memory of one tensor (its whole storage)."""

    start: int
    end: int
    data: np.ndarray
    name: str
    views: _Views


class GlobalMemory:
    """The host memory behind the tensors passed to the kernel; nothing else can be reached."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, ptr: int, nbytes: int, name: str) -> None:
        if nbytes <= 0 or any(r.start <= ptr and r.end >= ptr + nbytes for r in self.regions):
            return
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))
        self.regions.append(Region(ptr, ptr + nbytes, data, name, _Views(data)))

    def _find(self, lo: int, hi: int) -> Region | None:
        for r in self.regions:
            if r.start <= lo and hi <= r.end:
                return r
        return None

    def _groups(self, a: np.ndarray, nb: int) -> Iterator[tuple[Region, Any]]:
        """(region, lanes in it) until all addresses have one.

        Raises:
            EmuError: an address is in none; it names the closest tensor.
        """
        r = self._find(int(a.min()), int(a.max()) + nb)
        if r is not None:
            yield r, slice(None)
            return
        todo = np.ones(len(a), bool)
        for r in self.regions:
            if r.end - r.start >= nb:
                m = (a >= u64(r.start)) & (a <= u64(r.end - nb)) & todo
                if m.any():
                    yield r, m
                    todo &= ~m
        if todo.any():
            raise EmuError(self._outside(int(a[todo][0]), nb))

    def _outside(self, x: int, nb: int) -> str:
        near = min(self.regions, key=lambda r: min(abs(x - r.start), abs(x - r.end)), default=None)
        where = (
            ""
            if near is None
            else f" (offset {x - near.start} of {near.name}, which has {near.end - near.start} bytes)"
        )
        return f"global access out of bounds at 0x{x:x}, {nb} bytes{where}"

    def load(self, a: np.ndarray, nb: int) -> np.ndarray:
        """Addresses (n) -> bytes (n, nb)."""
        if (r := self._find(int(a.min()), int(a.max()) + nb)) is not None:
            return self._load(r, a, nb)
        out = np.empty((len(a), nb), u8)
        for r, m in self._groups(a, nb):
            out[m] = self._load(r, a[m], nb)
        return out

    @staticmethod
    def _load(r: Region, a: np.ndarray, nb: int) -> np.ndarray:
        unit, index = _pieces((a - u64(r.start)).astype(np.intp), nb, r.start)
        return _gathered(r.views[unit], index, nb)

    def load_scalar(self, a: int, nb: int) -> np.ndarray:
        r = self._find(a, a + nb)
        if r is None:
            raise EmuError(self._outside(a, nb))
        return r.data[a - r.start : a - r.start + nb]

    def store(self, a: np.ndarray, data: np.ndarray) -> None:
        """Bytes (n, nb) to addresses (n); of equal addresses the last one wins."""
        nb = data.shape[1]
        for r, m in self._groups(a, nb):
            unit, index = _pieces((a[m] - u64(r.start)).astype(np.intp), nb, r.start)
            _scatter(r.views[unit], index, data[m])


@dataclass(frozen=True)
class _Plan:
    """An access pattern of LDS: the end of its last byte, and its places as :func:`_pieces` gives them."""

    end: int
    unit: int
    index: np.ndarray


_plans: dict[tuple[bytes, str, int], _Plan] = {}
"""Loops, waves and workgroups repeat their patterns."""
_MOST_PLANS = 8192


def _plan(a: np.ndarray, nb: int) -> _Plan:
    key = a.tobytes(), a.dtype.char, nb
    found = _plans.get(key)
    if found is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        off = a.astype(np.intp)
        found = _plans[key] = _Plan(int(off.max()) + nb, *_pieces(off, nb))
    return found


class LocalMemory:
    """LDS of one workgroup.

    Race check, per byte and between two barriers: what one wave wrote must not be read by another, nor overwritten with
    another value, and what one wave read must not be overwritten with another value by another. Each byte remembers its
    last writer since the barrier (the number of the wave plus one, or 0), and for each wave whether it has read it. A
    read of a byte without a writer is reported too: the pattern it gives is an ordinary number in integers and some fp8
    formats. A wave that is ``alone`` in its workgroup has no one to race with.
    """

    def __init__(self, size: int, check: bool = True, alone: bool = False):
        self.data = np.full(size, LDS_POISON, u8)
        self.size, self.check, self._alone = size, check, alone
        self.races: list[str] = []
        self._data = _Views(self.data)
        self._ever, self._written = _Views(np.zeros(size, u8)), _Views(np.zeros(size, u8))
        self._read: dict[int, _Views] = {}
        """By wave."""
        # Waves that wrote or read since the barrier, as bits: with no other wave among them there is nothing to check.
        self._writers = self._readers = 0
        self._filled = 0
        """All bytes below had been written at the last barrier."""

    def barrier(self) -> None:
        """All waves of the workgroup have met."""
        if self._writers:
            self._written.flat.fill(0)
        for wid, read in self._read.items():
            if self._readers >> wid & 1:
                read.flat.fill(0)
        self._writers = self._readers = 0
        while self.check and self._filled < self.size:
            hole = self._ever.flat[self._filled : self._filled + 4096] == 0
            first = int(hole.argmax())
            if hole[first]:
                self._filled += first
                break
            self._filled += len(hole)

    def _places(self, a: np.ndarray, nb: int) -> _Plan:
        plan = _plan(a, nb)
        if plan.end > self.size:
            raise EmuError(f"LDS access out of bounds: byte {plan.end - nb}+{nb} of {self.size}")
        return plan

    @staticmethod
    def _tag(w: Wave, unit: int) -> Any:
        """The tag of a wave in each byte of a unit."""
        return _UNITS[unit]((w.wid + 1) * int.from_bytes(b"\1" * unit, "little"))

    def _report(self, kind: str, w: Wave) -> None:
        self.races.append(f"{kind} at {w.where()}")

    def load(self, w: Wave, a: np.ndarray, nb: int) -> np.ndarray:
        """Addresses (n) -> bytes (n, nb)."""
        if not len(a):
            return np.empty((0, nb), u8)
        plan = self._places(a, nb)
        if self.check:
            self._check_load(w, plan)
        return _gathered(self._data[plan.unit], plan.index, nb)

    def _check_load(self, w: Wave, plan: _Plan) -> None:
        unit, index, me = plan.unit, plan.index, 1 << w.wid
        if plan.end > self._filled and not self._ever[unit].take(index).view(u8).all():
            self._report("read of LDS that was never written", w)
        if self._alone:
            return
        if self._writers & ~me and self._written_by_others(w, plan).any():
            self._report("read-after-write", w)
        read = self._read.get(w.wid)
        if read is None:
            read = self._read[w.wid] = _Views(np.zeros(self.size, u8))
        read[unit][index] = self._tag(w, unit)
        self._readers |= me

    def _written_by_others(self, w: Wave, plan: _Plan) -> np.ndarray:
        """Of each byte, in order."""
        tags = self._written[plan.unit].take(plan.index).view(u8).reshape(-1)
        return (tags != 0) & (tags != w.wid + 1)

    def _read_by_others(self, w: Wave, plan: _Plan) -> np.ndarray:
        """Of each byte, in order."""
        waves = [wid for wid in self._read if wid != w.wid and self._readers >> wid & 1]
        tags = [self._read[wid][plan.unit].take(plan.index).view(u8).reshape(-1) for wid in waves]
        return np.logical_or.reduce(tags) if tags else np.zeros(plan.index.size * plan.unit, bool)

    def store(self, w: Wave, a: np.ndarray, data: np.ndarray) -> None:
        """Bytes (n, nb) to addresses (n)."""
        if not len(a):
            return
        plan = self._places(a, data.shape[1])
        unit, index = plan.unit, plan.index
        if self.check:
            me = 1 << w.wid
            if (self._writers | self._readers) & ~me:
                self._check_store(w, plan, data)
            if plan.end > self._filled:
                self._ever[unit][index] = self._tag(w, unit)
            if not self._alone:
                self._written[unit][index] = self._tag(w, unit)
                self._writers |= me
        _scatter(self._data[unit], index, data)

    def _check_store(self, w: Wave, plan: _Plan, data: np.ndarray) -> None:
        me = 1 << w.wid
        changed = (_gathered(self._data[plan.unit], plan.index, data.shape[1]) != data).reshape(-1)
        if self._writers & ~me and (changed & self._written_by_others(w, plan)).any():
            self._report("write-after-write", w)
        if self._readers & ~me and (changed & self._read_by_others(w, plan)).any():
            self._report("write-after-read", w)

    def require_written(self, w: Wave, first: int, nb: int) -> None:
        """Reports an atomic on bytes that have no value yet."""
        if self.check and not self._ever.flat[first : first + nb].all():
            self._report("atomic on LDS that was never written", w)

    def announce(self, w: Wave, a: np.ndarray, nb: int) -> None:
        """An asynchronous copy to these bytes is issued: it may land at any moment from now."""
        if not len(a):
            return
        plan = self._places(a, nb)
        if self.check and self._read_by_others(w, plan).any():
            self._report("asynchronous write-after-read", w)
