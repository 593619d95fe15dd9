"""KDA's output norm: RMSNorm per head times weight and sigmoid gate, many heads of one or more tokens per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import cast, gated
from k3port.backends.portable.launch import ceil_div, launch, power_of_2, tuned

CANDIDATES = {"ROWS": (8, 16, 32, 64), "num_warps": (2, 4, 8)}


@triton.jit(do_not_specialize=["rows"])
def gated_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gate_ptr,
    w_ptr,
    y_ptr,
    x_token_stride,
    x_head_stride,
    gate_token_stride,
    gate_head_stride,
    rows,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    first_token = first // H
    # Only the program's own tokens are counted by vectors, so that 32 bits are enough for them.
    row = first - first_token * H + tl.arange(0, ROWS)
    token, head = row // H, row % H
    cols = tl.arange(0, BLOCK)
    live = (first + tl.arange(0, ROWS) < rows)[:, None] & (cols < V)[None, :]
    token_base = first_token.to(tl.int64)
    x_at = (token * x_token_stride + head * x_head_stride)[:, None] + cols[None, :]
    gate_at = (token * gate_token_stride + head * gate_head_stride)[:, None] + cols[None, :]
    x = tl.load(x_ptr + token_base * x_token_stride + x_at, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token_base * gate_token_stride + gate_at, mask=live, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(x * x, axis=1) / V + eps)
    y = gated(x * inv_rms[:, None] * w[None, :], gate)
    y_at = (row * V)[:, None] + cols[None, :]
    tl.store(y_ptr + token_base * H * V + y_at, cast(y, y_ptr.dtype.element_ty), mask=live)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3port.ops.norm.gated_norm`. Tokens and heads of ``x`` and ``gate`` may lie apart."""
    tokens, heads, size = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    if gate.stride(2) != 1:
        gate = gate.contiguous()
    y = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    rows = tokens * heads
    if rows:
        config = tuned("gated_norm", V=size, rows=rows)
        launch(
            gated_norm_kernel,
            (ceil_div(rows, config["ROWS"]), 1, 1),
            x,
            gate,
            weight,
            y,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            rows,
            eps,
            H=heads,
            V=size,
            BLOCK=power_of_2(size),
            **config,
        )
    return y
