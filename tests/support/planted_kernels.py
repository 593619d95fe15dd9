"""RMSNorm kernels with one fault each, as a plugin would bring them. Every part of the kit must find its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, Requires


def spec(function: str, op: str = "rms_norm", **requires: object) -> KernelSpec:
    """The record of one of the functions below."""
    fields: dict[str, object] = {
        "vendors": ("nvidia", "amd"),
        "dtypes": ("bfloat16", "float32"),
        "packages": ("triton>=3.3",),
        **requires,
    }
    return KernelSpec(
        name=f"planted.{function}",
        op=op,
        load=f"{__name__}:{function}",
        doc="a kernel with a fault",
        requires=Requires(**fields),  # type: ignore[arg-type]
        priority=PRIORITY_PORTABLE - 5,
    )


def on_cpu(function: str) -> KernelSpec:
    """The record of a function below that is plain PyTorch."""
    return spec(function, vendors=("cpu",), packages=())


@triton.jit
def _rms_kernel(
    x_ptr, w_ptr, y_ptr, rows, x_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LOAD_MASK: tl.constexpr, LAST: tl.constexpr, ROW_SLACK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = (row < rows + ROW_SLACK) & (col < D)
    if LOAD_MASK:
        x = tl.load(x_ptr + row * x_stride + col, mask=live & (col < D - LAST), other=0.0).to(tl.float32)
    else:
        x = tl.load(x_ptr + row * x_stride + col).to(tl.float32)  # planted: no mask
        x = tl.where(live, x, 0.0)
    w = tl.load(w_ptr + col, mask=col < D, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    dtype = y_ptr.dtype.element_ty
    y = normed.to(dtype).to(tl.float32) * w.to(dtype).to(tl.float32)
    tl.store(y_ptr + row * D + col, y.to(dtype), mask=live)


def _launch(x: torch.Tensor, weight: torch.Tensor, eps: float, **faults: int) -> torch.Tensor:
    flat = x.reshape(-1, x.shape[-1])
    rows, dim = flat.shape
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    given = {"LOAD_MASK": 1, "LAST": 0, "ROW_SLACK": 0, **faults}
    if rows:
        block = triton.next_power_of_2(dim)
        per_program = max(1, min(4, 8192 // block))
        grid = (triton.cdiv(rows, per_program),)
        sizes = {"D": dim, "BLOCK": block, "ROWS": per_program}
        _rms_kernel[grid](flat, weight, y, rows, flat.stride(0), eps, **sizes, **given, num_warps=4)
    return y.view(x.shape)


def right(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """No fault: what the others are compared with."""
    return _launch(x, weight, eps)


def no_load_mask(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reads beyond the tensor; the numbers are right all the same."""
    return _launch(x, weight, eps, LOAD_MASK=0)


@triton.jit
def _copy_one(x_ptr, y_ptr, offset):
    tl.store(y_ptr, tl.load(x_ptr + offset))  # planted: one too far


def one_beyond(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reads the one number behind the last one, and uses it for nothing."""
    y = right(x, weight, eps)
    if x.numel():
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        _copy_one[(1,)](x, torch.empty(1, dtype=x.dtype, device=x.device), last + 1)
    return y


def launches_nothing(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Right numbers, and no Triton."""
    value = x.float()
    normed = (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed.float() * weight.to(x.dtype).float()).to(x.dtype)


def wrong_mask(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The mask of the load leaves out the last column."""
    return _launch(x, weight, eps, LAST=1)


def ragged_tail(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The mask of the rows lets one row too many through."""
    return _launch(x, weight, eps, ROW_SLACK=1)


def wrong_on_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Forgets the weight."""
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
