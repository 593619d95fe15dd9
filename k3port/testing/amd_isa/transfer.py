"""Between memory bytes and vector registers: widths, sign extension, half-register loads, direct-to-LDS copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3port.testing.amd_isa.core import LANES, M0, i8, i16, i32, u8, u16, u32
from k3port.testing.amd_isa.wave import Wave

Convert = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(loaded 8- or 16-bit numbers, old register of the same lanes) -> new register."""


def _zero(x: np.ndarray, old: np.ndarray) -> np.ndarray:
    return x.astype(u32)


def _sign(x: np.ndarray, old: np.ndarray) -> np.ndarray:
    return x.view(i8 if x.dtype == u8 else i16).astype(i32).view(u32)


def _low(x: np.ndarray, old: np.ndarray) -> np.ndarray:
    return (old & u32(0xFFFF0000)) | x.astype(u32)


def _high(x: np.ndarray, old: np.ndarray) -> np.ndarray:
    return (old & u32(0xFFFF)) | (x.astype(u32) << u32(16))


def _low_sign(x: np.ndarray, old: np.ndarray) -> np.ndarray:
    return (old & u32(0xFFFF0000)) | (_sign(x, old) & u32(0xFFFF))


def _high_sign(x: np.ndarray, old: np.ndarray) -> np.ndarray:
    return (old & u32(0xFFFF)) | (_sign(x, old) << u32(16))


LOADS: dict[str, tuple[int, Convert | None]] = {
    "dword": (4, None),
    "dwordx2": (8, None),
    "dwordx3": (12, None),
    "dwordx4": (16, None),
    "ubyte": (1, _zero),
    "sbyte": (1, _sign),
    "ushort": (2, _zero),
    "sshort": (2, _sign),
    "short_d16": (2, _low),
    "short_d16_hi": (2, _high),
    "ubyte_d16": (1, _low),
    "ubyte_d16_hi": (1, _high),
    "sbyte_d16": (1, _low_sign),
    "sbyte_d16_hi": (1, _high_sign),
}
"""Bytes per lane, and how less than a register is put into one."""
STORES: dict[str, tuple[int, bool]] = {
    "dword": (4, False),
    "dwordx2": (8, False),
    "dwordx3": (12, False),
    "dwordx4": (16, False),
    "byte": (1, False),
    "short": (2, False),
    "byte_d16_hi": (1, True),
    "short_d16_hi": (2, True),
}
"""Bytes per lane, and whether they come from the upper half of the register."""


def write_loaded(w: Wave, dst: int, m: np.ndarray, data: np.ndarray, convert: Convert | None) -> None:
    """Bytes of the lanes in mask ``m`` (lanes, bytes) into their registers."""
    if convert is None:
        v = np.ascontiguousarray(data).view(u32)
        if m is w.exm and w.full:
            w.V[dst : dst + v.shape[1]] = v.T
        else:
            for k in range(v.shape[1]):
                w.V[dst + k][m] = v[:, k]
        return
    x = np.ascontiguousarray(data).view(u8 if data.shape[1] == 1 else u16)[:, 0]
    w.V[dst][m] = convert(x, w.V[dst][m])


def stored_bytes(w: Wave, i: int, m: np.ndarray, nb: int, upper: bool = False) -> np.ndarray:
    """Registers of the lanes in mask ``m`` -> bytes (lanes, nb)."""
    if upper:
        return (w.V[i][m] >> u32(16)).view(u8).reshape(-1, 4)[:, :nb]
    n = (nb + 3) // 4
    x = np.ascontiguousarray(w.V[i : i + n].T if m is w.exm and w.full else w.V[i : i + n][:, m].T)
    return x.view(u8).reshape(-1, 4 * n)[:, :nb]


def copy_to_lds(w: Wave, m: np.ndarray, data: np.ndarray, offset: int, convert: Convert | None) -> None:
    """A direct-to-LDS load: lane ``l`` writes at ``M0 + offset + l * bytes``, when the s_waitcnt that covers it runs.

    A byte or half word is extended to a dword first, as for a register. The race check sees the copy twice: when it is
    issued, against readers, and when it lands.
    """
    if convert is not None:
        x = np.ascontiguousarray(data).view(u8 if data.shape[1] == 1 else u16)[:, 0]
        data = np.ascontiguousarray(convert(x, np.zeros(len(x), u32))).view(u8).reshape(-1, 4)
    a = (w.r32(M0) & 0xFFFFF) + offset + LANES[m] * data.shape[1]
    w.lds.announce(w, a, data.shape[1])
    w.vmq[-1] = lambda: w.lds.store(w, a, data)
