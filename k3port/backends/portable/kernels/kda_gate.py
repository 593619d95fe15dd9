"""Log decay per channel and write strength per head, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import LOG2E, sigmoid
from k3port.backends.portable.launch import tuned


@triton.jit
def _softplus(z):  # type: ignore[no-untyped-def]
    """``log(1 + exp(z))``, from 20 on ``z`` itself.

    ``max(z, 0) + log(1 + e)`` with ``e = exp(-|z|)``, and the logarithm as ``2 atanh(e / (2 + e))``, whose series has
    an argument of at most 1/3: weak decays keep their relative accuracy, which the hardware's logarithm near 1 has not.
    """
    e = tl.exp2(tl.abs(z) * -LOG2E)
    s = e / (2.0 + e)
    q = s * s
    # Doubled coefficients, not a product with 2: the compiler for gfx9 pairs that product with the sum beside it into a
    # packed instruction whose inline constant counts for the lower half only (seen in emulation, Triton 3.9).
    log = s * (
        2.0
        + q
        * (0.6666666667 + q * (0.4 + q * (0.2857142857 + q * (0.2222222222 + q * (0.1818181818 + q * 0.1538461538)))))
    )
    return tl.where(z > 20.0, z, tl.maximum(z, 0.0) + log)


@triton.jit(do_not_specialize=["tokens"])
def kda_gate_kernel(  # type: ignore[no-untyped-def]
    raw_ptr,
    logit_ptr,
    a_log_ptr,
    bias_ptr,
    g_ptr,
    beta_ptr,
    raw_stride,
    logit_stride,
    tokens,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROWS: tl.constexpr,
):
    P: tl.constexpr = H * K
    block = tl.program_id(0) % ((P + BLOCK_P - 1) // BLOCK_P)
    first = tl.program_id(0) // ((P + BLOCK_P - 1) // BLOCK_P) * ROWS
    cols = block * BLOCK_P + tl.arange(0, BLOCK_P)
    bias = tl.load(bias_ptr + cols, mask=cols < P, other=0.0)
    a = tl.exp2(tl.load(a_log_ptr + cols // K, mask=cols < P, other=0.0) * LOG2E)
    for r in tl.static_range(ROWS):
        row = (first + r).to(tl.int64)
        # A scalar condition goes into the bound: the interpreter cannot combine its mask with a row's.
        width = tl.where(row < tokens, P, 0)
        z = tl.load(raw_ptr + row * raw_stride + cols, mask=cols < width, other=0.0).to(tl.float32) + bias
        g = lower_bound * sigmoid(a * z) if BOUNDED else -a * _softplus(z)
        tl.store(g_ptr + row * P + cols, g, mask=cols < width)
    if block == 0:
        heads = tl.arange(0, BLOCK_H)
        for r in tl.static_range(ROWS):
            row = (first + r).to(tl.int64)
            width = tl.where(row < tokens, H, 0)
            logit = tl.load(logit_ptr + row * logit_stride + heads, mask=heads < width, other=0.0).to(tl.float32)
            tl.store(beta_ptr + row * H + heads, sigmoid(logit), mask=heads < width)


def kda_gate(
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`k3port.ops.kda.kda_gate`."""
    gate_raw = gate_raw if gate_raw.stride(1) == 1 else gate_raw.contiguous()
    beta_logit = beta_logit if beta_logit.stride(1) == 1 else beta_logit.contiguous()
    tokens, heads = beta_logit.shape
    dim = gate_raw.shape[1] // heads
    g = torch.empty((tokens, heads, dim), dtype=torch.float32, device=gate_raw.device)
    beta = torch.empty((tokens, heads), dtype=torch.float32, device=gate_raw.device)
    if tokens:
        config = tuned("kda_gate", T=tokens, P=heads * dim)
        blocks = triton.cdiv(heads * dim, config["BLOCK_P"])
        kda_gate_kernel[(blocks * triton.cdiv(tokens, config["ROWS"]),)](
            gate_raw,
            beta_logit,
            A_log,
            dt_bias,
            g,
            beta,
            gate_raw.stride(0),
            beta_logit.stride(0),
            tokens,
            0.0 if lower_bound is None else float(lower_bound),
            H=heads,
            K=dim,
            BOUNDED=lower_bound is not None,
            BLOCK_H=triton.next_power_of_2(heads),
            **config,
        )
    return g, beta
