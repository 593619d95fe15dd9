"""RMSNorm in Triton, several rows per program."""

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import cast

TILE = 8192
"""Most numbers that one program holds in registers."""


@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, rows, x_stride, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    live = (row < rows) & (col < D)
    x = tl.load(x_ptr + row * x_stride + col, mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < D, other=0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    # The contract rounds twice, as the official code does: before the weight and after it.
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    y = cast(normed, dtype).to(tl.float32) * cast(w, dtype).to(tl.float32)
    tl.store(y_ptr + row * D + col, cast(y, dtype), mask=live)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3port.ops.norm.rms_norm`."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows, dim = flat.shape
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(dim)
        per_program = max(1, min(4, TILE // block))
        rms_norm_kernel[(triton.cdiv(rows, per_program),)](
            flat, weight, y, rows, flat.stride(0), eps,
            D=dim, BLOCK=block, ROWS=per_program, num_warps=8 if block >= 4096 else 4,
        )  # fmt: skip
    return y.view(x.shape)
