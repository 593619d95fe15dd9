"""The whole KDA mixer core of one decode step in one launch: convolution and tail, gates, normalisation, recurrence,
gated output norm.

One program takes the rows of a head's state in tiles, one after the other. Where there are too few heads to fill the
GPU several programs share a head, and whichever of them comes last finds the others' outputs in memory, does the norm,
which needs all values of the head, and shifts the convolution's tail, which all of them have read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.delta import delta_step, unit_pair
from k3port.backends.portable.kernels.kda_intra import BOUNDED, SOFTPLUS, log_decay
from k3port.backends.portable.kernels.kda_verify import kda_verify
from k3port.backends.portable.kernels.lib import LOG2E, cast, exp2, gated, rounded, sigmoid
from k3port.backends.portable.launch import Config, ceil_div, launch, power_of_2, tuned
from k3port.ops.kda_state import KdaParams, KdaState
from k3port.ops.segment import Segment

CANDIDATES = {"block_v": (8, 16, 32), "passes": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4)}


@triton.jit
def load_taps(taps_ptr, channel, live, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights of some channels from the newest token to the oldest; with fewer than four taps the last ones repeat."""
    taps = taps_ptr + channel * W
    w0 = tl.load(taps + (W - 1), mask=live, other=0.0)
    w1 = tl.load(taps + (W - 2), mask=live, other=0.0)
    w2 = w1
    w3 = w1
    if W > 2:
        w2 = tl.load(taps + (W - 3), mask=live, other=0.0)
    if W > 3:
        w3 = tl.load(taps + (W - 4), mask=live, other=0.0)
    return w0, w1, w2, w3


@triton.jit
def load_tail(tail_ptr, channel, live, P: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Earlier inputs of some channels, newest first, of a tail ``[W - 1, 3P]``; of a short one the last repeat."""
    tail = tail_ptr + channel
    x1 = tl.load(tail + (W - 2) * (3 * P), mask=live, other=0.0)
    x2 = x1
    x3 = x1
    if W > 2:
        x2 = tl.load(tail + (W - 3) * (3 * P), mask=live, other=0.0)
    if W > 3:
        x3 = tl.load(tail + (W - 4) * (3 * P), mask=live, other=0.0)
    return x1, x2, x3


@triton.jit
def convolved(x0, x1, x2, x3, w0, w1, w2, w3, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convolution and SiLU of the newest token, float32."""
    y = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1
    if W > 2:
        y += x2.to(tl.float32) * w2
    if W > 3:
        y += x3.to(tl.float32) * w3
    # The separate ops round here as well.
    return cast(gated(y, y), x0.dtype).to(tl.float32)


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
    PASSES: tl.constexpr,
    W: tl.constexpr,
    GATE: tl.constexpr,
):
    part = tl.program_id(0)
    h = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    P: tl.constexpr = H * D
    SPLIT: tl.constexpr = (D + BV * PASSES - 1) // (BV * PASSES)
    c = tl.arange(0, BD)
    live = c < D
    channel = h * D + c
    own = part * (BV * PASSES) + tl.arange(0, BV)
    # What does not depend on the slot is on its way before the slot is known: nothing is hoisted over the return.
    x = qkv_ptr + row * qkv_stride
    xq = tl.load(x + channel, mask=live, other=0.0)
    xk = tl.load(x + P + channel, mask=live, other=0.0)
    v_channel = 2 * P + h * D + own
    xv = tl.load(x + v_channel, mask=own < D, other=0.0)
    q0, q1, q2, q3 = load_taps(taps_ptr, channel, live, W)
    v0, v1, v2, v3 = load_taps(taps_ptr, v_channel, own < D, W)
    k0, k1, k2, k3 = load_taps(taps_ptr, P + channel, live, W)
    z = tl.load(raw_ptr + row * raw_stride + channel, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=live, other=0.0)
    log_a = tl.load(a_ptr + h)
    beta = tl.load(beta_ptr + row * beta_stride + h).to(tl.float32)
    out = out_ptr + row * P + h * D
    if slot == 0:
        for n in tl.static_range(PASSES):
            tl.store(out + own + n * BV, tl.zeros((BV,), out_ptr.dtype.element_ty), mask=own + n * BV < D)
        return
    state = state_ptr + (slot * H + h) * (D * D) + own[:, None] * D + c[None, :]
    s = tl.load(state, mask=(own < D)[:, None] & live[None, :], other=0.0)
    tail = tail_ptr + slot * ((W - 1) * 3 * P)
    q5, q6, q7 = load_tail(tail, channel, live, P, W)
    k5, k6, k7 = load_tail(tail, P + channel, live, P, W)
    v5, v6, v7 = load_tail(tail, v_channel, own < D, P, W)
    q = convolved(xq, q5, q6, q7, q0, q1, q2, q3, W)
    k = convolved(xk, k5, k6, k7, k0, k1, k2, k3, W)
    decay = exp2(log_decay(z, live, bias, tl.exp2(log_a * LOG2E), bound, GATE))
    q, k, kq = unit_pair(q, k)
    q *= D**-0.5
    kq *= D**-0.5
    beta = sigmoid(beta)
    values = values_ptr + row * P + h * D
    arrived = 0
    o = tl.zeros((BV,), tl.float32)
    for n in tl.static_range(PASSES):
        rows = own + n * BV
        v = convolved(xv, v5, v6, v7, v0, v1, v2, v3, W)
        tile = s.to(tl.float32)
        if n + 1 < PASSES:
            # What the next rows need is on its way while these are worked on.
            more = rows + BV < D
            s = tl.load(state + (n + 1) * (BV * D), mask=more[:, None] & live[None, :], other=0.0)
            v_channel += BV
            xv = tl.load(x + v_channel, mask=more, other=0.0)
            v0, v1, v2, v3 = load_taps(taps_ptr, v_channel, more, W)
            v5, v6, v7 = load_tail(tail, v_channel, more, P, W)
        tile, o, _ = delta_step(tile, q, k, kq, v, decay, beta)
        if SPLIT * PASSES > 1:
            tl.store(values + rows, o, mask=rows < D)
        # A number may lie in several warps: all must have read it before one writes.
        tl.debug_barrier()
        if SPLIT > 1 and n == PASSES - 1:
            # Before the state is written: others wait for the values only.
            arrived = tl.atomic_add(arrivals_ptr + slot * H + h, 1, sem="acq_rel")
        here = state + n * (BV * D)
        tl.store(here, cast(tile, state_ptr.dtype.element_ty), mask=(rows < D)[:, None] & live[None, :])
    weight = tl.load(norm_ptr + c, mask=live, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + channel, mask=live, other=0.0).to(tl.float32)
    if SPLIT > 1:
        if arrived != SPLIT - 1:
            return
        tl.store(arrivals_ptr + slot * H + h, 0)
    # All loads of what is left come first: each waits as long as all of them together.
    if SPLIT * PASSES > 1:
        o = tl.load(values + c, mask=live, other=0.0)
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
    o *= tl.rsqrt(tl.sum(rounded(o * o), axis=0) / D + eps) * weight
    tl.store(out + c, cast(gated(o, gate), out_ptr.dtype.element_ty), mask=live)


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
    config = tuned("kda_fused", N=requests * heads)
    block_v, passes = _tiles(config, dim, state.arrivals is not None)
    split = ceil_div(dim, block_v * passes)
    qkv, gate_raw, beta_logit, out_gate = (
        x if x.stride(1) == 1 else x.contiguous() for x in (qkv, gate_raw, beta_logit, out_gate)
    )
    launch(
        kda_fused_kernel,
        (split, heads, requests),
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
        state.arrivals if split > 1 else None,
        # Where one tile is a whole head, nothing goes through memory.
        torch.empty_like(out, dtype=torch.float32) if split * passes > 1 else out,
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
        BD=power_of_2(dim),
        BV=block_v,
        PASSES=passes,
        W=params.conv.shape[1],
        GATE=SOFTPLUS if params.lower_bound is None else BOUNDED,
        num_warps=config["num_warps"],
    )
    return out


def _tiles(config: Config, dim: int, shared: bool) -> tuple[int, int]:
    """Rows of a tile of the state, and how many tiles one program does one after the other: all, unless programs may
    share a head."""
    rows = power_of_2(dim)
    # One wave stores the values of a tile: on AMD a barrier does not wait for the stores of the others.
    block_v = min(config["block_v"], rows, 32)
    return block_v, min(config["passes"], rows // block_v) if shared else rows // block_v
