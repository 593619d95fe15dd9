"""The whole KDA mixer core of one decode step in one launch: convolution and its tail, gates, normalisation, recurrence,
gated output norm. One program per request and head, so that a program sees all values of its head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.kda_intra import BOUNDED, SOFTPLUS
from k3port.backends.portable.kernels.kda_step import delta_step, unit
from k3port.backends.portable.kernels.lib import LN2, LOG2E, cast, sigmoid
from k3port.backends.portable.launch import tuned
from k3port.ops.kda import KdaParams, KdaState
from k3port.ops.segment import Segment

_BOUNDED = tl.constexpr(BOUNDED)


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
def shift_tail(x_ptr, tail_ptr, channel, live, P: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Drops the oldest input of the tail and appends the new one. A number may lie in several warps: between a step's
    loads and its store all of them have to wait."""
    for j in tl.static_range(W - 2):
        old = tl.load(tail_ptr + (j + 1) * (3 * P) + channel, mask=live, other=0.0)
        tl.debug_barrier()
        tl.store(tail_ptr + j * (3 * P) + channel, old, mask=live)
    x = tl.load(x_ptr + channel, mask=live, other=0.0)
    tl.debug_barrier()
    tl.store(tail_ptr + (W - 2) * (3 * P) + channel, x.to(tail_ptr.dtype.element_ty), mask=live)


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
    W: tl.constexpr,
    GATE: tl.constexpr,
):
    h = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    P: tl.constexpr = H * D
    c = tl.arange(0, BD)
    live = c < D
    channel = h * D + c
    if slot == 0:
        tl.store(out_ptr + row * P + channel, tl.zeros((BD,), out_ptr.dtype.element_ty), mask=live)
        return
    state = state_ptr + ((slot * H + h) * D + c[:, None]) * D + c[None, :]
    mask = live[:, None] & live[None, :]
    s = tl.load(state, mask=mask, other=0.0).to(tl.float32)
    x = qkv_ptr + row * qkv_stride
    tail = tail_ptr + slot * ((W - 1) * 3 * P)
    q = conv_step(x, taps_ptr, tail, channel, live, P, W)
    k = conv_step(x, taps_ptr, tail, channel + P, live, P, W)
    v = conv_step(x, taps_ptr, tail, channel + 2 * P, live, P, W)
    z = tl.load(raw_ptr + row * raw_stride + channel, mask=live, other=0.0).to(tl.float32)
    z += tl.load(bias_ptr + channel, mask=live, other=0.0)
    a = tl.exp2(tl.load(a_ptr + h) * LOG2E)
    if GATE == _BOUNDED:
        g = bound * sigmoid(a * z)
    else:
        g = -a * tl.where(z > 20.0, z, tl.log2(1.0 + tl.exp2(tl.minimum(z, 20.0) * LOG2E)) * LN2)
    beta = sigmoid(tl.load(beta_ptr + row * beta_stride + h).to(tl.float32))
    s, o = delta_step(s, unit(q) * D**-0.5, unit(k), v, tl.exp2(g * LOG2E), beta)
    tl.debug_barrier()
    tl.store(state, cast(s, state_ptr.dtype.element_ty), mask=mask)
    shift_tail(x, tail, channel, live, P, W)
    shift_tail(x, tail, channel + P, live, P, W)
    shift_tail(x, tail, channel + 2 * P, live, P, W)
    o = tl.where(live, o, 0.0)
    o *= tl.rsqrt(tl.sum(o * o, axis=0) / D + eps) * tl.load(norm_ptr + c, mask=live, other=0.0)
    o *= sigmoid(tl.load(gate_ptr + row * gate_stride + channel, mask=live, other=0.0).to(tl.float32))
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
    """See :func:`k3port.ops.kda.kda`, for one token per request."""
    requests = qkv.shape[0]
    heads, dim = params.num_heads, params.head_dim
    out = torch.empty((requests, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if requests:
        kda_fused_kernel[(heads, requests)](
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
            BD=triton.next_power_of_2(dim),
            W=params.conv.shape[1],
            GATE=SOFTPLUS if params.lower_bound is None else BOUNDED,
            **tuned("kda_fused", N=requests * heads),
        )
    return out
