"""How matrices lie in registers: elements of a lane, lane groups of an operand, rows and columns of the result.

CDNA3 ISA document, "Matrix Arithmetic Instructions", and its CDNA4 counterpart for the f8f6f4 shapes. An operand of an
M x K block: lane ``l`` holds row ``l mod M``; groups of lanes hold consecutive pieces of K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from k3port.testing.amd_isa.build import Target
from k3port.testing.amd_isa.core import LANES, EmuError, Reader, f16, f32, f64, i8, i32, i64, u8, u16, u32, u64
from k3port.testing.amd_isa.formats import BF6, BF8_OCP, FP4, FP6, FP8_OCP, bf16_to_f32
from k3port.testing.amd_isa.operands import imm_bits
from k3port.testing.amd_isa.text import Operand

NUMBER = {"f32": f32, "i32": i32, "f64": f64}


@dataclass(frozen=True)
class Shape:
    """``blocks`` products of M x K by K x N with results of type ``out`` (f32, i32, f64)."""

    out: str
    m: int
    n: int
    k: int
    blocks: int = 1

    @property
    def results(self) -> int:
        """Results per lane."""
        return self.m * self.n * self.blocks // 64


def _round_xf32(r: np.ndarray) -> np.ndarray:
    return (r + u32(0xFFF) + ((r >> u32(13)) & u32(1))) & u32(0xFFFFE000)


def _nibbles(r: np.ndarray) -> np.ndarray:
    x = r.view(u8)
    return np.stack([x & 15, x >> 4], -1).reshape(64, -1)


def _six_bits(r: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(r.view(u8), axis=1, bitorder="little")[:, :192].reshape(64, 32, 6)
    return (bits * (1 << np.arange(6))).sum(-1)


_DECODE = {
    "f16": lambda r, t: r.view(f16).astype(f64),
    "bf16": lambda r, t: bf16_to_f32(r.view(u16)).astype(f64),
    "f32": lambda r, t: r.view(f32).astype(f64),
    "xf32": lambda r, t: _round_xf32(r).view(f32).astype(f64),
    "f64": lambda r, t: r.view(f64),
    "i8": lambda r, t: r.view(i8).astype(i64),
    "fp8": lambda r, t: t.fp8.dec(r.view(u8)),
    "bf8": lambda r, t: t.bf8.dec(r.view(u8)),
    "ocp_fp8": lambda r, t: FP8_OCP.dec(r.view(u8)),
    "ocp_bf8": lambda r, t: BF8_OCP.dec(r.view(u8)),
    "fp6": lambda r, t: FP6.dec(_six_bits(r)),
    "bf6": lambda r, t: BF6.dec(_six_bits(r)),
    "fp4": lambda r, t: FP4.dec(_nibbles(r)),
}


_GATHERED: dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]] = {
    "f16": (f16, lambda x: x.astype(f64)),
    "bf16": (u16, lambda x: bf16_to_f32(x).astype(f64)),
    "f32": (f32, lambda x: x.astype(f64)),
}
"""Types whose elements lie in registers as numpy has them: gathered at once, and decoded as f64."""


def matrix(o: Operand, d: int, t: str, shape: Shape, target: Target) -> Reader:
    """Reader of an operand as (blocks, d, K), where d is M or N; f64 or (i8) i64."""
    found = _GATHERED.get(t)
    if found is None or o.kind != "v":
        read = elements(o, t, target)
        return lambda w: matrices(read(w), d, t, shape)
    stored, decode = found
    i, n = o.index, o.count
    per = 4 // np.dtype(stored).itemsize
    places = np.arange(n * 64 * per).reshape(n, 64, per).transpose(1, 0, 2).reshape(64, n * per)
    index = matrices(places, d, t, shape)
    return lambda w: decode(w.V[i : i + n].reshape(-1).view(stored).take(index))


def elements(o: Operand, t: str, target: Target) -> Reader:
    """Reader of all elements in an operand's registers, (64 lanes, elements), f64 or (i8) i64."""
    if o.kind != "v":
        raise EmuError(f"matrix operand {o.text}")
    i, n, decode = o.index, o.count, _DECODE[t]
    return lambda w: decode(np.ascontiguousarray(w.V[i : i + n].T), target)


def matrices(x: np.ndarray, d: int, t: str, shape: Shape) -> np.ndarray:
    """Elements (64, n) -> (blocks, d, K), where d is M or N."""
    groups = 64 // d // shape.blocks
    n = shape.k // groups
    x = x[:, :n].reshape(shape.blocks, groups, d, n)
    if t in ("ocp_fp8", "ocp_bf8") and n == 32:  # two pieces of 16 elements, half of K apart
        return x.reshape(shape.blocks, groups, d, 2, 16).transpose(0, 2, 3, 1, 4).reshape(shape.blocks, d, shape.k)
    return x.transpose(0, 2, 1, 3).reshape(shape.blocks, d, shape.k)


def result_positions(shape: Shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(block, row, column) of result register r in lane l, each (results, 64)."""
    lane, r = np.meshgrid(LANES, np.arange(shape.results))
    column = lane % shape.n
    if shape.m == 4:
        return lane // 4, r, column
    if shape.out == "f64":
        return 0 * lane, 4 * r + lane // 16, column
    if shape.m == 16:
        return r // 4, 4 * (lane // 16) + r % 4, column
    return r // 16, 8 * ((r % 16) // 4) + 4 * (lane // 32) + r % 4, column


def addend(o: Operand, shape: Shape) -> Reader:
    """Reader of operand C, (results, 64)."""
    n, i = shape.results, o.index
    if o.kind == "imm":
        bits = imm_bits(o.value, "f64" if shape.out == "f64" else "u32")
        c = u64(bits).view(f64) if shape.out == "f64" else u32(bits).view(NUMBER[shape.out])
        constant = np.full((n, 64), c)
        return lambda w: constant
    if o.kind != "v":
        raise EmuError(f"matrix operand {o.text}")
    if shape.out == "f64":
        return lambda w: (
            w.V[i : i + 2 * n : 2].astype(u64) | (w.V[i + 1 : i + 1 + 2 * n : 2].astype(u64) << u64(32))
        ).view(f64)
    nt = NUMBER[shape.out]
    return lambda w: w.V[i : i + n].view(nt)
