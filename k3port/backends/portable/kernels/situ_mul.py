"""SiTU and SwiGLU in one pass over both halves of the merged projection."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import capped, cast, divide, exp
from k3port.backends.portable.launch import ceil_div, in_rows, launch, tuned

CANDIDATES = {"BLOCK": (512, 1024, 2048), "num_warps": (2, 4, 8)}


@triton.jit
def situ_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    num_rows,
    x_stride,
    y_stride,
    beta,
    linear_beta,
    inverse_beta,
    inverse_linear_beta,
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
    # One reciprocal for the two caps and the sigmoid: the special function unit is what limits this kernel.
    fine: tl.constexpr = y_ptr.dtype.element_ty == tl.float32
    gate = a
    below = 1.0
    if CAP_GATE:
        gate, e = capped(a, beta, inverse_beta, fine)
        below = 1.0 + e
        if CAP_LINEAR:
            b, e = capped(b, linear_beta, inverse_linear_beta, fine)
            below += below * e
    # The sigmoid comes last, since far below zero this is infinite, and times an e of 0 it would be NaN. The gate then
    # becomes 0 before it meets a large linear branch.
    below += below * exp(a * -1.0)
    y = divide(gate, below) * b
    tl.store(y_ptr + rows * y_stride + cols[None, :], cast(y, y_ptr.dtype.element_ty), mask=live)


def situ_mul(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """See :func:`k3port.ops.activation.situ_mul`. Rows may be slices of wider ones; columns that do not lie side by
    side cost a copy."""
    x, x_stride = in_rows(gate_up)
    num_rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if y.numel():
        config = tuned("situ_mul", I=width)
        cap, linear_cap = (1.0 if limit is None else float(limit) for limit in (beta, linear_beta))
        if not (1e-37 < cap < math.inf and 1e-37 < linear_cap < math.inf):
            raise ValueError(f"situ_mul needs finite caps above 1e-37, got beta {beta} and linear_beta {linear_beta}")
        launch(
            situ_mul_kernel,
            (ceil_div(num_rows, config["ROWS"]), ceil_div(width, config["BLOCK"]), 1),
            x,
            y,
            num_rows,
            x_stride,
            width,
            cap,
            linear_cap,
            1.0 / cap,
            1.0 / linear_cap,
            WIDTH=width,
            CAP_GATE=beta is not None,
            CAP_LINEAR=linear_beta is not None,
            **config,
        )
    return y
