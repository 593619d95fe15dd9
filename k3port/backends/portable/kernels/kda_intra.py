"""KDA prefill: what every chunk can work out without the state, in parallel over chunks and heads.

With G the running sum of the log decays inside a chunk of C tokens (all exponents in base 2):

    A_ij = beta_i sum_c k_i k_j exp(G_i - G_j) for j < i,  QK_ij = sum_c q_i k_j exp(G_i - G_j) for j <= i,
    (I + A) [W | U] = beta [k exp G | v]

(the WY form of Yang et al., arXiv 2406.06484, with the per-channel decay of arXiv 2510.26692). Three kernels:

decay     gate and running sums
pairs     A and QK, 16 rows at a time: ``exp(G_i - G_j)`` is split at the row before these, so that no factor exceeds
          one. Inside the 16 rows the same split is in range where the gate is bounded; otherwise pairs whose indices
          differ first in the bit of weight B are split at the end of the lower block of B rows. The diagonal block
          is inverted at once: T = (I + A)^-1. Also q exp G, k exp(G_n - G), beta k exp G.
solve     block forward substitution: Y_b = T_b (X_b - sum_{c<b} A_bc Y_c)

Where keys are alike, the entries of A are near one and what they multiply cancels: A rounded to bfloat16 would be the
largest error of the chain, so it keeps twice as many bits. With keys correlated 0.9 and log decay -0.01 it alone makes
the output wrong by 5.5e-3; the roundings of T, Y and X - sum A Y make 1.3e-3, 2.2e-3 and 1.7e-3.

Programs are small and many: each is a chain of dependent products, which only other programs can hide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import LOG2E, cast, dot, exp2, sigmoid, softplus

BOUNDED, SOFTPLUS = 1, 2
"""The gate forms of :func:`k3port.ops.kda.kda_gate`."""

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
def log_decay(raw, mask, bias, a, bound, GATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Base-2 log decay of raw gates; zero where a token is padding, which then decays nothing."""
    z = raw + bias
    if GATE == _BOUNDED:
        g = bound * sigmoid(a * z)
    else:
        # e^-50 leaves nothing of a float32 state; running sums of more would lose the bits of the tokens after it.
        g = -a * softplus(z)
        g = tl.where(g < -50.0, -50.0, g)
    return tl.where(mask, g, 0.0) * LOG2E


@triton.jit
def kda_decay_kernel(  # type: ignore[no-untyped-def]
    g_ptr,
    a_ptr,
    bias_ptr,
    cu_ptr,
    slot_ptr,
    fall_ptr,
    g_stride,
    num_requests,
    first_chunk,
    bound,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    GATE: tl.constexpr,
):
    """Gate and running sums: one program walks down a chunk, ROWS tokens at once, with the channels of HEADS heads side
    by side, as many as fill the lanes with 16 bytes each."""
    first_head = tl.program_id(0) * HEADS
    chunk = tl.program_id(1)
    begin, tokens = chunk_span(cu_ptr, slot_ptr, num_requests, first_chunk + chunk, C)
    if tokens <= 0:
        return
    column = tl.arange(0, HEADS * BK)
    head = column // BK
    c = column % BK
    inside = (first_head + head < H) & (c < K)
    channel = first_head * K + head * K + c
    bias = tl.load(bias_ptr + channel, mask=inside, other=0.0)
    a = tl.exp2(tl.load(a_ptr + first_head + head, mask=inside, other=0.0) * LOG2E)
    total = tl.zeros((HEADS * BK,), tl.float32)
    g_ptr += begin.to(tl.int64) * g_stride
    fall_ptr += (chunk * H + first_head).to(tl.int64) * (C * K)
    r = tl.arange(0, ROWS)[:, None]
    for top in tl.range(0, C, ROWS):
        row = top + r
        # A token of padding decays nothing.
        mask = inside[None, :] & (row < tokens)
        raw = tl.load(g_ptr + row.to(tl.int64) * g_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        fall = log_decay(raw, mask, bias[None, :], a[None, :], bound, GATE)
        here = row * K + (head * (C * K) + c)[None, :]
        tl.store(fall_ptr + here, tl.cumsum(fall, 0) + total[None, :], mask=inside[None, :] & (row >= 0))
        total += tl.sum(fall, 0)


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
def early_columns(k_ptr, fall_ptr, edge, left, k_stride, tokens, c_in, K: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """16 earlier rows of k as columns ``k exp(edge - G)``, not normalised, and their sums of squares."""
    i = left + tl.arange(0, 16)[:, None]
    x = tl.load(k_ptr + i * k_stride, mask=(i < tokens) & c_in, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, axis=1)
    f = exp2(edge - tl.load(fall_ptr + i * K, mask=c_in, other=0.0))
    return tl.trans(cast(x * f, dtype)), squares


@triton.jit
def kda_pairs_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    beta_ptr,
    fall_ptr,
    cu_ptr,
    slot_ptr,
    qg_ptr,
    kg_ptr,
    x_ptr,
    qk_ptr,
    pair_ptr,
    q_stride,
    k_stride,
    beta_stride,
    num_requests,
    first_chunk,
    H: tl.constexpr,
    K: tl.constexpr,
    KB: tl.constexpr,
    C: tl.constexpr,
    ANCHORED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """16 rows of a chunk against all columns up to theirs. ``pair`` gets -A, with the inverse of I + A in place of the
    diagonal block."""
    h = tl.program_id(0)
    block = tl.program_id(1) % (C // 16)
    chunk = tl.program_id(1) // (C // 16)
    begin, tokens = chunk_span(cu_ptr, slot_ptr, num_requests, first_chunk + chunk, C)
    if tokens <= 0:
        return
    dtype = k_ptr.dtype.element_ty
    r = tl.arange(0, 16)
    i = r[:, None]
    j = r[None, :]
    low = block * 16
    base = (chunk * H + h).to(tl.int64) * C
    fall_ptr += base * K
    k_ptr += begin.to(tl.int64) * k_stride + h * K
    q_ptr += begin.to(tl.int64) * q_stride + h * K
    beta = tl.load(beta_ptr + (begin + low + r).to(tl.int64) * beta_stride + h, mask=low + r < tokens, other=0.0)
    # A token of padding writes nothing.
    beta = tl.where(low + r < tokens, sigmoid(beta.to(tl.float32)), 0.0)

    k_norm = tl.zeros((16,), tl.float32)
    q_norm = tl.zeros((16,), tl.float32)
    for first in tl.range(0, K, KB, num_stages=1):
        c = first + tl.arange(0, KB)[None, :]
        k = tl.load(k_ptr + (low + i) * k_stride + c, mask=(low + i < tokens) & (c < K), other=0.0).to(tl.float32)
        q = tl.load(q_ptr + (low + i) * q_stride + c, mask=(low + i < tokens) & (c < K), other=0.0).to(tl.float32)
        k_norm += tl.sum(k * k, axis=1)
        q_norm += tl.sum(q * q, axis=1)
    k_norm = tl.rsqrt(k_norm + 1e-6)[:, None]
    q_norm = tl.rsqrt(q_norm + 1e-6)[:, None] * (K**-0.5)

    A = tl.zeros((16, 16), tl.float32)
    QK = tl.zeros((16, 16), tl.float32)
    # Against the three blocks of columns before, as far as there are any.
    A0, A1, A2 = A, A, A
    QK0, QK1, QK2 = A, A, A
    norm0 = tl.zeros((16,), tl.float32)
    norm1, norm2 = norm0, norm0
    before = fall_ptr + tl.maximum(low - 1, 0) * K
    for first in tl.range(0, K, KB, num_stages=1):
        c = first + tl.arange(0, KB)[None, :]
        k = tl.load(k_ptr + (low + i) * k_stride + c, mask=(low + i < tokens) & (c < K), other=0.0).to(tl.float32)
        k *= k_norm
        q = tl.load(q_ptr + (low + i) * q_stride + c, mask=(low + i < tokens) & (c < K), other=0.0).to(tl.float32)
        q *= q_norm
        fall = tl.load(fall_ptr + (low + i) * K + c, mask=c < K, other=0.0)
        edge = tl.load(before + c, mask=c < tl.where(low > 0, K, 0), other=0.0)
        f = exp2(fall - edge)
        kf = k * f
        qf = q * f
        here = (base + low) * K + i * K + c
        start = exp2(edge)
        tl.store(qg_ptr + here, cast(qf * start, dtype), mask=c < K)
        tl.store(x_ptr + here, cast(kf * (start * beta[:, None]), dtype), mask=c < K)
        last = tl.load(fall_ptr + (C - 1) * K + c, mask=c < K, other=0.0)
        tl.store(kg_ptr + here, cast(k * exp2(last - fall), dtype), mask=c < K)
        kf = cast(kf, dtype)
        qf = cast(qf, dtype)
        if ANCHORED:
            # Log decays of at least -5 add up to exp(80) in 16 rows, which float32 and bfloat16 still hold.
            x = tl.trans(cast(k * exp2(edge - fall), dtype))
            A = dot(kf, x, A)
            QK = dot(qf, x, QK)
        else:
            for bit in tl.static_range(4):
                # The last row of the lower half of the pair of sub-blocks that a row belongs to.
                middle = low + (i | ((2 << bit) - 1)) - (1 << bit)
                f = exp2(-tl.abs(fall - tl.load(fall_ptr + middle * K + c, mask=c < K, other=0.0)))
                x = cast(k * f, dtype)
                pairs = pairs_of_bit(i, j, bit)
                A += tl.where(pairs, dot(x, tl.trans(x)), 0.0)
                QK += tl.where(pairs, dot(cast(q * f, dtype), tl.trans(x)), 0.0)
            QK += tl.where(i == j, tl.sum(q * k, axis=1)[:, None], 0.0)
        if low > 0:
            early, squares = early_columns(k_ptr + c, fall_ptr + c, edge, 0, k_stride, tokens, c < K, K, dtype)
            norm0 += squares
            A0 = dot(kf, early, A0)
            QK0 = dot(qf, early, QK0)
            if low > 16:
                early, squares = early_columns(k_ptr + c, fall_ptr + c, edge, 16, k_stride, tokens, c < K, K, dtype)
                norm1 += squares
                A1 = dot(kf, early, A1)
                QK1 = dot(qf, early, QK1)
            if low > 32:
                early, squares = early_columns(k_ptr + c, fall_ptr + c, edge, 32, k_stride, tokens, c < K, K, dtype)
                norm2 += squares
                A2 = dot(kf, early, A2)
                QK2 = dot(qf, early, QK2)
    qk_ptr += (base + low) * C
    pair_ptr += (base + low) * C
    spot = i * C + j
    tl.store(qk_ptr + spot + low, cast(tl.where(i >= j, QK, 0.0), dtype))
    tl.store(pair_ptr + spot + low, unit_lower_inverse(tl.where(i > j, A * beta[:, None], 0.0), 4, PRECISION))
    minus = -beta[:, None]
    if low > 0:
        across = tl.reshape(tl.rsqrt(norm0 + 1e-6), (1, 16))
        tl.store(pair_ptr + spot, A0 * minus * across)
        tl.store(qk_ptr + spot, cast(QK0 * across, dtype))
    if low > 16:
        across = tl.reshape(tl.rsqrt(norm1 + 1e-6), (1, 16))
        tl.store(pair_ptr + spot + 16, A1 * minus * across)
        tl.store(qk_ptr + spot + 16, cast(QK1 * across, dtype))
    if low > 32:
        across = tl.reshape(tl.rsqrt(norm2 + 1e-6), (1, 16))
        tl.store(pair_ptr + spot + 32, A2 * minus * across)
        tl.store(qk_ptr + spot + 32, cast(QK2 * across, dtype))
    # The scan multiplies the whole square.
    for right in tl.range(low + 16, C, 16, num_stages=1):
        tl.store(qk_ptr + spot + right, tl.zeros((16, 16), dtype))


@triton.jit
def product(y, a_ptr, x, NARROW: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """``y @ a + x`` for a ``[16, 16]`` tile; SPLIT keeps 16 bits of ``a`` where the product is bfloat16's."""
    a = tl.load(a_ptr)
    if NARROW:
        narrow = cast(y, tl.bfloat16)
        high = cast(a, tl.bfloat16)
        x = dot(narrow, high, x)
        if SPLIT:
            x = dot(narrow, cast(a - high.to(tl.float32), tl.bfloat16), x)
    else:
        x = dot(y, a, x, PRECISION)
    return x


@triton.jit
def kda_solve_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    v_ptr,
    beta_ptr,
    pair_ptr,
    w_ptr,
    u_ptr,
    cu_ptr,
    slot_ptr,
    v_stride,
    beta_stride,
    num_requests,
    first_chunk,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NB: tl.constexpr,
    C: tl.constexpr,
    NARROW: tl.constexpr,
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
    # Everything is transposed: the result of a product then is the left operand of the next without moving a number
    # to another lane.
    out = (tl.where(of_w, column, column - EDGE) + tl.arange(0, NB))[None, :]
    c = tl.trans(out)
    pair = pair_ptr + base * C + r[:, None]
    i = r[None, :] * C
    y0 = tl.zeros((NB, 16), tl.float32)
    y1 = y0
    y2 = y0
    for b in tl.static_range(C // 16):
        row = b * 16 + r
        if of_w:
            x = tl.load(x_ptr + (base + row)[None, :] * K + c, mask=c < K, other=0.0).to(tl.float32)
        else:
            live = (row < tokens)[None, :] & (c < V)
            token = (begin + row).to(tl.int64)[None, :]
            x = tl.load(v_ptr + token * v_stride + h * V + c, mask=live, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + (begin + row).to(tl.int64) * beta_stride + h, mask=row < tokens, other=0.0)
            x *= tl.expand_dims(sigmoid(beta.to(tl.float32)), 0)
        if b > 0:
            x = product(y0, pair + b * 16 * C + i, x, NARROW, PRECISION, True)
        if b > 1:
            x = product(y1, pair + b * 16 * C + i + 16, x, NARROW, PRECISION, True)
        if b > 2:
            x = product(y2, pair + b * 16 * C + i + 32, x, NARROW, PRECISION, True)
        y = product(x, pair + b * 16 * C + i + b * 16, None, NARROW, PRECISION, False)
        if b == 0:
            y0 = y
        if b == 1:
            y1 = y
        if b == 2:
            y2 = y
        y = tl.trans(y)
        if of_w:
            here = (base + row)[:, None] * K + out
            tl.store(w_ptr + here, cast(y, w_ptr.dtype.element_ty), mask=(out < K) & (row >= 0)[:, None])
        else:
            here = (base + row)[:, None] * V + out
            tl.store(u_ptr + here, cast(y, u_ptr.dtype.element_ty), mask=(out < V) & (row >= 0)[:, None])
