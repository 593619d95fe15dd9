"""Replays the accepted drafts of every request into its state and shifts its convolution tail, in one launch.

Programs share a head's value columns; the first of them also takes the head's channels of the tail. The tile of the
state takes the same steps as in decode, with the written rows from the record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.delta import unit
from k3port.backends.portable.kernels.lib import LOG2E, cast, exp2
from k3port.backends.portable.launch import ceil_div, launch, power_of_2, tuned
from k3port.ops.kda_state import KdaState
from k3port.ops.segment import Segment

CANDIDATES = {"block_v": (8, 16, 32, 64), "num_warps": (1, 2, 4)}


@triton.jit
def replayed(s, k, decay, u):  # type: ignore[no-untyped-def]
    """One step on a float32 state tile ``[V, K]`` whose written row is known."""
    return s * decay[None, :] + u[:, None] * k[None, :]


@triton.jit
def kda_commit_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    k_ptr,
    g_ptr,
    u_ptr,
    tail_ptr,
    state_ptr,
    counts_ptr,
    cu_ptr,
    slot_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
):
    vb = tl.program_id(0)
    h = tl.program_id(1)
    request = tl.program_id(2)
    slot = tl.load(slot_ptr + request)
    length = tl.load(cu_ptr + request + 1) - tl.load(cu_ptr + request)
    count = tl.minimum(tl.maximum(tl.load(counts_ptr + request), 0), tl.minimum(length, N))
    if (slot == 0) | (count == 0):
        return
    kc = tl.arange(0, BK)
    vc = vb * BV + tl.arange(0, BV)
    k_in = kc < K
    v_in = vc < V
    state = state_ptr + ((slot * H + h) * V + vc[:, None]) * K + kc[None, :]
    mask = v_in[:, None] & k_in[None, :]
    s = tl.load(state, mask=mask, other=0.0).to(tl.float32)
    first = slot * (N * H) + h
    for i in tl.range(0, count, num_stages=1):
        k = unit(tl.load(k_ptr + first * K + i * (H * K) + kc, mask=k_in, other=0.0).to(tl.float32))
        decay = exp2(tl.load(g_ptr + first * K + i * (H * K) + kc, mask=k_in, other=0.0) * LOG2E)
        u = tl.load(u_ptr + first * V + i * (H * V) + vc, mask=v_in, other=0.0)
        s = replayed(s, k, decay, u)
    # A number may lie in several warps: all must have read it before one writes.
    tl.debug_barrier()
    tl.store(state, cast(s, state_ptr.dtype.element_ty), mask=mask)
    if vb == 0:
        P: tl.constexpr = H * K
        third = tl.arange(0, 4)[:, None]
        each = third * P + h * K + kc[None, :]
        tail = tail_ptr + slot * ((W - 1) * 3 * P) + each
        x = x_ptr + slot * (N * 3 * P) + each
        rows = ()
        for j in tl.static_range(W - 1):
            source = count + j
            old_in = (third < 3) & (kc[None, :] < tl.where(source < W - 1, K, 0))
            new_in = (third < 3) & (kc[None, :] < tl.where(source < W - 1, 0, K))
            old = tl.load(tail + source * (3 * P), mask=old_in, other=0.0)
            new = tl.load(x + (source - (W - 1)) * (3 * P), mask=new_in, other=0.0)
            rows = rows + (tl.where(source < W - 1, old, new.to(tail_ptr.dtype.element_ty)),)
        tl.debug_barrier()
        for j in tl.static_range(W - 1):
            tl.store(tail + j * (3 * P), rows[j], mask=(third < 3) & k_in[None, :])


def kda_commit(state: KdaState, counts: torch.Tensor, segment: Segment) -> None:
    """See :func:`k3port.ops.kda_commit.kda_commit`. Reads only device tensors of the segment."""
    drafts = state.drafts
    if drafts is None:
        raise ValueError("there is no record to replay: KdaState.drafts is None, see empty_drafts")
    requests = segment.slots.shape[0]
    _, heads, value_dim, key_dim = state.recurrent.shape
    if not requests:
        return
    config = dict(tuned("kda_commit", N=requests * heads))
    block_v = min(config.pop("block_v"), power_of_2(value_dim))
    launch(
        kda_commit_kernel,
        (ceil_div(value_dim, block_v), heads, requests),
        drafts.x,
        drafts.k,
        drafts.g,
        drafts.u,
        state.conv,
        state.recurrent,
        counts,
        segment.cu_seqlens,
        segment.slots,
        H=heads,
        K=key_dim,
        V=value_dim,
        BK=power_of_2(key_dim),
        BV=block_v,
        W=state.conv.shape[1] + 1,
        N=drafts.k.shape[1],
        **config,
    )
