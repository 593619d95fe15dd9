"""SiTU and SwiGLU in one pass over both halves of the merged projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import cast, sigmoid, tanh
from k3port.backends.portable.launch import tuned


@triton.jit
def situ_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    num_rows,
    x_stride,
    y_stride,
    beta,
    linear_beta,
    WIDTH: tl.constexpr,
    CAP_GATE: tl.constexpr,
    CAP_LINEAR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    # Tokens times width can pass 2^31 elements.
    rows = rows.to(tl.int64)[:, None]
    gate_ptr = x_ptr + rows * x_stride + cols[None, :]
    a = tl.load(gate_ptr, mask=live, other=0.0).to(tl.float32)
    b = tl.load(gate_ptr + WIDTH, mask=live, other=0.0).to(tl.float32)
    gate = a
    if CAP_GATE:
        gate = beta * tanh(a / beta)
        if CAP_LINEAR:
            b = linear_beta * tanh(b / linear_beta)
    y = gate * sigmoid(a) * b
    tl.store(y_ptr + rows * y_stride + cols[None, :], cast(y, y_ptr.dtype.element_ty), mask=live)


def situ_mul(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """See :func:`k3port.ops.activation.situ_mul`. Rows may be slices of wider ones; columns that do not lie side by
    side cost a copy."""
    x = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    num_rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if y.numel():
        config = tuned("situ_mul", I=width)
        situ_mul_kernel[(triton.cdiv(num_rows, config["ROWS"]), triton.cdiv(width, config["BLOCK"]))](
            x,
            y,
            num_rows,
            x.stride(0),
            width,
            1.0 if beta is None else beta,
            1.0 if linear_beta is None else linear_beta,
            WIDTH=width,
            CAP_GATE=beta is not None,
            CAP_LINEAR=linear_beta is not None,
            **config,
        )
    return y
