"""Atomic operations on global memory. Lanes, waves and workgroups take turns in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3port.testing.amd_isa.core import M32, M64, f16, f32, f64, i32, i64, u8, u16, u32, u64
from k3port.testing.amd_isa.formats import bf16_to_f32, f32_to_bf16
from k3port.testing.amd_isa.wave import Wave

Combine = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Atomic:
    """``combine`` gives the new value from (old, operand), both u32 or u64 bits; None is compare-and-swap."""

    words: int
    combine: Combine | None

    @property
    def nbytes(self) -> int:
        return 4 * self.words


def _float(t: Any, fn: Combine) -> Combine:
    bits = u64 if t is f64 else u32
    return lambda old, v: t(fn(old.view(t), v.view(t))).view(bits)


def _packed_f16(old: Any, v: Any) -> Any:
    return (np.array([old]).view(f16) + np.array([v]).view(f16)).view(u32)[0]


def _packed_bf16(old: Any, v: Any) -> Any:
    total = bf16_to_f32(np.array([old]).view(u16)) + bf16_to_f32(np.array([v]).view(u16))
    return f32_to_bf16(total).view(u32)[0]


def _integers(unsigned: Any, signed: Any, mask: int) -> dict[str, Combine]:
    return {
        "add": lambda old, v: unsigned((int(old) + int(v)) & mask),
        "sub": lambda old, v: unsigned((int(old) - int(v)) & mask),
        "swap": lambda old, v: v,
        "and": lambda old, v: old & v,
        "or": lambda old, v: old | v,
        "xor": lambda old, v: old ^ v,
        "umin": lambda old, v: min(old, v),
        "umax": lambda old, v: max(old, v),
        "smin": lambda old, v: old if old.view(signed) < v.view(signed) else v,
        "smax": lambda old, v: old if old.view(signed) > v.view(signed) else v,
    }


ATOMICS: dict[str, Atomic] = {
    **{name: Atomic(1, fn) for name, fn in _integers(u32, i32, M32).items()},
    **{f"{name}_x2": Atomic(2, fn) for name, fn in _integers(u64, i64, M64).items()},
    "cmpswap": Atomic(1, None),
    "cmpswap_x2": Atomic(2, None),
    "add_f32": Atomic(1, _float(f32, lambda a, b: a + b)),
    "add_f64": Atomic(2, _float(f64, lambda a, b: a + b)),
    "min_f64": Atomic(2, _float(f64, np.fmin)),
    "max_f64": Atomic(2, _float(f64, np.fmax)),
    "pk_add_f16": Atomic(1, _packed_f16),
    "pk_add_bf16": Atomic(1, _packed_bf16),
}


def run_atomic(w: Wave, atomic: Atomic, a: np.ndarray, m: np.ndarray, dst: int | None, data: int) -> None:
    """The atomic of the lanes in mask ``m`` at addresses ``a``; the old values go to ``dst`` unless None."""
    words = atomic.words
    t: Any = u64 if words == 2 else u32
    operands = np.ascontiguousarray(w.V[data : data + 2 * words].T).view(t)
    for lane in np.flatnonzero(m):
        address = a[lane : lane + 1]
        old = w.glob.load(address, 4 * words).view(t)[0, 0]
        value = operands[lane, 0]
        # In a compare-and-swap the operand is followed by what memory must hold.
        new = atomic.combine(old, value) if atomic.combine else (value if old == operands[lane, 1] else old)
        w.glob.store(address, np.array([[new]], t).view(u8))
        if dst is not None:
            w.V[dst : dst + words, lane] = np.array([old], t).view(u32)
