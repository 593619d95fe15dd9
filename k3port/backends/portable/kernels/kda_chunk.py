"""KDA prefill: chunks in parallel, then the state from chunk to chunk. Two launches, no scan over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from k3port.backends.portable.kernels.kda_intra import (
    BOUNDED,
    GIVEN,
    SOFTPLUS,
    kda_pairs_kernel,
    kda_prepare_kernel,
    kda_solve_kernel,
)
from k3port.backends.portable.kernels.kda_scan import kda_scan_kernel
from k3port.backends.portable.launch import tuned
from k3port.ops.segment import Segment


SLAB_BYTES = 1 << 30
"""Most scratch memory of one call."""


def scratch_bytes(key_dim: int, value_dim: int, size: int, itemsize: int) -> int:
    """Scratch memory per token and head: W, q exp G, k exp(G_n - G), beta k exp G, U, QK; in float32 G, A, factors."""
    return (4 * key_dim + value_dim + size) * itemsize + 4 * (key_dim + size + 3)


class Decay(NamedTuple):
    """How the kernel gets the log decay: ``[T, H, K]`` as it is, or raw with the parameters of a gate form."""

    form: int = GIVEN
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    lower_bound: float = 0.0


def gate_decay(A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> Decay:
    """The gate of :func:`k3port.ops.kda.kda_gate`, computed inside the kernel."""
    return Decay(SOFTPLUS if lower_bound is None else BOUNDED, A_log, dt_bias, lower_bound or 0.0)


def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    decay: Decay,
    state: torch.Tensor,
    segment: Segment,
) -> torch.Tensor:
    """The recurrence of :func:`k3port.ops.kda.kda_core` over a prefill segment.

    Args:
        q, k: ``[T, H, K]``, heads one after the other in a row, rows of any stride; not yet normalised.
        v: ``[T, H, V]``.
        g: ``[T, H, K]``: log decays, or what :class:`Decay` turns into them.
        beta: ``[T, H]``: write strengths, or their logits where the kernel computes the gate.
        state: ``[S, H, V, K]`` contiguous, float32 or bfloat16; updated at the segment's slots.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``; rows of padding requests are zero.
    """
    tokens, heads, key_dim = k.shape
    value_dim = v.shape[2]
    requests = len(segment.lengths)
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    if not tokens:
        return out
    wide = k.dtype == torch.float32
    config = dict(tuned("kda_chunk", H=heads, K=max(key_dim, value_dim), T=tokens, wide=int(wide)))
    bits, block_v = config["bits"], min(config["block_v"], triton.next_power_of_2(value_dim))
    size = 1 << bits
    chunks = tokens // size + requests
    # Long prompts go slab by slab: the state carries over in its slot, and the scratch memory stays bounded.
    slab = min(chunks, max(1, SLAB_BYTES // (heads * size * scratch_bytes(key_dim, value_dim, size, k.element_size()))))

    def scratch(*shape: int, dtype: torch.dtype = k.dtype) -> torch.Tensor:
        return torch.empty((slab, heads, *shape), dtype=dtype, device=k.device)

    w, qg, kg, x = (scratch(size, key_dim) for _ in range(4))
    u, qk = scratch(size, value_dim), scratch(size, size)
    fall, pairs, factors = (scratch(size, n, dtype=torch.float32) for n in (key_dim, size, 3))
    block_k = max(16, triton.next_power_of_2(key_dim))
    columns = min(config["solve_columns"], block_k)
    precision = "tf32" if config["tf32"] and not wide else "ieee"
    spans = (segment.cu_seqlens, segment.slots)
    for first in range(0, chunks, slab):
        count = min(slab, chunks - first)
        kda_prepare_kernel[(heads, count)](
            q,
            k,
            g,
            beta,
            decay.A_log,
            decay.dt_bias,
            *spans,
            fall,
            qg,
            kg,
            x,
            factors,
            q.stride(0),
            k.stride(0),
            g.stride(0),
            beta.stride(0),
            requests,
            first,
            decay.lower_bound,
            H=heads,
            K=key_dim,
            BK=block_k,
            C=size,
            GATE=decay.form,
            num_warps=config["prepare_warps"],
        )
        kda_pairs_kernel[(2 * (size // 16) - 1, heads, count)](
            q,
            k,
            fall,
            factors,
            qk,
            pairs,
            *spans,
            q.stride(0),
            k.stride(0),
            requests,
            first,
            H=heads,
            K=key_dim,
            KB=min(config["pairs_keys"], block_k),
            C=size,
            ANCHORED=decay.form == BOUNDED and decay.lower_bound >= -5,
            PRECISION=precision,
            num_warps=config["pairs_warps"],
        )
        kda_solve_kernel[(triton.cdiv(key_dim, columns) + triton.cdiv(value_dim, columns), heads, count)](
            x,
            v,
            pairs,
            factors,
            w,
            u,
            *spans,
            v.stride(0),
            requests,
            first,
            H=heads,
            K=key_dim,
            V=value_dim,
            NB=columns,
            C=size,
            PRECISION=precision,
            num_warps=config["solve_warps"],
        )
        kda_scan_kernel[(triton.cdiv(value_dim, block_v), heads, requests)](
            w,
            u,
            qg,
            kg,
            qk,
            fall,
            state,
            out,
            *spans,
            out.stride(0),
            first,
            count,
            H=heads,
            K=key_dim,
            V=value_dim,
            BK=block_k,
            BV=max(16, block_v),
            C=size,
            STAGES=config["scan_stages"],
            num_warps=config["scan_warps"],
        )
    return out


def kda_core_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    segment: Segment,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda_core`."""
    return chunk_forward(q, k, v, g, beta, Decay(), state, segment)
