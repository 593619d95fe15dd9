"""KDA prefill: what every chunk can work out without the state, in parallel over chunks and heads.

With G the running sum of the log decays inside a chunk of C tokens (all exponents in base 2):

    A_ij = beta_i sum_c k_i k_j exp(G_i - G_j) for j < i,  QK_ij = sum_c q_i k_j exp(G_i - G_j) for j <= i,
    (I + A) [W | U] = beta [k exp G | v]

(the WY form of Yang et al., arXiv 2406.06484, with the per-channel decay of arXiv 2510.26692). Three kernels:

prepare   gate, running sums, norms; q exp G, k exp(G_n - G), beta k exp G
pairs     A and QK block by block: ``exp(G_i - G_j)`` is split at an anchor row between j and i, so that no factor
          exceeds one. A block of 16 tokens around its diagonal is anchored in its middle where the gate is bounded,
          bit by bit otherwise, and is inverted at once: T = (I + A)^-1.
solve     block forward substitution: Y_b = T_b (X_b - sum_{c<b} A_bc Y_c)

Programs are small and many: each is a chain of dependent products, which only other programs can hide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import LN2, LOG2E, cast, dot, sigmoid

GIVEN, BOUNDED, SOFTPLUS = 0, 1, 2
"""Where the log decay comes from: an argument, or one of the two gate forms of :mod:`k3port.ops.kda`."""

_BOUNDED = tl.constexpr(BOUNDED)


@triton.jit
def find_request(cu_ptr, num_requests, chunk, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Request of a chunk and the chunk's place in it, where request b owns the chunks from ``cu[b] // C + b`` on.

    That leaves at most one unused chunk between two requests and needs no table from the host.
    """
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle) // C + middle <= chunk:
            low = middle
        else:
            high = middle
    return low, chunk - (tl.load(cu_ptr + low) // C + low)


@triton.jit
def chunk_span(cu_ptr, slot_ptr, num_requests, chunk, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """First token of a chunk and how many it has: none for an unused chunk and for padding."""
    request, place = find_request(cu_ptr, num_requests, chunk, C)
    begin = tl.load(cu_ptr + request) + place * C
    tokens = tl.minimum(tl.load(cu_ptr + request + 1) - begin, C)
    return begin, tl.where(tl.load(slot_ptr + request) == 0, 0, tokens)


@triton.jit
def log_decay(g, mask, bias, a, bound, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Base-2 log decay from what the caller gave; zero where a token is padding, which then decays nothing."""
    if GATE > 0:
        z = g + bias
        if GATE == _BOUNDED:
            g = bound * sigmoid(a * z)
        else:
            g = -a * tl.where(z > 20.0, z, tl.log2(1.0 + tl.exp2(tl.minimum(z, 20.0) * LOG2E)) * LN2)
        g = tl.where(mask, g, 0.0)
    return g * LOG2E


@triton.jit
def kda_prepare_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    a_ptr,
    bias_ptr,
    cu_ptr,
    slot_ptr,
    fall_ptr,
    qg_ptr,
    kg_ptr,
    x_ptr,
    factor_ptr,
    q_stride,
    k_stride,
    g_stride,
    beta_stride,
    num_requests,
    first_chunk,
    bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
):
    h = tl.program_id(0)
    chunk = tl.program_id(1)
    begin, tokens = chunk_span(cu_ptr, slot_ptr, num_requests, first_chunk + chunk, C)
    if tokens <= 0:
        return
    dtype = k_ptr.dtype.element_ty
    rows = tl.arange(0, C)
    c = tl.arange(0, BK)
    live = rows < tokens
    inside = (c < K)[None, :] & (rows >= 0)[:, None]
    mask = live[:, None] & inside
    token = (begin + rows).to(tl.int64)
    here = h * K + c[None, :]
    beta = tl.load(beta_ptr + token * beta_stride + h, mask=live, other=0.0).to(tl.float32)
    raw = tl.load(g_ptr + token[:, None] * g_stride + here, mask=mask, other=0.0).to(tl.float32)
    if GATE > 0:
        bias = tl.load(bias_ptr + h * K + c, mask=c < K, other=0.0)[None, :]
        total = tl.cumsum(log_decay(raw, mask, bias, tl.exp2(tl.load(a_ptr + h) * LOG2E), bound, GATE), axis=0)
        # A token of padding writes nothing.
        beta = tl.where(live, sigmoid(beta), 0.0)
    else:
        total = tl.cumsum(raw * LOG2E, axis=0)
    last = tl.sum(tl.where((rows == C - 1)[:, None], total, 0.0), axis=0)
    base = (chunk * H + h).to(tl.int64) * C
    spot = (base + rows)[:, None] * K + c[None, :]
    tl.store(fall_ptr + spot, total, mask=inside)
    q = tl.load(q_ptr + token[:, None] * q_stride + here, mask=mask, other=0.0).to(tl.float32)
    q_norm = tl.rsqrt(tl.sum(q * q, axis=1) + 1e-6) * (K**-0.5)
    f = tl.exp2(total)
    tl.store(qg_ptr + spot, cast(q * q_norm[:, None] * f, dtype), mask=inside)
    k = tl.load(k_ptr + token[:, None] * k_stride + here, mask=mask, other=0.0).to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)
    k *= k_norm[:, None]
    tl.store(kg_ptr + spot, cast(k * tl.exp2(last[None, :] - total), dtype), mask=inside)
    tl.store(x_ptr + spot, cast(k * f * beta[:, None], dtype), mask=inside)
    factor = factor_ptr + base * 3 + rows
    tl.store(factor, q_norm)
    tl.store(factor + C, k_norm)
    tl.store(factor + 2 * C, beta)


@triton.jit
def pairs_of_bit(i, j, bit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs j < i whose indices differ first, from above, in this bit."""
    return ((i >> (bit + 1)) == (j >> (bit + 1))) & ((i >> bit) > (j >> bit))


@triton.jit
def unit_lower_inverse(m, BITS: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(I + m)^-1`` of a strictly lower ``m``: exact for blocks of two, then pairs of blocks are joined by
    ``T21 = -T22 m21 T11``. No powers of ``m`` appear, which would cancel."""
    i = tl.arange(0, 1 << BITS)[:, None]
    j = tl.arange(0, 1 << BITS)[None, :]
    t = tl.where(i == j, 1.0, 0.0) - tl.where(pairs_of_bit(i, j, 0), m, 0.0)
    for bit in tl.static_range(1, BITS):
        corner = tl.where(pairs_of_bit(i, j, bit), m, 0.0)
        t -= dot(dot(t, corner, None, PRECISION), t, None, PRECISION)
    return t


@triton.jit
def corner_block(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    fall_ptr,
    factor_ptr,
    qk_ptr,
    pair_ptr,
    q_stride,
    k_stride,
    tokens,
    low,
    K: tl.constexpr,
    KB: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr,
):
    """Rows ``low + B ..`` against columns ``low ..``, B of each; the anchor is the last of the columns."""
    r = tl.arange(0, B)
    high = low + B
    dtype = k_ptr.dtype.element_ty
    A = tl.zeros((B, B), tl.float32)
    QK = tl.zeros((B, B), tl.float32)
    for first in tl.range(0, K, KB, num_stages=1):
        c = first + tl.arange(0, KB)
        c_in = (c < K)[None, :]
        anchor = tl.load(fall_ptr + (high - 1) * K + c, mask=c < K, other=0.0)[None, :]
        mask = (low + r < tokens)[:, None] & c_in
        k = tl.load(k_ptr + (low + r).to(tl.int64)[:, None] * k_stride + c[None, :], mask=mask, other=0.0)
        fall = tl.load(fall_ptr + (low + r)[:, None] * K + c[None, :], mask=c_in, other=0.0)
        x = tl.trans(cast(k.to(tl.float32) * tl.exp2(anchor - fall), dtype))
        mask = (high + r < tokens)[:, None] & c_in
        fall = tl.load(fall_ptr + (high + r)[:, None] * K + c[None, :], mask=c_in, other=0.0)
        f = tl.exp2(fall - anchor)
        k = tl.load(k_ptr + (high + r).to(tl.int64)[:, None] * k_stride + c[None, :], mask=mask, other=0.0)
        A = dot(cast(k.to(tl.float32) * f, dtype), x, A)
        q = tl.load(q_ptr + (high + r).to(tl.int64)[:, None] * q_stride + c[None, :], mask=mask, other=0.0)
        QK = dot(cast(q.to(tl.float32) * f, dtype), x, QK)
    spot = (high + r)[:, None] * C + low + r[None, :]
    right = tl.load(factor_ptr + C + low + r)[None, :]
    left = tl.load(factor_ptr + C + high + r) * tl.load(factor_ptr + 2 * C + high + r)
    tl.store(pair_ptr + spot, A * left[:, None] * right)
    tl.store(qk_ptr + spot, cast(QK * tl.load(factor_ptr + high + r)[:, None] * right, dtype))
    # The scan multiplies the whole square.
    tl.store(qk_ptr + (low + r)[:, None] * C + high + r[None, :], tl.zeros((B, B), dtype))


@triton.jit
def diagonal_block(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    fall_ptr,
    factor_ptr,
    qk_ptr,
    pair_ptr,
    q_stride,
    k_stride,
    tokens,
    low,
    K: tl.constexpr,
    KB: tl.constexpr,
    C: tl.constexpr,
    ANCHORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """16 rows against themselves; in place of their part of A stands the inverse."""
    r = tl.arange(0, 16)
    i = r[:, None]
    j = r[None, :]
    dtype = k_ptr.dtype.element_ty
    A = tl.zeros((16, 16), tl.float32)
    QK = tl.zeros((16, 16), tl.float32)
    for first in tl.range(0, K, KB, num_stages=1):
        c = first + tl.arange(0, KB)
        c_in = (c < K)[None, :]
        mask = (low + r < tokens)[:, None] & c_in
        token = (low + r).to(tl.int64)[:, None]
        k = tl.load(k_ptr + token * k_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        q = tl.load(q_ptr + token * q_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        fall = tl.load(fall_ptr + (low + r)[:, None] * K + c[None, :], mask=c_in, other=0.0)
        if ANCHORED:
            # Log decays of at least -5 keep both factors below exp(40) around the middle of 16 rows.
            d = fall - tl.load(fall_ptr + (low + 7) * K + c, mask=c < K, other=0.0)[None, :]
            f = tl.exp2(d)
            x = tl.trans(cast(k * tl.exp2(-d), dtype))
            A = dot(cast(k * f, dtype), x, A)
            QK = dot(cast(q * f, dtype), x, QK)
        else:
            for bit in tl.static_range(4):
                # The last row of the lower half of the pair of sub-blocks that a row belongs to.
                edge = (low + (r | ((2 << bit) - 1)) - (1 << bit))[:, None]
                f = tl.exp2(-tl.abs(fall - tl.load(fall_ptr + edge * K + c[None, :], mask=c_in, other=0.0)))
                x = cast(k * f, dtype)
                pairs = pairs_of_bit(i, j, bit)
                A += tl.where(pairs, dot(x, tl.trans(x)), 0.0)
                QK += tl.where(pairs, dot(cast(q * f, dtype), tl.trans(x)), 0.0)
            QK += tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
    spot = (low + i) * C + low + j
    right = tl.load(factor_ptr + C + low + r)[None, :]
    left = tl.load(factor_ptr + C + low + r) * tl.load(factor_ptr + 2 * C + low + r)
    QK = tl.where(i >= j, QK * tl.load(factor_ptr + low + r)[:, None] * right, 0.0)
    tl.store(qk_ptr + spot, cast(QK, dtype))
    A = tl.where(i > j, A * left[:, None] * right, 0.0)
    tl.store(pair_ptr + spot, unit_lower_inverse(A, 4, PRECISION))


@triton.jit
def kda_pairs_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    fall_ptr,
    factor_ptr,
    qk_ptr,
    pair_ptr,
    cu_ptr,
    slot_ptr,
    q_stride,
    k_stride,
    num_requests,
    first_chunk,
    H: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    C: tl.constexpr,
    ANCHORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per block: first the corners from the largest on, then the diagonal."""
    task = tl.program_id(0)
    h = tl.program_id(1)
    chunk = tl.program_id(2)
    begin, tokens = chunk_span(cu_ptr, slot_ptr, num_requests, first_chunk + chunk, C)
    if tokens <= 0:
        return
    q = q_ptr + begin.to(tl.int64) * q_stride + h * K
    k = k_ptr + begin.to(tl.int64) * k_stride + h * K
    base = (chunk * H + h).to(tl.int64) * C
    fall = fall_ptr + base * K
    factor = factor_ptr + base * 3
    qk = qk_ptr + base * C
    pair = pair_ptr + base * C
    DIAGONAL: tl.constexpr = C // 16
    if task < DIAGONAL:
        low = task * 16
        diagonal_block(
            q, k, fall, factor, qk, pair, q_stride, k_stride, tokens, low, K, KB, C, ANCHORED, PRECISION
        )
    elif task < DIAGONAL + C // 32:
        low = (task - DIAGONAL) * 32
        corner_block(q, k, fall, factor, qk, pair, q_stride, k_stride, tokens, low, K, KB, C, 16)
    elif C == 64:
        corner_block(q, k, fall, factor, qk, pair, q_stride, k_stride, tokens, 0, K, KB, C, 32)


@triton.jit
def kda_solve_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    v_ptr,
    pair_ptr,
    factor_ptr,
    w_ptr,
    u_ptr,
    cu_ptr,
    slot_ptr,
    v_stride,
    num_requests,
    first_chunk,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NB: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """NB columns of W or U for one chunk: programs from ``K / NB`` on work on U."""
    column = tl.program_id(0) * NB
    h = tl.program_id(1)
    chunk = tl.program_id(2)
    begin, tokens = chunk_span(cu_ptr, slot_ptr, num_requests, first_chunk + chunk, C)
    if tokens <= 0:
        return
    base = (chunk * H + h).to(tl.int64) * C
    r = tl.arange(0, 16)
    EDGE: tl.constexpr = (K + NB - 1) // NB * NB
    of_w = column < EDGE
    c = tl.where(of_w, column, column - EDGE) + tl.arange(0, NB)
    pair = pair_ptr + base * C + r[None, :]
    i = r[:, None]
    y0 = tl.zeros((16, NB), tl.float32)
    y1 = y0
    y2 = y0
    for b in tl.static_range(C // 16):
        row = b * 16 + r
        if of_w:
            x = tl.load(x_ptr + (base + row)[:, None] * K + c[None, :], mask=(c < K)[None, :], other=0.0).to(tl.float32)
        else:
            live = (row < tokens)[:, None] & (c < V)[None, :]
            token = (begin + row).to(tl.int64)[:, None]
            x = tl.load(v_ptr + token * v_stride + h * V + c[None, :], mask=live, other=0.0).to(tl.float32)
            x *= tl.load(factor_ptr + base * 3 + 2 * C + row)[:, None]
        if b > 0:
            x -= dot(tl.load(pair + (b * 16 + i) * C), y0, None, PRECISION)
        if b > 1:
            x -= dot(tl.load(pair + (b * 16 + i) * C + 16), y1, None, PRECISION)
        if b > 2:
            x -= dot(tl.load(pair + (b * 16 + i) * C + 32), y2, None, PRECISION)
        y = dot(tl.load(pair + (b * 16 + i) * C + b * 16), x, None, PRECISION)
        if b == 0:
            y0 = y
        if b == 1:
            y1 = y
        if b == 2:
            y2 = y
        if of_w:
            here = (base + row)[:, None] * K + c[None, :]
            tl.store(w_ptr + here, cast(y, w_ptr.dtype.element_ty), mask=(c < K)[None, :] & (i >= 0))
        else:
            here = (base + row)[:, None] * V + c[None, :]
            tl.store(u_ptr + here, cast(y, u_ptr.dtype.element_ty), mask=(c < V)[None, :] & (i >= 0))
