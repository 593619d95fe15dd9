"""What every instruction family shares: the error, lane masks, register numbers, small integer helpers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from k3port.testing.amd_isa.wave import Wave

u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64

Array = Any
"""One number per lane, or a scalar that numpy broadcasts to the lanes."""
Step = Callable[["Wave"], int | None]
"""A translated instruction: changes the wave; gives None, the next instruction, or one of the two signals below."""
Reader = Callable[["Wave"], Any]
"""Reads one operand of a wave."""

END, BARRIER = -1, -2
WAVE_SIZE = 64
M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
LANES = np.arange(WAVE_SIZE)
VCC, M0, EXEC = 106, 124, 126
"""Numbers of the special registers among the scalar ones."""
ACCUMULATION_BASE = 256
"""Row of ``Wave.V`` where the accumulation registers begin."""

NUMPY_TYPES: dict[str, Any] = {
    "f32": f32, "u32": u32, "i32": i32, "f16": f16, "u16": u16, "i16": i16, "u64": u64, "i64": i64, "f64": f64,
}  # fmt: skip
WIDE = ("u64", "i64", "f64")
HALF = ("f16", "u16", "i16", "bf16")


class EmuError(RuntimeError):
    """The emulated kernel did something that hardware would not forgive, or that is not modelled."""


_masks: dict[int, np.ndarray] = {}


def int2mask(x: int) -> np.ndarray:
    """64 bits -> 64 booleans, lane 0 first. The result is shared: do not write to it."""
    mask = _masks.get(x)
    if mask is None:
        mask = np.unpackbits(np.frombuffer(int(x).to_bytes(8, "little"), u8), bitorder="little").astype(bool)
        if len(_masks) > 20_000:
            _masks.clear()
        _masks[x] = mask
    return mask


def mask2int(b: np.ndarray) -> int:
    """64 booleans -> 64 bits."""
    return int.from_bytes(np.packbits(b, bitorder="little").tobytes(), "little")


def bc(x: Array) -> Array:
    """A scalar, once per lane."""
    x = np.asarray(x)
    return x if x.ndim else np.full(WAVE_SIZE, x)


def sx(x: int, bits: int) -> int:
    """The lowest bits as a signed integer."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def nothing(w: Wave) -> None:
    """The step of an instruction that has no effect here."""
    return
