"""RMSNorm in one pass: whole rows in registers, several rows per program where they are narrow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import cast
from k3port.backends.portable.launch import ceil_div, launch, power_of_2, tuned

CANDIDATES = {"ROWS": (1, 2, 4), "num_warps": (4, 8, 16)}


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    y_ptr,
    num_rows,
    x_stride,
    y_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    live = (rows < num_rows)[:, None] & (cols < D)[None, :]
    # Tokens times width can pass 2^31 elements.
    rows = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + rows * x_stride + cols[None, :], mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    # The order of the official code: rounded once before the weight and once after.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = cast(normed, dtype).to(tl.float32) * cast(w, dtype).to(tl.float32)[None, :]
    tl.store(y_ptr + rows * y_stride + cols[None, :], cast(y, dtype), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3port.ops.norm.rms_norm`. Rows may be slices of wider ones; columns that do not lie side by side
    cost a copy."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_rows, dim = rows.shape
    y = torch.empty((num_rows, dim), dtype=x.dtype, device=x.device)
    if num_rows:
        config = tuned("rms_norm", D=dim)
        launch(
            rms_norm_kernel,
            (ceil_div(num_rows, config["ROWS"]), 1, 1),
            rows,
            weight.contiguous(),
            y,
            num_rows,
            rows.stride(0),
            dim,
            eps,
            D=dim,
            BLOCK=power_of_2(dim),
            **config,
        )
    return y if x.dim() == 2 else y.view(x.shape)
