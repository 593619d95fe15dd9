"""KDA decode: one token per request, state slots updated in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import LOG2E, cast, exp2
from k3port.backends.portable.launch import tuned
from k3port.ops.segment import Segment

CANDIDATES = {"block_v": (8, 16, 32, 64), "num_warps": (1, 2, 4)}


@triton.jit
def delta_step(s, q, k, v, decay, beta):  # type: ignore[no-untyped-def]
    """One step on a float32 state tile ``[V, K]``: the next state and the output.

    ``o = S' q`` with ``S' = S + u kᵀ`` is taken as ``S q + u (k·q)``: both sums over the keys read the same tile.
    """
    s *= decay[None, :]
    u = beta * (v - tl.sum(s * k[None, :], axis=1))
    o = tl.sum(s * q[None, :], axis=1) + u * tl.sum(k * q, axis=0)
    return s + u[:, None] * k[None, :], o


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
):
    vb = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    kc = tl.arange(0, BK)
    vc = vb * BV + tl.arange(0, BV)
    k_in = kc < K
    v_in = vc < V
    out = out_ptr + (row * H + h) * V + vc
    if slot == 0:
        tl.store(out, tl.zeros((BV,), out_ptr.dtype.element_ty), mask=v_in)
        return
    state = state_ptr + ((slot * H + h) * V + vc[:, None]) * K + kc[None, :]
    mask = v_in[:, None] & k_in[None, :]
    s = tl.load(state, mask=mask, other=0.0).to(tl.float32)
    decay = exp2(tl.load(g_ptr + row * g_stride + h * K + kc, mask=k_in, other=0.0).to(tl.float32) * LOG2E)
    beta = tl.load(beta_ptr + row * beta_stride + h).to(tl.float32)
    q = unit(tl.load(q_ptr + row * q_stride + h * K + kc, mask=k_in, other=0.0).to(tl.float32)) * K**-0.5
    k = unit(tl.load(k_ptr + row * k_stride + h * K + kc, mask=k_in, other=0.0).to(tl.float32))
    v = tl.load(v_ptr + row * v_stride + h * V + vc, mask=v_in, other=0.0).to(tl.float32)
    s, o = delta_step(s, q, k, v, decay, beta)
    # A number may lie in several warps: all must have read it before one writes.
    tl.debug_barrier()
    tl.store(state, cast(s, state_ptr.dtype.element_ty), mask=mask)
    tl.store(out, cast(o, out_ptr.dtype.element_ty), mask=v_in)


def kda_core_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    segment: Segment,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda_core`, for one token per request."""
    q, k, v, g = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (q, k, v, g))
    beta = beta if beta.stride(1) == 1 else beta.contiguous()
    requests, heads, key_dim = k.shape
    value_dim = v.shape[2]
    out = torch.empty((requests, heads, value_dim), dtype=v.dtype, device=v.device)
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
            **config,
        )
    return out
