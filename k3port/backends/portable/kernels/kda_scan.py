"""KDA prefill, second half: the state walks over a request's chunks, in parallel over requests, heads, value columns.

    D = U - W S^T,  O = (q exp G) S^T + QK D,  S <- S exp(G_n) + D^T (k exp(G_n - G))

The state stays in float32 registers for the chunks of a slab and lies in memory, in its own dtype, between slabs; its
copy for the products has the activation dtype. Where the segment asks for it, the state at the end of a chunk is also
written to the slot of a snapshot, which no request of the step uses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import cast, dot


@triton.jit
def kda_scan_kernel(  # type: ignore[no-untyped-def]
    w_ptr,
    u_ptr,
    qg_ptr,
    kg_ptr,
    qk_ptr,
    fall_ptr,
    state_ptr,
    out_ptr,
    cu_ptr,
    slot_ptr,
    snapshot_ptr,
    out_stride,
    first_chunk,
    num_chunks,
    snapshot_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    PERIOD: tl.constexpr,
):
    vb = tl.program_id(0)
    h = tl.program_id(1)
    request = tl.program_id(2)
    begin = tl.load(cu_ptr + request)
    tokens = tl.load(cu_ptr + request + 1) - begin
    slot = tl.load(slot_ptr + request)
    rows = tl.arange(0, C)
    kc = tl.arange(0, BK)
    vc = vb * BV + tl.arange(0, BV)
    k_in = (kc < K)[None, :]
    v_in = (vc < V)[None, :]
    # This slab's part of the request's chunks.
    first = begin // C + request - first_chunk
    low = tl.maximum(0, -first)
    high = tl.minimum((tokens + C - 1) // C, num_chunks - first)
    if slot == 0:
        for n in range(low * C, tl.minimum(high * C, tokens), C):
            here = (begin + n + rows).to(tl.int64)[:, None] * out_stride + h * V + vc[None, :]
            zero = tl.zeros((C, BV), out_ptr.dtype.element_ty)
            tl.store(out_ptr + here, zero, mask=(n + rows < tokens)[:, None] & v_in)
        return
    if low >= high:
        return
    dtype = w_ptr.dtype.element_ty
    state = state_ptr + ((slot * H + h) * V + vc[None, :]).to(tl.int64) * K + kc[:, None]
    s_mask = (kc < K)[:, None] & v_in
    s = tl.load(state, mask=s_mask, other=0.0).to(tl.float32)
    for n in tl.range(low, high, num_stages=STAGES):
        chunk = ((first + n) * H + h).to(tl.int64)
        spot = (chunk * C + rows)[:, None] * K + kc[None, :]
        w = tl.load(w_ptr + spot, mask=k_in, other=0.0)
        u = tl.load(u_ptr + (chunk * C + rows)[:, None] * V + vc[None, :], mask=v_in, other=0.0)
        qg = tl.load(qg_ptr + spot, mask=k_in, other=0.0)
        kg = tl.load(kg_ptr + spot, mask=k_in, other=0.0)
        qk = tl.load(qk_ptr + (chunk * C + rows)[:, None] * C + rows[None, :])
        decay = tl.exp2(tl.load(fall_ptr + (chunk * C + C - 1) * K + kc, mask=kc < K, other=0.0))
        narrow = cast(s, dtype)
        d = cast(u.to(tl.float32) - dot(w, narrow), dtype)
        o = dot(qk, d, dot(qg, narrow))
        s = dot(tl.trans(kg), d, s * decay[:, None])
        here = (begin + n * C + rows).to(tl.int64)[:, None] * out_stride + h * V + vc[None, :]
        live = (n * C + rows < tokens)[:, None] & v_in
        tl.store(out_ptr + here, cast(o, out_ptr.dtype.element_ty), mask=live)
        if SNAPSHOTS:
            done = (n + 1) * C
            due = (done <= tokens) & (done % PERIOD == 0)
            place = snapshot_ptr + request * snapshot_stride + done // PERIOD - 1
            kept = tl.load(place, mask=due, other=0).to(tl.int64)
            copy = state_ptr + ((kept * H + h) * V + vc[None, :]) * K + kc[:, None]
            # Most chunks store nothing; a mask costs the loop less than a branch.
            tl.store(copy, cast(s, state_ptr.dtype.element_ty), mask=(kc < tl.where(kept > 0, K, 0))[:, None] & v_in)
    # A number may lie in several warps: all must have read it before one writes.
    tl.debug_barrier()
    tl.store(state, cast(s, state_ptr.dtype.element_ty), mask=s_mask)
