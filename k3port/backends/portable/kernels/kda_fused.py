"""The whole KDA mixer core of one decode step in one launch: convolution and tail, gates, normalisation, recurrence,
gated output norm.

One program takes the rows of a head's state in tiles, one after the other, and holds their outputs for the norm. Where
there are too few heads to fill the GPU several programs share a head, and whichever of them comes last finds all values
in memory, does the norm, which needs all values of the head, and shifts the convolution's tail, which all have read.

Where there are so many heads that the recurrence alone keeps the memory busy, separate kernels can be faster: the
tuned configuration says which.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.delta import delta_rows, unit_pair
from k3port.backends.portable.kernels.kda_intra import BOUNDED, SOFTPLUS, log_decay
from k3port.backends.portable.kernels.kda_separate import kda_separate
from k3port.backends.portable.kernels.kda_verify import kda_verify
from k3port.backends.portable.kernels.lib import LOG2E, cast, exp2, gated, norm_gated, sigmoid
from k3port.backends.portable.launch import ceil_div, in_rows, launch, power_of_2, tuned
from k3port.ops.kda_state import KdaParams, KdaState
from k3port.ops.segment import Segment

CANDIDATES = {
    "kda_fused": (
        {"launches": (1,), "block_v": (8,), "passes": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4)},
        {"launches": (1,), "block_v": (16,), "passes": (1, 2, 4, 8), "num_warps": (1, 2, 4)},
        {"launches": (1,), "block_v": (32,), "passes": (1, 2, 4), "num_warps": (1, 2, 4)},
        {"launches": (3,)},
    ),
    "kda_verify": ({"launches": (1,), "block_v": (8, 16, 32), "num_warps": (1, 2, 4)}, {"launches": (3,)}),
}


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
def store_tail(tail_ptr, channel, live, x0, x1, x2, P: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """The newest inputs of some channels, newest first, as the tail ``[W - 1, 3P]`` of the next token."""
    tail = tail_ptr + channel
    tl.store(tail + (W - 2) * (3 * P), x0.to(tail_ptr.dtype.element_ty), mask=live)
    if W > 2:
        tl.store(tail + (W - 3) * (3 * P), x1, mask=live)
    if W > 3:
        tl.store(tail + (W - 4) * (3 * P), x2, mask=live)


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
    rows = part * (BV * PASSES) + tl.arange(0, BV)
    # What does not depend on the slot is on its way before the slot is known: nothing is hoisted over the return.
    x = qkv_ptr + row * qkv_stride
    xq = tl.load(x + channel, mask=live, other=0.0)
    xk = tl.load(x + P + channel, mask=live, other=0.0)
    xv = tl.load(x + 2 * P + channel, mask=live, other=0.0)
    q0, q1, q2, q3 = load_taps(taps_ptr, channel, live, W)
    k0, k1, k2, k3 = load_taps(taps_ptr, P + channel, live, W)
    v0, v1, v2, v3 = load_taps(taps_ptr, 2 * P + channel, live, W)
    z = tl.load(raw_ptr + row * raw_stride + channel, mask=live, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, mask=live, other=0.0)
    log_a = tl.load(a_ptr + h)
    beta = tl.load(beta_ptr + row * beta_stride + h).to(tl.float32)
    out = out_ptr + row * P + h * D
    if slot == 0:
        for n in tl.static_range(PASSES):
            tl.store(out + rows + n * BV, tl.zeros((BV,), out_ptr.dtype.element_ty), mask=rows + n * BV < D)
        return
    state = state_ptr + (slot * H + h) * (D * D) + rows[:, None] * D + c[None, :]
    s = tl.load(state, mask=(rows < D)[:, None] & live[None, :], other=0.0)
    tail = tail_ptr + slot * ((W - 1) * 3 * P)
    q5, q6, q7 = load_tail(tail, channel, live, P, W)
    k5, k6, k7 = load_tail(tail, P + channel, live, P, W)
    v5, v6, v7 = load_tail(tail, 2 * P + channel, live, P, W)
    q = convolved(xq, q5, q6, q7, q0, q1, q2, q3, W)
    k = convolved(xk, k5, k6, k7, k0, k1, k2, k3, W)
    v = convolved(xv, v5, v6, v7, v0, v1, v2, v3, W)
    decay = exp2(log_decay(z, live, bias, tl.exp2(log_a * LOG2E), bound, GATE))
    q, k, kq = unit_pair(q, k)
    q *= D**-0.5
    kq *= D**-0.5
    beta = sigmoid(beta)
    if SPLIT == 1:
        # A number may lie in several warps: all must have read it before one writes.
        tl.debug_barrier()
        store_tail(tail, channel, live, xq, q5, q6, P, W)
        store_tail(tail, P + channel, live, xk, k5, k6, P, W)
        store_tail(tail, 2 * P + channel, live, xv, v5, v6, P, W)
    values = values_ptr + row * P + h * D
    head = tl.zeros((BV, BD), tl.float32)
    # A real loop: written out, the code of many tiles would not fit the instruction cache.
    for _n in tl.range(0, PASSES - 1, num_stages=1):
        tile = s.to(tl.float32)
        # The next rows are on their way while these are worked on.
        s = tl.load(state + BV * D, mask=(rows + BV < D)[:, None] & live[None, :], other=0.0)
        mine = rows[:, None] == c[None, :]
        tile, o, _u = delta_rows(tile, q, k, kq, v, decay, beta, mine)
        if SPLIT > 1:
            tl.store(values + rows, o, mask=rows < D)
        else:
            head = tl.where(mine, o[:, None], head)
        tl.debug_barrier()
        tl.store(state, cast(tile, state_ptr.dtype.element_ty), mask=(rows < D)[:, None] & live[None, :])
        state += BV * D
        rows += BV
    mine = rows[:, None] == c[None, :]
    tile, o, _u = delta_rows(s.to(tl.float32), q, k, kq, v, decay, beta, mine)
    weight = tl.load(norm_ptr + c, mask=live, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + channel, mask=live, other=0.0).to(tl.float32)
    arrived = 0
    if SPLIT > 1:
        tl.store(values + rows, o, mask=rows < D)
    tl.debug_barrier()
    if SPLIT > 1:
        # Before the state is written: others wait for the values only.
        arrived = tl.atomic_add(arrivals_ptr + slot * H + h, 1, sem="acq_rel")
    tl.store(state, cast(tile, state_ptr.dtype.element_ty), mask=(rows < D)[:, None] & live[None, :])
    if SPLIT == 1:
        y = tl.sum(tl.where(mine, o[:, None], head), axis=0)
        tl.store(out + c, norm_gated(y, gate, weight, eps, D, out_ptr.dtype.element_ty), mask=live)
    elif arrived == SPLIT - 1:
        tl.store(arrivals_ptr + slot * H + h, 0)
        # All loads of what is left come first: each waits as long as all of them together.
        y = tl.load(values + c, mask=live, other=0.0)
        third = tl.arange(0, 4)[:, None]
        each = third * P + channel[None, :]
        each_live = (third < 3) & live[None, :]
        newest = tl.load(x + each, mask=each_live, other=0.0)
        older, oldest, _last = load_tail(tail, each, each_live, P, W)
        tl.debug_barrier()
        store_tail(tail, each, each_live, newest, older, oldest, P, W)
        tl.store(out + c, norm_gated(y, gate, weight, eps, D, out_ptr.dtype.element_ty), mask=live)


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
    heads, dim = params.num_heads, params.head_dim
    config = tuned("kda_verify" if segment.draft else "kda_fused", N=segment.slots.shape[0] * heads)
    if config["launches"] > 1:
        return kda_separate(qkv, gate_raw, beta_logit, out_gate, params, state, segment)
    if segment.draft:
        return kda_verify(qkv, gate_raw, beta_logit, out_gate, params, state, segment, config)
    qkv, qkv_stride = in_rows(qkv)
    gate_raw, raw_stride = in_rows(gate_raw)
    beta_logit, beta_stride = in_rows(beta_logit)
    out_gate, gate_stride = in_rows(out_gate)
    out = torch.empty_like(out_gate, dtype=qkv.dtype, memory_format=torch.contiguous_format)
    requests, taps = qkv.shape[0], params.conv
    if not requests:
        return out
    block_v, passes, split = _tiles(config["block_v"], config["passes"], dim, state.arrivals is not None)
    launch(
        kda_fused_kernel,
        (split, heads, requests),
        qkv,
        gate_raw,
        beta_logit,
        out_gate,
        taps,
        params.A_log,
        params.dt_bias,
        params.o_norm,
        state.conv,
        state.recurrent,
        state.arrivals if split > 1 else None,
        # Where one program has a whole head, nothing goes through memory.
        torch.empty_like(out, dtype=torch.float32) if split > 1 else out,
        out,
        segment.slots,
        qkv_stride,
        raw_stride,
        beta_stride,
        gate_stride,
        params.lower_bound or 0.0,
        params.norm_eps,
        H=heads,
        D=dim,
        BD=power_of_2(dim),
        BV=block_v,
        PASSES=passes,
        W=taps.shape[1],
        GATE=SOFTPLUS if params.lower_bound is None else BOUNDED,
        num_warps=config["num_warps"],
    )
    return out


@functools.lru_cache(maxsize=4096)
def _tiles(block_v: int, passes: int, dim: int, shared: bool) -> tuple[int, int, int]:
    """Rows of a tile of the state, how many tiles one program does one after the other, and programs of a head: one,
    unless programs may share it."""
    rows = power_of_2(dim)
    block_v = min(block_v, rows)
    if shared and passes < rows // block_v:
        # One wave stores the values of a tile: on AMD a barrier does not wait for the stores of the others.
        block_v = min(block_v, 32)
        passes = min(passes, rows // block_v)
    else:
        passes = rows // block_v
    return block_v, passes, ceil_div(dim, block_v * passes)
