"""Global memory and LDS with the checks: bounds, and LDS races between the waves of a workgroup."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3port.testing.amd_isa.core import EmuError, i64, u8, u64
from k3port.testing.amd_isa.wave import Wave

LDS_POISON = 0xFF
"""What LDS and scratch hold before they are written: NaN in every float format with NaNs, -1 as an integer."""


def _pieces(flat: np.ndarray, offsets: np.ndarray, nb: int) -> tuple[np.ndarray, Any, int]:
    """(view, index, pieces): ``view[index]`` are the ``nb`` elements at each offset, in pieces as large as alignment
    allows, since gathering rows is several times faster than gathering elements."""
    bits = int(np.bitwise_or.reduce(offsets)) | nb
    unit = min(bits & -bits, 16)
    rows = flat[: len(flat) // unit * unit].reshape(-1, unit)
    first = offsets // unit
    count = nb // unit
    return rows, first if count == 1 else first[:, None] + np.arange(count), count


@dataclass(frozen=True)
class Region:
    """Memory of one tensor (its whole storage)."""

    start: int
    end: int
    data: np.ndarray
    name: str


class GlobalMemory:
    """The host memory behind the tensors passed to the kernel; nothing else can be reached."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, ptr: int, nbytes: int, name: str) -> None:
        if nbytes <= 0 or any(r.start <= ptr and r.end >= ptr + nbytes for r in self.regions):
            return
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))
        self.regions.append(Region(ptr, ptr + nbytes, data, name))

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
        out = np.empty((len(a), nb), u8)
        for r, m in self._groups(a, nb):
            view, index, _ = _pieces(r.data, (a[m] - u64(r.start)).astype(np.intp), nb)
            out[m] = view[index].reshape(-1, nb)
        return out

    def load_scalar(self, a: int, nb: int) -> np.ndarray:
        r = self._find(a, a + nb)
        if r is None:
            raise EmuError(self._outside(a, nb))
        return r.data[a - r.start : a - r.start + nb]

    def store(self, a: np.ndarray, data: np.ndarray) -> None:
        """Bytes (n, nb) to addresses (n); of equal addresses the last one wins."""
        nb = data.shape[1]
        for r, m in self._groups(a, nb):
            view, index, count = _pieces(r.data, (a[m] - u64(r.start)).astype(np.intp), nb)
            d = data[m]
            view[index] = d if count == 1 else d.reshape(len(d), count, -1)


class LocalMemory:
    """LDS of one workgroup.

    Race check, per byte and between two barriers: what one wave wrote must not be read by another, nor overwritten with
    another value, and what one wave read must not be overwritten with another value by another. Each byte remembers a
    tag of its last writer and of its readers: barrier interval and wave in one number, or -1. A read of a byte without
    a writer is reported too: the pattern it gives is an ordinary number in integers and some fp8 formats.
    """

    _INTERVAL, _MANY = 1024, 1023

    def __init__(self, size: int, check: bool = True):
        self.data = np.full(size, LDS_POISON, u8)
        self.size, self.check, self.epoch = size, check, 0
        self.races: list[str] = []
        self._written, self._read = np.full(size, -1, i64), np.full(size, -1, i64)
        # Waves that wrote or read since the barrier, as bits: with no other wave among them there is nothing to check.
        self._writers = self._readers = 0
        self._filled = 0
        """All bytes below had been written at the last barrier."""

    def barrier(self) -> None:
        """All waves of the workgroup have met."""
        self.epoch += 1
        self._writers = self._readers = 0
        while self.check and self._filled < self.size:
            hole = self._written[self._filled : self._filled + 4096] < 0
            first = int(hole.argmax())
            if hole[first]:
                self._filled += first
                break
            self._filled += len(hole)

    def _offsets(self, a: np.ndarray, nb: int) -> np.ndarray:
        off = a.astype(np.intp)
        if len(off) and (last := int(off.max())) + nb > self.size:
            raise EmuError(f"LDS access out of bounds: byte {last}+{nb} of {self.size}")
        return off

    def _others(self, tags: np.ndarray, w: Wave) -> np.ndarray:
        start = self.epoch * self._INTERVAL
        return (tags >= start) & (tags != start + w.wid)

    def _report(self, kind: str, w: Wave) -> None:
        self.races.append(f"{kind} at {w.where()}")

    def load(self, w: Wave, a: np.ndarray, nb: int) -> np.ndarray:
        """Addresses (n) -> bytes (n, nb)."""
        off = self._offsets(a, nb)
        if not len(off):
            return np.empty((0, nb), u8)
        view, index, _ = _pieces(self.data, off, nb)
        if self.check:
            me, start = 1 << w.wid, self.epoch * self._INTERVAL
            others = self._writers & ~me
            if others or int(off.max()) + nb > self._filled:
                written = self._tags(self._written, view)[index]
                if written.min() < 0:
                    self._report("read of LDS that was never written", w)
                if others and self._others(written, w).any():
                    self._report("read-after-write", w)
            read = self._tags(self._read, view)
            if self._readers & ~me:
                read[index] = np.where(self._others(read[index], w), start + self._MANY, start + w.wid)
            else:
                read[index] = start + w.wid
            self._readers |= me
        return view[index].reshape(-1, nb)

    @staticmethod
    def _tags(tags: np.ndarray, view: np.ndarray) -> np.ndarray:
        return tags[: view.size].reshape(view.shape)

    def store(self, w: Wave, a: np.ndarray, data: np.ndarray) -> None:
        """Bytes (n, nb) to addresses (n)."""
        nb = data.shape[1]
        off = self._offsets(a, nb)
        if not len(off):
            return
        view, index, count = _pieces(self.data, off, nb)
        if count > 1:
            data = data.reshape(len(data), count, -1)
        if self.check:
            me = 1 << w.wid
            written = self._tags(self._written, view)
            if (self._writers | self._readers) & ~me:
                changed = view[index] != data
                if self._writers & ~me and (changed & self._others(written[index], w)).any():
                    self._report("write-after-write", w)
                if self._readers & ~me and (changed & self._others(self._tags(self._read, view)[index], w)).any():
                    self._report("write-after-read", w)
            written[index] = self.epoch * self._INTERVAL + w.wid
            self._writers |= me
        view[index] = data

    def require_written(self, w: Wave, first: int, nb: int) -> None:
        """Reports an atomic on bytes that have no value yet."""
        if self.check and self._written[first : first + nb].min() < 0:
            self._report("atomic on LDS that was never written", w)

    def announce(self, w: Wave, a: np.ndarray, nb: int) -> None:
        """An asynchronous copy to these bytes is issued: it may land at any moment from now."""
        off = self._offsets(a, nb)
        if self.check and len(off):
            view, index, _ = _pieces(self._read, off, nb)
            if self._others(view[index], w).any():
                self._report("asynchronous write-after-read", w)
