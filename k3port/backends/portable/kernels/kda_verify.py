"""The whole KDA mixer core of a step that verifies drafts, in one launch: 1 to 8 tokens per request.

As in :mod:`k3port.backends.portable.kernels.kda_fused` several programs share a head, and whichever comes last does the
gated norm, here of all tokens. The tile of the state stays in registers from token to token; state and tail in memory
keep their bits, and the record gets what :func:`k3port.ops.kda_commit.kda_commit` needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.delta import delta_rows, unit_pair
from k3port.backends.portable.kernels.kda_intra import BOUNDED, SOFTPLUS, log_decay
from k3port.backends.portable.kernels.lib import LN2, LOG2E, cast, exp2, norm_gated, sigmoid
from k3port.backends.portable.launch import ceil_div, in_rows, launch, power_of_2
from k3port.backends.portable.tuning import Config
from k3port.ops.kda_state import KdaParams, KdaState, required_record
from k3port.ops.segment import Segment


@triton.jit
def tail_rows(tail_ptr, first, c, D: tl.constexpr, P: tl.constexpr, W: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The W - 1 raw inputs before the first new token, for the channels ``first + c``; the tail is ``[W - 1, 3P]``."""
    rows = ()
    for j in tl.static_range(W - 1):
        rows = rows + (tl.load(tail_ptr + j * (3 * P) + first + c, mask=c < D, other=0.0).to(dtype),)
    return rows


@triton.jit
def tap_rows(taps_ptr, first, c, D: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    rows = ()
    for j in tl.static_range(W):
        rows = rows + (tl.load(taps_ptr + (first + c) * W + j, mask=c < D, other=0.0),)
    return rows


@triton.jit
def convolved(window, taps, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convolution and SiLU of the newest token of a window, rounded as by the op."""
    total = window[0].to(tl.float32) * taps[0]
    for j in tl.static_range(1, W):
        total += window[j].to(tl.float32) * taps[j]
    return cast(total * sigmoid(total), window[0].dtype)


@triton.jit
def token_rows(x_ptr, raw_ptr, beta_ptr, c, live, D: tl.constexpr, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """What one token brings for one head, from pointers to it: inputs of the convolution, raw gate and logit; zeros
    unless live."""
    # A scalar condition goes into the bound: the interpreter cannot combine its mask with a row's.
    there = c < tl.where(live, D, 0)
    q = tl.load(x_ptr + c, mask=there, other=0.0)
    k = tl.load(x_ptr + P + c, mask=there, other=0.0)
    v = tl.load(x_ptr + 2 * P + c, mask=there, other=0.0)
    z = tl.load(raw_ptr + c, mask=there, other=0.0).to(tl.float32)
    return q, k, v, z, tl.load(beta_ptr, mask=live, other=0.0).to(tl.float32)


@triton.jit
def kda_verify_kernel(  # type: ignore[no-untyped-def]
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
    cu_ptr,
    x_record_ptr,
    k_record_ptr,
    g_record_ptr,
    u_record_ptr,
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
    N: tl.constexpr,
    BN: tl.constexpr,
):
    part = tl.program_id(0)
    h = tl.program_id(1)
    request = tl.program_id(2)
    slot = tl.load(slot_ptr + request)
    begin = tl.load(cu_ptr + request).to(tl.int64)
    count = tl.load(cu_ptr + request + 1) - tl.load(cu_ptr + request)
    P: tl.constexpr = H * D
    SPLIT: tl.constexpr = (D + BV - 1) // BV
    c = tl.arange(0, BD)
    live = c < D
    channel = h * D + c
    own = part * BV + tl.arange(0, BV)
    own_live = own < D
    out = out_ptr + begin * P + h * D
    if slot == 0:
        for i in tl.range(0, count, num_stages=1):
            tl.store(out + i * P + own, tl.zeros((BV,), out_ptr.dtype.element_ty), mask=own_live)
        return
    state = state_ptr + ((slot * H + h) * D + own[:, None]) * D + c[None, :]
    s = tl.load(state, mask=own_live[:, None] & live[None, :], other=0.0).to(tl.float32)
    x = qkv_ptr + begin * qkv_stride + h * D
    raw = raw_ptr + begin * raw_stride + h * D
    logits = beta_ptr + begin * beta_stride + h
    xq, xk, xv, z, logit = token_rows(x, raw, logits, c, count > 0, D, P)
    tail = tail_ptr + slot * ((W - 1) * 3 * P)
    values = values_ptr + begin * P + h * D
    # Without the token's number, which inside such a 64-bit product keeps Triton 3.9 from compiling for gfx9.
    rows = slot * (N * P) + h * D
    inputs = x_record_ptr + slot * (N * 3 * P) + h * D
    a = tl.exp2(tl.load(a_ptr + h) * LOG2E)
    bias = tl.load(bias_ptr + channel, mask=live, other=0.0)
    weight = tl.load(norm_ptr + c, mask=live, other=0.0)
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    q_taps = tap_rows(taps_ptr, h * D, c, D, W)
    k_taps = tap_rows(taps_ptr, P + h * D, c, D, W)
    v_taps = tap_rows(taps_ptr, 2 * P + h * D, c, D, W)
    q_held = tail_rows(tail, h * D, c, D, P, W, dtype)
    k_held = tail_rows(tail, P + h * D, c, D, P, W, dtype)
    v_held = tail_rows(tail, 2 * P + h * D, c, D, P, W, dtype)
    mine = own[:, None] == c[None, :]
    for i in tl.range(0, count, num_stages=1):
        q_window = q_held + (xq,)
        k_window = k_held + (xk,)
        v_window = v_held + (xv,)
        g = log_decay(z + bias, live, 0.0, a, bound, GATE)
        beta = sigmoid(logit)
        # The next token is on its way while this one is worked on.
        x += qkv_stride
        raw += raw_stride
        logits += beta_stride
        xq, xk, xv, z, logit = token_rows(x, raw, logits, c, i + 1 < count, D, P)
        q = convolved(q_window, q_taps, W).to(tl.float32)
        k = convolved(k_window, k_taps, W)
        v = convolved(v_window, v_taps, W).to(tl.float32)
        q, key, kq = unit_pair(q, k.to(tl.float32))
        s, o, u = delta_rows(s, q * D**-0.5, key, kq * D**-0.5, v, exp2(g), beta, mine)
        tl.store(u_record_ptr + rows + i * P + own, u, mask=own_live)
        if part == 0:
            kept = inputs + i * (3 * P)
            tl.store(kept + c, q_window[W - 1], mask=live)
            tl.store(kept + P + c, k_window[W - 1], mask=live)
            tl.store(kept + 2 * P + c, v_window[W - 1], mask=live)
            tl.store(k_record_ptr + rows + i * P + c, k, mask=live)
            tl.store(g_record_ptr + rows + i * P + c, g * LN2, mask=live)
        q_held = q_window[1:]
        k_held = k_window[1:]
        v_held = v_window[1:]
        if SPLIT > 1:
            tl.store(values + i * P + own, o, mask=own_live)
        else:
            o = tl.where(own_live, o, 0.0)
            gate = tl.load(gate_ptr + (begin + i) * gate_stride + channel, mask=live, other=0.0).to(tl.float32)
            tl.store(out + i * P + c, norm_gated(o, gate, weight, eps, D, out_ptr.dtype.element_ty), mask=live)
    if SPLIT > 1:
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + slot * H + h, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(arrivals_ptr + slot * H + h, 0)
            # All tokens at once: each load waits as long as all of them together.
            t = tl.arange(0, BN)[:, None]
            there = (t < count) & live[None, :]
            o = tl.load(values + t * P + c[None, :], mask=there, other=0.0)
            gates = gate_ptr + begin * gate_stride + channel[None, :]
            gate = tl.load(gates + t * gate_stride, mask=there, other=0.0).to(tl.float32)
            y = norm_gated(o, gate, weight[None, :], eps, D, out_ptr.dtype.element_ty)
            tl.store(out + t * P + c[None, :], y, mask=there)


def kda_verify(
    qkv: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    out_gate: torch.Tensor,
    params: KdaParams,
    state: KdaState,
    segment: Segment,
    config: Config,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda`, for a segment of drafts."""
    record = required_record(segment, state.drafts)
    tokens, requests = qkv.shape[0], segment.slots.shape[0]
    heads, dim = params.num_heads, params.head_dim
    out = torch.empty((tokens, heads * dim), dtype=qkv.dtype, device=qkv.device)
    if not requests or record is None:
        return out
    block = power_of_2(dim)
    # One wave stores the values of a tile: on AMD a barrier does not wait for the stores of the others.
    block_v = min(config["block_v"], block, 32) if state.arrivals is not None else block
    qkv, qkv_stride = in_rows(qkv)
    gate_raw, raw_stride = in_rows(gate_raw)
    beta_logit, beta_stride = in_rows(beta_logit)
    out_gate, gate_stride = in_rows(out_gate)
    split = ceil_div(dim, block_v)
    launch(
        kda_verify_kernel,
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
        state.arrivals,
        # Where one program has a whole head, nothing goes through memory.
        torch.empty((tokens, heads * dim), dtype=torch.float32, device=qkv.device) if split > 1 else out,
        out,
        segment.slots,
        segment.cu_seqlens,
        record.x,
        record.k,
        record.g,
        record.u,
        qkv_stride,
        raw_stride,
        beta_stride,
        gate_stride,
        params.lower_bound or 0.0,
        params.norm_eps,
        H=heads,
        D=dim,
        BD=block,
        BV=block_v,
        W=params.conv.shape[1],
        GATE=SOFTPLUS if params.lower_bound is None else BOUNDED,
        N=record.k.shape[1],
        BN=power_of_2(record.k.shape[1]),
        num_warps=config["num_warps"],
    )
    return out
