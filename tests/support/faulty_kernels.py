"""A plugin of small Triton kernels, each with one planted fault. Imported where Triton is interpreted.

The functions are loaded by name from here; ``faulty.right`` is the same kernel without a fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from k3port.hookspecs import hookimpl
from k3port.ops.contract import Sample
from k3port.oracle.spec import KernelSpec, OpQuery, Requires, Target

ROWS = 4


@triton.jit
def scale_rows(x_ptr, w_ptr, y_ptr, num_rows, stride, eps, last_row, last_col, D: tl.constexpr, BLOCK: tl.constexpr):
    """RMSNorm; rows up to ``last_row`` and columns up to ``last_col`` are written, whatever the sizes are."""
    rows, cols = tl.program_id(0) * 4 + tl.arange(0, 4), tl.arange(0, BLOCK)
    live = (rows < num_rows)[:, None] & (cols < D)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * w[None, :]
    stored = (rows < last_row)[:, None] & (cols < last_col)[None, :]
    tl.store(y_ptr + rows[:, None] * D + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=stored)


def _norm(x, weight, eps, *, rows: int = 0, cols: int = 0, programs: int = 0, block: int = 0, stride: int = 0):
    """``rows`` and ``cols`` are added to the right masks, ``programs`` to the grid."""
    num_rows, dim = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    y = torch.empty((num_rows, dim), dtype=x.dtype, device=x.device)
    grid = triton.cdiv(num_rows, ROWS) + programs
    if num_rows and grid > 0:
        block = block or triton.next_power_of_2(dim)
        last = (num_rows + rows, dim + cols)
        scale_rows[(grid,)](x, weight, y, num_rows, stride or x.stride(0), eps, *last, D=dim, BLOCK=block)
    return y


def right(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _norm(x, weight, eps)


def narrow_mask(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _norm(x, weight, eps, cols=-1)


def wide_mask(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Rows after the last one are written too."""
    return _norm(x, weight, eps, rows=1)


def short_tail(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The last program is left out where it would not be full."""
    return _norm(x, weight, eps, programs=0 if x.shape[0] % ROWS == 0 else -1)


def unwritten(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Right numbers in memory that is not returned: what comes back may hold them by luck."""
    right(x, weight, eps)
    return torch.empty_like(x)


def narrow_block(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Can do 256 columns; its record admits any number."""
    return _norm(x, weight, eps, block=256)


def refuses(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Knows what it cannot do, and its record does not."""
    if x.shape[1] > 256:
        raise ValueError(f"only 256 columns, got {x.shape[1]}")
    return right(x, weight, eps)


def outside(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One number before its output."""
    y = right(x, weight, eps)
    if y.numel():
        mark[(1,)](y, -1)
    return y


def changes_input(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = right(x, weight, eps)
    mark[(1,)](weight, 0)
    return y


def beside_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One number behind an argument, which itself stays as it is."""
    y = right(x, weight, eps)
    mark[(1,)](weight, weight.numel())
    return y


def ignores_stride(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _norm(x, weight, eps, stride=x.shape[1])


def wild(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    mark[(1,)](weight, 1 << 40)
    return right(x, weight, eps)


@triton.jit
def mark(ptr, offset):
    tl.store(ptr + offset, 7.0)


@triton.jit
def product(x_ptr, w_ptr, y_ptr, x_stride, num_rows, num_cols, D, N: tl.constexpr):
    rows, cols = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1) * N + tl.arange(0, N)
    inner = tl.arange(0, N)
    total = tl.zeros((N, N), tl.float32)
    for begin in range(0, D, N):
        k = begin + inner
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + k[None, :], (rows < num_rows)[:, None] & (k < D)[None, :], other=0.0
        )
        w = tl.load(w_ptr + cols[None, :] * D + k[:, None], (cols < num_cols)[None, :] & (k < D)[:, None], other=0.0)
        total += tl.dot(x, w, input_precision="ieee")
    live = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], total.to(y_ptr.dtype.element_ty), mask=live)


def plain_dot(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Right on a GPU, and for float32 everywhere: the interpreter has no product of bfloat16."""
    x, weight = x if x.stride(1) == 1 else x.contiguous(), weight.contiguous()
    y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (triton.cdiv(x.shape[0], 32), triton.cdiv(weight.shape[0], 32))
        product[grid](x, weight, y, x.stride(0), x.shape[0], weight.shape[0], x.shape[1], N=32)
    return y


def few(sample: Sample) -> bool:
    """A call with a ragged last program, one with wide rows, one product."""
    return sample.name in ("rows", "wide", "1 x 96 -> 64")


def narrow(query: OpQuery, target: Target) -> str | None:
    del target
    return None if query.axes["D"] <= 256 else f"D = {query.axes['D']}, does 256 columns"


GPU = Requires(vendors=("nvidia", "amd"))


def _spec(name: str, op: str = "rms_norm", **fields) -> KernelSpec:
    doc = globals()[name].__doc__ or name
    return KernelSpec(f"faulty.{name}", op, f"faulty_kernels:{name}", doc, **{"requires": GPU, **fields})


KERNELS = (
    *map(_spec, ("right", "narrow_mask", "wide_mask", "short_tail", "unwritten", "narrow_block", "refuses", "outside")),
    *map(_spec, ("changes_input", "beside_weight", "ignores_stride", "wild")),
    _spec("plain_dot", "linear"),
    KernelSpec("faulty.honest", "rms_norm", "faulty_kernels:narrow_block", "its record is right", (), GPU, narrow),
)


@hookimpl
def k3port_kernels() -> Sequence[KernelSpec]:
    return KERNELS
