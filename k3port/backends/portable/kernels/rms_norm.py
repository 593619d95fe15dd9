"""RMSNorm, one program per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.launch import tuned


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, x_stride, y_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    live = cols < D
    x = tl.load(x_ptr + row * x_stride + cols, mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=live, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
    # The order of the official code: rounded once before the weight and once after.
    y = normed.to(y_ptr.dtype.element_ty).to(tl.float32) * w.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * y_stride + cols, y.to(y_ptr.dtype.element_ty), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3port.ops.norm.rms_norm`."""
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        dim = rows.shape[1]
        config = tuned("rms_norm", D=dim)
        rms_norm_kernel[(rows.shape[0],)](
            rows, weight, y, rows.stride(0), dim, eps, D=dim, BLOCK=triton.next_power_of_2(dim), **config
        )
    return y.view(x.shape)
