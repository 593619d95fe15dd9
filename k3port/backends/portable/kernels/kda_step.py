"""KDA decode: one token per request, state slots updated in place; or a few drafts per request, which are recorded.

Drafts pass through the same tile of the state in registers, token by token, and the state in memory stays.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import LOG2E, cast, exp2
from k3port.backends.portable.launch import tuned
from k3port.ops.kda_state import KdaDrafts, required_record
from k3port.ops.segment import Segment

CANDIDATES = {"block_v": (8, 16, 32, 64), "num_warps": (1, 2, 4)}


@triton.jit
def delta_step(s, q, k, v, decay, beta):  # type: ignore[no-untyped-def]
    """One step on a float32 state tile ``[V, K]``: the next state, the output and the written row u.

    ``o = S' q`` with ``S' = S + u kᵀ`` is taken as ``S q + u (k·q)``: both sums over the keys read the same tile.
    """
    s *= decay[None, :]
    u = beta * (v - tl.sum(s * k[None, :], axis=1))
    o = tl.sum(s * q[None, :], axis=1) + u * tl.sum(k * q, axis=0)
    return s + u[:, None] * k[None, :], o, u


@triton.jit
def unit(x):  # type: ignore[no-untyped-def]
    """``x / sqrt(sum(x²) + 1e-6)``."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def kda_step_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    out_ptr,
    slot_ptr,
    cu_ptr,
    k_record_ptr,
    g_record_ptr,
    u_record_ptr,
    q_stride,
    k_stride,
    v_stride,
    g_stride,
    beta_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    vb = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    # ``DRAFTS`` rows of the record per slot; without drafts a request has one token.
    if DRAFTS > 0:
        begin = tl.load(cu_ptr + row).to(tl.int64)
        count = tl.load(cu_ptr + row + 1) - tl.load(cu_ptr + row)
    else:
        begin = row
        count = 1
    kc = tl.arange(0, BK)
    vc = vb * BV + tl.arange(0, BV)
    k_in = kc < K
    v_in = vc < V
    out = out_ptr + (begin * H + h) * V + vc
    if slot == 0:
        for i in tl.range(0, count, num_stages=1):
            tl.store(out + i * (H * V), tl.zeros((BV,), out_ptr.dtype.element_ty), mask=v_in)
        return
    state = state_ptr + ((slot * H + h) * V + vc[:, None]) * K + kc[None, :]
    mask = v_in[:, None] & k_in[None, :]
    s = tl.load(state, mask=mask, other=0.0).to(tl.float32)
    for i in tl.range(0, count, num_stages=1):
        token = begin + i
        g = tl.load(g_ptr + token * g_stride + h * K + kc, mask=k_in, other=0.0).to(tl.float32)
        beta = tl.load(beta_ptr + token * beta_stride + h).to(tl.float32)
        q = unit(tl.load(q_ptr + token * q_stride + h * K + kc, mask=k_in, other=0.0).to(tl.float32)) * K**-0.5
        raw = tl.load(k_ptr + token * k_stride + h * K + kc, mask=k_in, other=0.0)
        v = tl.load(v_ptr + token * v_stride + h * V + vc, mask=v_in, other=0.0).to(tl.float32)
        s, o, u = delta_step(s, q, unit(raw.to(tl.float32)), v, exp2(g * LOG2E), beta)
        tl.store(out + i * (H * V), cast(o, out_ptr.dtype.element_ty), mask=v_in)
        if DRAFTS > 0:
            first = slot * (DRAFTS * H) + h
            tl.store(u_record_ptr + first * V + i * (H * V) + vc, u, mask=v_in)
            if vb == 0:
                tl.store(k_record_ptr + first * K + i * (H * K) + kc, raw, mask=k_in)
                tl.store(g_record_ptr + first * K + i * (H * K) + kc, g, mask=k_in)
    if DRAFTS == 0:
        # A number may lie in several warps: all must have read it before one writes.
        tl.debug_barrier()
        tl.store(state, cast(s, state_ptr.dtype.element_ty), mask=mask)


def kda_core_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    segment: Segment,
    drafts: KdaDrafts | None = None,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda_core`, for decode."""
    record = required_record(segment, drafts)
    q, k, v, g = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (q, k, v, g))
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    tokens, heads, key_dim = k.shape
    requests, value_dim = segment.slots.shape[0], v.shape[2]
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    if requests:
        config = dict(tuned("kda_step", N=requests * heads))
        block_v = min(config.pop("block_v"), triton.next_power_of_2(value_dim))
        kda_step_kernel[(triton.cdiv(value_dim, block_v), heads, requests)](
            q,
            k,
            v,
            g,
            beta,
            state,
            out,
            segment.slots,
            segment.cu_seqlens,
            *((None, None, None) if record is None else (record.k, record.g, record.u)),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            g.stride(0),
            beta.stride(0),
            H=heads,
            K=key_dim,
            V=value_dim,
            BK=triton.next_power_of_2(key_dim),
            BV=block_v,
            DRAFTS=0 if record is None else record.k.shape[1],
            **config,
        )
    return out
