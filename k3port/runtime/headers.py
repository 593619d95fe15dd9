"""Headers of safetensors files: 8 bytes of length, JSON, then the tensors without gaps. Weight bytes are never read.

The safetensors package opens a file or stops at its first fault. A check before 1.5 TB are loaded has to list every
fault of every file, and the loader has to give pages back that were read: that is why both read the format themselves.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from k3port.model.json_file import LFS_MARKER
from k3port.model.text_tensors import DTYPE_BITS

_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format itself."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies."""

    stored_name: str
    """The name in the file, before normalisation."""
    file: str
    offset: int
    """First byte, from the start of the file."""
    num_bytes: int
    dtype: str
    """As safetensors names it: BF16, F32, U8 ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FileHeader:
    """What one file holds, or what is wrong with it.

    ``faults`` are complete sentences that start with the file's name. ``tensors`` is empty where they could not be
    read (``readable`` is False then), and complete for a file that is merely cut short.
    """

    file: str
    num_bytes: int
    tensors: tuple[StoredTensor, ...] = ()
    faults: tuple[str, ...] = ()
    readable: bool = True


def read_header(path: Path) -> FileHeader:
    """Reads and checks the header of one file. Never raises for a damaged file: see :class:`FileHeader`."""
    name = path.name
    try:
        with path.open("rb") as file:
            num_bytes = path.stat().st_size
            start = file.read(len(LFS_MARKER))
            if num_bytes == 0:
                return _unreadable(name, 0, "is empty")
            if start == LFS_MARKER:
                return _unreadable(name, num_bytes, "is a git-LFS pointer, not the weights: run `git lfs pull`")
            if num_bytes < 8:
                return _unreadable(name, num_bytes, f"is truncated: {num_bytes} bytes, not even a header length")
            (length,) = struct.unpack("<Q", start[:8])
            if length > _MAX_HEADER_BYTES:
                return _unreadable(name, num_bytes, f"has a corrupt header: it claims to be {length} bytes long")
            if 8 + length > num_bytes:
                return _unreadable(
                    name, num_bytes, f"is truncated inside its header: {8 + length} bytes needed, {num_bytes} there"
                )
            file.seek(8)
            raw = file.read(length)
    except FileNotFoundError:
        return _unreadable(name, 0, "is missing")
    except OSError as exc:
        return _unreadable(name, 0, f"cannot be read: {exc.strerror or exc}")
    try:
        table = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        return _unreadable(name, num_bytes, f"has a corrupt header: {exc}")
    if not isinstance(table, dict):
        return _unreadable(name, num_bytes, "has a corrupt header: it is not a JSON object")
    table.pop("__metadata__", None)
    return _check_entries(name, num_bytes, 8 + length, table)


def _check_entries(name: str, num_bytes: int, data_start: int, table: dict[str, Any]) -> FileHeader:
    tensors, faults = [], []
    for stored_name, entry in table.items():
        fault = _entry_fault(entry)
        if fault:
            faults.append(f"{name} has a corrupt header: {stored_name} {fault}")
            continue
        begin, end = entry["data_offsets"]
        tensors.append(
            StoredTensor(stored_name, name, data_start + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
        )
    if faults:
        return FileHeader(name, num_bytes, (), tuple(faults), readable=False)
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    position = data_start
    for tensor in tensors:
        if tensor.offset != position:
            kind = "overlaps the tensor before it" if tensor.offset < position else "leaves a gap before it"
            faults.append(
                f"{name} has a corrupt header: {tensor.stored_name} {kind} "
                f"(starts at byte {tensor.offset - data_start}, expected {position - data_start})"
            )
            break  # everything after the first wrong offset is shifted: one message says it
        position += tensor.num_bytes
    else:
        if position > num_bytes:
            faults.append(f"{name} is truncated: its header promises {position} bytes, the file has {num_bytes}")
        elif position < num_bytes:
            faults.append(
                f"{name} has {num_bytes - position} bytes that no tensor owns (its header ends at {position})"
            )
    return FileHeader(name, num_bytes, tuple(tensors), tuple(faults))


def _entry_fault(entry: object) -> str:
    if not isinstance(entry, dict):
        return "has no entry object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"has the unknown dtype {dtype!r}"
    if not _are_sizes(shape):
        return f"has the shape {shape!r}"
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] < offsets[0]:
        return f"has the offsets {offsets!r}"
    needed = (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8
    if offsets[1] - offsets[0] != needed:
        return f"spans {offsets[1] - offsets[0]} bytes, but {dtype} {shape} needs {needed}"
    return ""


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    if not isinstance(values, list):
        return False
    for value in values:  # a plain loop: this runs a million times for Kimi K3
        if type(value) is not int or value < 0:
            return False
    return True


def _unreadable(name: str, num_bytes: int, what: str) -> FileHeader:
    return FileHeader(name, num_bytes, (), (f"{name} {what}",), readable=False)
