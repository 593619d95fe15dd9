"""Matrix instructions (MFMA): dense products of one or several blocks, plain and with E8M0 scales.

All products and the sum of one instruction are exact to f64 and rounded once; hardware rounds more often. EXEC does not
matter. Refused: broadcast modifiers (cbsz, abid, blgp of the plain shapes), sparse shapes, the four-block f64 shape.

The scaled shapes (gfx950) multiply each run of 32 elements along K by a power of two, which is one byte of a register
of the lane that holds the run; ``cbsz`` and ``blgp`` give the formats of A and B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import EmuError, Step, bc, f32, f64, i32, i64, u32, u64
from k3port.testing.amd_isa.matrix_operands import Shape, addend, matrix, result_positions
from k3port.testing.amd_isa.operands import raw32
from k3port.testing.amd_isa.text import Instruction, Operand
from k3port.testing.amd_isa.wave import Wave

_FORMATS = ("ocp_fp8", "ocp_bf8", "fp6", "bf6", "fp4")
Scale = Callable[[Wave], np.ndarray]


def _writer(shape: Shape, dst: int) -> Callable[[Wave, np.ndarray, np.ndarray], None]:
    """Adds C and writes the result."""
    n = shape.results

    def integers(w: Wave, r: np.ndarray, c: np.ndarray) -> None:
        w.V[dst : dst + n] = (r + c.astype(i64)).astype(i32).view(u32)

    def doubles(w: Wave, r: np.ndarray, c: np.ndarray) -> None:
        x = np.ascontiguousarray(r + c).view(u64)
        w.V[dst : dst + 2 * n : 2] = x.astype(u32)
        w.V[dst + 1 : dst + 1 + 2 * n : 2] = (x >> u64(32)).astype(u32)

    def floats(w: Wave, r: np.ndarray, c: np.ndarray) -> None:
        w.V[dst : dst + n] = (r + c.astype(f64)).astype(f32).view(u32)

    return {"i32": integers, "f64": doubles, "f32": floats}[shape.out]


def _product(
    shape: Shape, types: tuple[str, str], target: Target, inst: Instruction, scales: tuple[Scale, Scale] | None = None
) -> Step:
    o = inst.ops
    ta, tb = types
    a, b = (matrix(operand, d, t, shape, target) for operand, d, t in ((o[1], shape.m, ta), (o[2], shape.n, tb)))
    c = addend(o[3], shape)
    block, row, column = result_positions(shape)
    flat = (block * shape.m + row) * shape.n + column
    write = _writer(shape, o[0].index)

    def step(w: Wave) -> None:
        x, y = a(w), b(w)
        if scales is not None:
            x, y = x * scales[0](w), y * scales[1](w)
        write(w, np.matmul(x, y.transpose(0, 2, 1)).take(flat), c(w))

    return step


def _plain(shape: Shape, types: tuple[str, str], target: Target, inst: Instruction) -> Step:
    for key in ("cbsz", "abid", "blgp"):
        if inst.num(key):
            raise EmuError(f"modifier {key} of a matrix instruction")
    return _product(shape, types, target, inst)


def _formats(inst: Instruction) -> tuple[str, str]:
    return _FORMATS[inst.num("cbsz")], _FORMATS[inst.num("blgp")]


def _f8f6f4(shape: Shape, target: Target, inst: Instruction) -> Step:
    return _product(shape, _formats(inst), target, inst)


def _scale(o: Operand, byte: int, d: int) -> Scale:
    raw, shift = raw32(o), u32(8 * byte)

    def read(w: Wave) -> np.ndarray:
        e = ((bc(raw(w)) >> shift) & u32(255)).astype(i32)
        s = np.where(e == 255, np.nan, np.ldexp(1.0, e - 127))
        return np.repeat(s.reshape(64 // d, d).T, 32, axis=1)[None]

    return read


def _scaled(shape: Shape, target: Target, inst: Instruction) -> Step:
    low, high = inst.bits("op_sel", 3, 0), inst.bits("op_sel_hi", 3, 0)
    a = _scale(inst.ops[4], low[0] + 2 * high[0], shape.m)
    b = _scale(inst.ops[5], low[1] + 2 * high[1], shape.n)
    return _product(shape, _formats(inst), target, inst, (a, b))


# M, N, K, blocks (0: the name has no block count) of the dense shapes, by the types in the name
_SHAPES: dict[tuple[str, str], tuple[tuple[int, int, int, int], ...]] = {
    ("f32", "f32"): ((32, 32, 1, 2), (16, 16, 1, 4), (4, 4, 1, 16), (32, 32, 2, 0), (16, 16, 4, 0)),
    ("f32", "xf32"): ((32, 32, 4, 0), (16, 16, 8, 0)),
    ("f32", "f16"): (
        (32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16), (32, 32, 8, 0), (16, 16, 16, 0), (32, 32, 16, 0),
        (16, 16, 32, 0),
    ),
    ("f32", "bf16"): (
        (32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16), (32, 32, 8, 0), (16, 16, 16, 0), (32, 32, 16, 0),
        (16, 16, 32, 0),
    ),
    ("i32", "i8"): (
        (32, 32, 4, 2), (16, 16, 4, 4), (4, 4, 4, 16), (32, 32, 16, 0), (16, 16, 32, 0), (32, 32, 32, 0),
        (16, 16, 64, 0),
    ),
    ("f64", "f64"): ((16, 16, 4, 0),),
}  # fmt: skip


def _all_opcodes() -> dict[str, Builder]:
    found: dict[str, Builder] = {}

    def plain(name: str, shape: Shape, types: tuple[str, str]) -> None:
        found[name] = partial(_plain, shape, types)

    for (out, t), shapes in _SHAPES.items():
        for m, n, k, blocks in shapes:
            size, count = f"{m}x{n}x{k}", f"_{blocks}b" if blocks else ""
            shape = Shape(out, m, n, k, blocks or 1)
            plain(f"v_mfma_{out}_{size}{count}_{t}", shape, (t, t))
            if t == "bf16":
                plain(f"v_mfma_{out}_{size}{count}_{t}_1k", shape, (t, t))
    for m, n, k in ((16, 16, 32), (32, 32, 16)):
        for ta in ("fp8", "bf8"):
            for tb in ("fp8", "bf8"):
                plain(f"v_mfma_f32_{m}x{n}x{k}_{ta}_{tb}", Shape("f32", m, n, k), (ta, tb))
    for m, n, k in ((16, 16, 128), (32, 32, 64)):
        found[f"v_mfma_f32_{m}x{n}x{k}_f8f6f4"] = partial(_f8f6f4, Shape("f32", m, n, k))
        found[f"v_mfma_scale_f32_{m}x{n}x{k}_f8f6f4"] = partial(_scaled, Shape("f32", m, n, k))
    return found


FAMILY = Family("matrix", _all_opcodes(), frozenset({"cbsz", "abid", "blgp", "op_sel", "op_sel_hi"}))
