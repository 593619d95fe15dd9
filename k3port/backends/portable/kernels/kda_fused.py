"""The whole KDA mixer core of one decode step in one launch: convolution and tail, gates, normalisation, recurrence,
gated output norm.

The norm needs all values of a head, the state of a head is best read by several programs. Whichever of them comes last
finds the others' outputs in memory, does the norm, and shifts the convolution's tail, which all of them have read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.kda_intra import BOUNDED, SOFTPLUS, log_decay
from k3port.backends.portable.kernels.kda_step import delta_step, unit
from k3port.backends.portable.kernels.kda_verify import kda_verify
from k3port.backends.portable.kernels.lib import LOG2E, cast, exp2, sigmoid
from k3port.backends.portable.launch import tuned
from k3port.ops.kda_state import KdaParams, KdaState
from k3port.ops.segment import Segment

CANDIDATES = {"block_v": (16, 32, 64, 128), "num_warps": (2, 4, 8)}


@triton.jit
def conv_step(x_ptr, taps_ptr, tail_ptr, channel, live, P: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convolution and SiLU of one new token for some channels, float32; the tail is ``[W - 1, 3P]``."""
    x = tl.load(x_ptr + channel, mask=live, other=0.0)
    y = x.to(tl.float32) * tl.load(taps_ptr + channel * W + (W - 1), mask=live, other=0.0)
    for j in tl.static_range(W - 1):
        old = tl.load(tail_ptr + j * (3 * P) + channel, mask=live, other=0.0)
        y += old.to(tl.float32) * tl.load(taps_ptr + channel * W + j, mask=live, other=0.0)
    # The separate ops round here as well.
    return cast(y * sigmoid(y), x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def kda_fused_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    raw_ptr,
    beta_ptr,
    gate_ptr,
    taps_ptr,
    a_ptr,
    bias_ptr,
    norm_ptr,
    tail_ptr,
    state_ptr,
    arrivals_ptr,
    values_ptr,
    out_ptr,
    slot_ptr,
    qkv_stride,
    raw_stride,
    beta_stride,
    gate_stride,
    bound,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    W: tl.constexpr,
    GATE: tl.constexpr,
):
    part = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    P: tl.constexpr = H * D
    SPLIT: tl.constexpr = (D + BV - 1) // BV
    c = tl.arange(0, BD)
    live = c < D
    channel = h * D + c
    own = part * BV + tl.arange(0, BV)
    own_live = own < D
    if slot == 0:
        tl.store(out_ptr + row * P + h * D + own, tl.zeros((BV,), out_ptr.dtype.element_ty), mask=own_live)
        return
    state = state_ptr + ((slot * H + h) * D + own[:, None]) * D + c[None, :]
    mask = own_live[:, None] & live[None, :]
    s = tl.load(state, mask=mask, other=0.0).to(tl.float32)
    x = qkv_ptr + row * qkv_stride
    tail = tail_ptr + slot * ((W - 1) * 3 * P)
    q = conv_step(x, taps_ptr, tail, channel, live, P, W)
    k = conv_step(x, taps_ptr, tail, channel + P, live, P, W)
    v = conv_step(x, taps_ptr, tail, h * D + own + 2 * P, own_live, P, W)
    z = tl.load(raw_ptr + row * raw_stride + channel, mask=live, other=0.0).to(tl.float32)
    z += tl.load(bias_ptr + channel, mask=live, other=0.0)
    g = log_decay(z, live, 0.0, tl.exp2(tl.load(a_ptr + h) * LOG2E), bound, GATE)
    beta = sigmoid(tl.load(beta_ptr + row * beta_stride + h).to(tl.float32))
    s, o, _ = delta_step(s, unit(q) * D**-0.5, unit(k), v, exp2(g), beta)
    # A number may lie in several warps: all must have read it before one writes.
    tl.debug_barrier()
    tl.store(state, cast(s, state_ptr.dtype.element_ty), mask=mask)
    o = tl.where(own_live, o, 0.0)
    if SPLIT > 1:
        values = values_ptr + row * P + h * D
        tl.store(values + own, o, mask=own_live)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + slot * H + h, 1, sem="acq_rel") != SPLIT - 1:
            return
        tl.store(arrivals_ptr + slot * H + h, 0)
        o = tl.load(values + c, mask=live, other=0.0)
    # All loads of what is left come first: each waits as long as all of them together.
    weight = tl.load(norm_ptr + c, mask=live, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + channel, mask=live, other=0.0).to(tl.float32)
    third = tl.arange(0, 4)[:, None]
    each = third * P + channel[None, :]
    each_live = (third < 3) & live[None, :]
    newest = tl.load(x + each, mask=each_live, other=0.0)
    older = newest
    oldest = newest
    if W > 2:
        older = tl.load(tail + (W - 2) * (3 * P) + each, mask=each_live, other=0.0)
    if W > 3:
        oldest = tl.load(tail + (W - 3) * (3 * P) + each, mask=each_live, other=0.0)
    tl.debug_barrier()
    tl.store(tail + (W - 2) * (3 * P) + each, newest.to(tail_ptr.dtype.element_ty), mask=each_live)
    if W > 2:
        tl.store(tail + (W - 3) * (3 * P) + each, older, mask=each_live)
    if W > 3:
        tl.store(tail + (W - 4) * (3 * P) + each, oldest, mask=each_live)
    o *= tl.rsqrt(tl.sum(o * o, axis=0) / D + eps) * weight * sigmoid(gate)
    tl.store(out_ptr + row * P + channel, cast(o, out_ptr.dtype.element_ty), mask=live)


def kda_decode(
    qkv: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    out_gate: torch.Tensor,
    params: KdaParams,
    state: KdaState,
    segment: Segment,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda`, for decode: one token per request, or drafts."""
    if segment.draft:
        return kda_verify(qkv, gate_raw, beta_logit, out_gate, params, state, segment)
    requests = qkv.shape[0]
    heads, dim = params.num_heads, params.head_dim
    out = torch.empty((requests, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if not requests:
        return out
    config = dict(tuned("kda_fused", N=requests * heads))
    block = triton.next_power_of_2(dim)
    block_v = config.pop("block_v")
    block_v = min(block_v, block) if state.arrivals is not None else block
    qkv, gate_raw, beta_logit, out_gate = (
        x if x.stride(1) == 1 else x.contiguous() for x in (qkv, gate_raw, beta_logit, out_gate)
    )
    split = triton.cdiv(dim, block_v)
    kda_fused_kernel[(split, heads, requests)](
        qkv,
        gate_raw,
        beta_logit,
        out_gate,
        params.conv,
        params.A_log,
        params.dt_bias,
        params.o_norm,
        state.conv,
        state.recurrent,
        state.arrivals,
        torch.empty((requests, heads * dim), dtype=torch.float32, device=qkv.device) if split > 1 else None,
        out,
        segment.slots,
        qkv.stride(0),
        gate_raw.stride(0),
        beta_logit.stride(0),
        out_gate.stride(0),
        params.lower_bound or 0.0,
        params.norm_eps,
        H=heads,
        D=dim,
        BD=block,
        BV=block_v,
        W=params.conv.shape[1],
        GATE=SOFTPLUS if params.lower_bound is None else BOUNDED,
        **config,
    )
    return out
