"""KDA decode: one token per request, state slots updated in place; or a few drafts per request, which are recorded.

Drafts pass through the same tile of the state in registers, token by token, and the state in memory stays.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.delta import delta_step, unit_pair
from k3port.backends.portable.kernels.kda_intra import BOUNDED, SOFTPLUS, log_decay
from k3port.backends.portable.kernels.lib import LN2, LOG2E, cast, exp2, sigmoid
from k3port.backends.portable.launch import ceil_div, in_rows, launch, power_of_2, tuned
from k3port.ops.kda_state import KdaDrafts, required_record
from k3port.ops.segment import Segment

CANDIDATES = {"block_v": (8, 16, 32, 64), "num_warps": (1, 2, 4)}


@triton.jit
def token_rows(q_ptr, k_ptr, v_ptr, raw_ptr, beta_ptr, kc, vc, live, K: tl.constexpr, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """What one token brings for one head, from pointers to it: k as it is, the rest in float32; zeros unless live."""
    # A scalar condition goes into the bound: the interpreter cannot combine its mask with a row's.
    k_in = kc < tl.where(live, K, 0)
    z = tl.load(raw_ptr + kc, mask=k_in, other=0.0).to(tl.float32)
    logit = tl.load(beta_ptr, mask=live, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + kc, mask=k_in, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + kc, mask=k_in, other=0.0)
    v = tl.load(v_ptr + vc, mask=vc < tl.where(live, V, 0), other=0.0).to(tl.float32)
    return q, k, v, z, logit


@triton.jit
def kda_step_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    raw_ptr,
    beta_ptr,
    a_ptr,
    bias_ptr,
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
    raw_stride,
    beta_stride,
    bound,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
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
    q_ptr += begin * q_stride + h * K
    k_ptr += begin * k_stride + h * K
    v_ptr += begin * v_stride + h * V
    raw_ptr += begin * raw_stride + h * K
    beta_ptr += begin * beta_stride + h
    out = out_ptr + (begin * H + h) * V + vc
    # What does not depend on the slot is on its way before the slot is known: nothing is hoisted over the return.
    bias = tl.load(bias_ptr + h * K + kc, mask=k_in, other=0.0)
    log_a = tl.load(a_ptr + h)
    q, k, v, z, logit = token_rows(q_ptr, k_ptr, v_ptr, raw_ptr, beta_ptr, kc, vc, count > 0, K, V)
    if slot == 0:
        for i in tl.range(0, count, num_stages=1):
            tl.store(out + i * (H * V), tl.zeros((BV,), out_ptr.dtype.element_ty), mask=v_in)
        return
    state = state_ptr + ((slot * H + h) * V + vc[:, None]) * K + kc[None, :]
    mask = v_in[:, None] & k_in[None, :]
    s = tl.load(state, mask=mask, other=0.0).to(tl.float32)
    a = tl.exp2(log_a * LOG2E)
    for i in tl.range(0, count, num_stages=1):
        q_next, k_next, v_next, z_next, logit_next = q, k, v, z, logit
        if DRAFTS > 0:
            # The next token is on its way while this one is worked on.
            q_ptr += q_stride
            k_ptr += k_stride
            v_ptr += v_stride
            raw_ptr += raw_stride
            beta_ptr += beta_stride
            q_next, k_next, v_next, z_next, logit_next = token_rows(
                q_ptr, k_ptr, v_ptr, raw_ptr, beta_ptr, kc, vc, i + 1 < count, K, V
            )
        g = log_decay(z, k_in, bias, a, bound, GATE)
        q, key, kq = unit_pair(q, k.to(tl.float32))
        s, o, u = delta_step(s, q * K**-0.5, key, kq * K**-0.5, v, exp2(g), sigmoid(logit))
        tl.store(out + i * (H * V), cast(o, out_ptr.dtype.element_ty), mask=v_in)
        if DRAFTS > 0:
            first = slot * (DRAFTS * H) + h
            tl.store(u_record_ptr + first * V + i * (H * V) + vc, u, mask=v_in)
            if vb == 0:
                tl.store(k_record_ptr + first * K + i * (H * K) + kc, k, mask=k_in)
                tl.store(g_record_ptr + first * K + i * (H * K) + kc, g * LN2, mask=k_in)
        q, k, v, z, logit = q_next, k_next, v_next, z_next, logit_next
    if DRAFTS == 0:
        # A number may lie in several warps: all must have read it before one writes.
        tl.debug_barrier()
        tl.store(state, cast(s, state_ptr.dtype.element_ty), mask=mask)


def kda_core_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    state: torch.Tensor,
    segment: Segment,
    drafts: KdaDrafts | None = None,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda_core`, for decode."""
    record = required_record(segment, drafts)
    q, q_stride = in_rows(q)
    k, k_stride = in_rows(k)
    v, v_stride = in_rows(v)
    gate_raw, raw_stride = in_rows(gate_raw)
    beta_logit, beta_stride = in_rows(beta_logit)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    _, heads, key_dim = k.shape
    requests, value_dim = segment.slots.shape[0], v.shape[2]
    if requests:
        config = tuned("kda_step", N=requests * heads)
        block_v = min(config["block_v"], power_of_2(value_dim))
        launch(
            kda_step_kernel,
            (ceil_div(value_dim, block_v), heads, requests),
            q,
            k,
            v,
            gate_raw,
            beta_logit,
            A_log,
            dt_bias,
            state,
            out,
            segment.slots,
            segment.cu_seqlens,
            *((None, None, None) if record is None else (record.k, record.g, record.u)),
            q_stride,
            k_stride,
            v_stride,
            raw_stride,
            beta_stride,
            lower_bound or 0.0,
            H=heads,
            K=key_dim,
            V=value_dim,
            BK=power_of_2(key_dim),
            BV=block_v,
            GATE=SOFTPLUS if lower_bound is None else BOUNDED,
            DRAFTS=0 if record is None else record.k.shape[1],
            num_warps=config["num_warps"],
        )
    return out
