"""Triton kernels for the tests of the AMD emulator, among them two that are wrong on purpose."""

from __future__ import annotations

import amd_needs  # noqa: F401
import triton
import triton.language as tl


@triton.jit
def elementwise(x, y, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    a = tl.load(x + i, mask=m, other=0.0).to(tl.float32)
    b = tl.load(y + i, mask=m, other=1.0).to(tl.float32)
    r = tl.sigmoid(a) * b + tl.log(tl.abs(b) + 1.0) - a / (b * b + 0.5) + tl.sqrt(tl.abs(a))
    tl.store(o + i, r.to(o.dtype.element_ty), mask=m)


@triton.jit
def rowsum(x, o, M: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * M + tl.arange(0, M)
    j = tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(o + i, tl.sum(v, 1) + tl.max(v, 1))


@triton.jit
def colscan(x, o, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)
    j = tl.arange(0, N)
    v = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(o + i[:, None] * N + j[None, :], tl.cumsum(v, 0))


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PREC: tl.constexpr):
    rm = tl.arange(0, M)
    rn = tl.arange(0, N)
    rk = tl.arange(0, K)
    A = tl.load(a + rm[:, None] * K + rk[None, :])
    Bm = tl.load(b + rk[:, None] * N + rn[None, :])
    tl.store(c + rm[:, None] * N + rn[None, :], tl.dot(A, Bm, input_precision=PREC))


@triton.jit
def gemm(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pm = tl.program_id(0)
    pn = tl.program_id(1)
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        A = tl.load(
            a + rm[:, None] * K + (k + rk)[None, :], mask=(rm[:, None] < M) & ((k + rk)[None, :] < K), other=0.0
        )
        Bm = tl.load(
            b + (k + rk)[:, None] * N + rn[None, :], mask=((k + rk)[:, None] < K) & (rn[None, :] < N), other=0.0
        )
        acc = tl.dot(A, Bm, acc)
    tl.store(c + rm[:, None] * N + rn[None, :], acc.to(c.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@triton.jit
def softmax(x, o, n, N: tl.constexpr):
    r = tl.program_id(0)
    j = tl.arange(0, N)
    v = tl.load(x + r * n + j, mask=j < n, other=-float("inf")).to(tl.float32)
    v = tl.exp(v - tl.max(v, 0))
    tl.store(o + r * n + j, (v / tl.sum(v, 0)).to(o.dtype.element_ty), mask=j < n)


@triton.jit
def flash(q, k, v, o, T, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    pid = tl.program_id(0)
    h = tl.program_id(1)
    rm = pid * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    q += h * T * D
    k += h * T * D
    v += h * T * D
    o += h * T * D
    Q = tl.load(q + rm[:, None] * D + rd[None, :], mask=rm[:, None] < T, other=0.0)
    m = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for s in range(0, tl.minimum((pid + 1) * BM, T), BN):
        kn = s + rn
        K = tl.load(k + kn[None, :] * D + rd[:, None], mask=kn[None, :] < T, other=0.0)
        S = tl.dot(Q, K) * (scale * 1.4426950408889634)
        S = tl.where((kn[None, :] <= rm[:, None]) & (kn[None, :] < T), S, -float("inf"))
        mn = tl.maximum(m, tl.max(S, 1))
        p = tl.math.exp2(S - mn[:, None])
        al = tl.math.exp2(m - mn)
        total = total * al + tl.sum(p, 1)
        V = tl.load(v + kn[:, None] * D + rd[None, :], mask=kn[:, None] < T, other=0.0)
        acc = tl.dot(p.to(V.dtype), V, acc * al[:, None])
        m = mn
    tl.store(o + rm[:, None] * D + rd[None, :], (acc / total[:, None]).to(o.dtype.element_ty), mask=rm[:, None] < T)


@triton.jit
def delta(q, k, v, beta, g, o, h0, ht, T, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """Recurrent gated delta rule, one (value block, head) per program."""
    iv = tl.program_id(0)
    h = tl.program_id(1)
    rk = tl.arange(0, K)
    rv = iv * BV + tl.arange(0, BV)
    S = tl.load(h0 + h * K * V + rk[:, None] * V + rv[None, :]).to(tl.float32)
    for t in range(0, T):
        qt = tl.load(q + (h * T + t) * K + rk).to(tl.float32)
        kt = tl.load(k + (h * T + t) * K + rk).to(tl.float32)
        vt = tl.load(v + (h * T + t) * V + rv).to(tl.float32)
        bt = tl.load(beta + h * T + t).to(tl.float32)
        gt = tl.load(g + h * T + t).to(tl.float32)
        kt = kt / tl.sqrt(tl.sum(kt * kt) + 1e-6)
        qt = qt / tl.sqrt(tl.sum(qt * qt) + 1e-6)
        S *= tl.exp(gt)
        d = (vt - tl.sum(S * kt[:, None], 0)) * bt
        S += kt[:, None] * d[None, :]
        tl.store(o + (h * T + t) * V + rv, tl.sum(S * qt[:, None], 0).to(o.dtype.element_ty))
    tl.store(ht + h * K * V + rk[:, None] * V + rv[None, :], S)


@triton.jit
def atomics(x, idx, o, cnt, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    v = tl.load(x + i, mask=m, other=0.0)
    j = tl.load(idx + i, mask=m, other=0)
    tl.atomic_add(o + j, v, mask=m)
    tl.atomic_max(cnt + j, i, mask=m)


@triton.jit
def dot_scaled(
    a,
    sa,
    b,
    sb,
    c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    FA: tl.constexpr,
    FB: tl.constexpr,
    PA: tl.constexpr,
    PB: tl.constexpr,
    HAS_SA: tl.constexpr,
):
    """a: M x K/PA, b stored N x K/PB (transposed on load), e8m0 scales M x K/32 and N x K/32."""
    rm = tl.arange(0, M)
    rn = tl.arange(0, N)
    ra = tl.arange(0, K // PA)
    rb = tl.arange(0, K // PB)
    rs = tl.arange(0, K // 32)
    A = tl.load(a + rm[:, None] * (K // PA) + ra[None, :])
    Bm = tl.load(b + rn[None, :] * (K // PB) + rb[:, None])
    SB = tl.load(sb + rn[:, None] * (K // 32) + rs[None, :])
    if HAS_SA:
        SA = tl.load(sa + rm[:, None] * (K // 32) + rs[None, :])
        acc = tl.dot_scaled(A, SA, FA, Bm, SB, FB)
    else:
        acc = tl.dot_scaled(A, None, FA, Bm, SB, FB)
    tl.store(c + rm[:, None] * N + rn[None, :], acc)


@triton.jit
def ops_int(a, b, o, n, B: tl.constexpr):
    """16 integer results per element (a, b: i32, b != 0)."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    x = tl.load(a + i, mask=m, other=1)
    y = tl.load(b + i, mask=m, other=1)
    x8 = x.to(tl.int8)
    y16 = y.to(tl.int16)
    xl = x.to(tl.int64)
    yl = y.to(tl.int64)
    s = y & 31
    tl.store(o + 0 * n + i, (x // y).to(tl.int64), mask=m)
    tl.store(o + 1 * n + i, (x % y).to(tl.int64), mask=m)
    tl.store(o + 2 * n + i, xl * yl + xl, mask=m)
    tl.store(o + 3 * n + i, (x << s).to(tl.int64), mask=m)
    tl.store(o + 4 * n + i, (x >> s).to(tl.int64), mask=m)
    tl.store(o + 5 * n + i, (x.to(tl.uint32) >> s.to(tl.uint32)).to(tl.int64), mask=m)
    tl.store(o + 6 * n + i, (x8 * 3 + y16).to(tl.int64), mask=m)
    tl.store(o + 7 * n + i, tl.umulhi(x, y).to(tl.int64), mask=m)
    tl.store(o + 8 * n + i, tl.minimum(x, y).to(tl.int64) - tl.maximum(x, y).to(tl.int64), mask=m)
    tl.store(o + 9 * n + i, ((x ^ y) | (x & ~y)).to(tl.int64), mask=m)
    tl.store(o + 10 * n + i, xl // (yl * 3), mask=m)
    tl.store(o + 11 * n + i, (xl << (yl & 63)) >> 5, mask=m)
    tl.store(o + 12 * n + i, tl.where(x > y, x8.to(tl.int64), y16.to(tl.int64)), mask=m)
    tl.store(o + 13 * n + i, x.to(tl.float32).to(tl.int64), mask=m)
    tl.store(o + 14 * n + i, (x.to(tl.uint32) % 7).to(tl.int64), mask=m)
    tl.store(o + 15 * n + i, tl.abs(x).to(tl.int64), mask=m)


@triton.jit
def ops_float(a, b, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    x = tl.load(a + i, mask=m, other=1.0).to(tl.float32)
    y = tl.load(b + i, mask=m, other=1.0).to(tl.float32)
    tl.store(o + 0 * n + i, tl.exp(x), mask=m)
    tl.store(o + 1 * n + i, tl.log(tl.abs(y)), mask=m)
    tl.store(o + 2 * n + i, tl.sin(x), mask=m)
    tl.store(o + 3 * n + i, tl.cos(x * 10.0), mask=m)
    tl.store(o + 4 * n + i, tl.erf(x), mask=m)
    tl.store(o + 5 * n + i, tl.rsqrt(tl.abs(x)), mask=m)
    tl.store(o + 6 * n + i, tl.floor(x * 3) + tl.ceil(y * 3), mask=m)
    tl.store(o + 7 * n + i, tl.fma(x, y, x), mask=m)
    tl.store(o + 8 * n + i, tl.sqrt_rn(tl.abs(x)), mask=m)
    tl.store(o + 9 * n + i, tl.div_rn(x, y), mask=m)
    tl.store(o + 10 * n + i, tl.clamp(x, -0.5, 0.5), mask=m)
    tl.store(o + 11 * n + i, tl.maximum(x, y) - tl.minimum(x, y), mask=m)
    tl.store(o + 12 * n + i, 2 * tl.sigmoid(2 * x) - 1, mask=m)
    tl.store(o + 13 * n + i, tl.exp2(x) + tl.log2(tl.abs(y)), mask=m)
    tl.store(o + 14 * n + i, (x.to(tl.float64) * y.to(tl.float64) + 1.0).to(tl.float32), mask=m)
    tl.store(o + 15 * n + i, x / (1e-20 + tl.abs(y)) * 1e-10, mask=m)


@triton.jit
def casts(a, o16, obf, o8a, o8b, oi, ou, n, B: tl.constexpr, FA: tl.constexpr, FB: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    x = tl.load(a + i, mask=m, other=0.0)
    h = x.to(tl.float16)
    tl.store(o16 + i, h * h + h, mask=m)
    tl.store(obf + i, x.to(tl.bfloat16), mask=m)
    tl.store(o8a + i, x.to(FA), mask=m)
    tl.store(o8b + i, x.to(FB), mask=m)
    tl.store(oi + i, (x * 20).to(tl.int8), mask=m)
    tl.store(ou + i, (tl.abs(x) * 1000).to(tl.uint32), mask=m)


@triton.jit
def fp8_in(a, b, o, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < n
    tl.store(
        o + i, tl.load(a + i, mask=m).to(tl.float32) + tl.load(b + i, mask=m).to(tl.bfloat16).to(tl.float32), mask=m
    )


@triton.jit
def selections(x, ordered, oi, om, og, N: tl.constexpr):
    r = tl.program_id(0)
    j = tl.arange(0, N)
    v = tl.load(x + r * N + j)
    tl.store(ordered + r * N + j, tl.sort(v))
    tl.store(oi + r, tl.argmax(v, 0))
    tl.store(om + r, tl.argmin(v, 0))
    tl.store(og + r * N + j, tl.gather(v, N - 1 - j, 0) + tl.flip(v, 0))


@triton.jit
def reshape(x, o, M: tl.constexpr, N: tl.constexpr):
    v = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    a, b = tl.split(tl.reshape(v, (M, N // 2, 2)))
    w = tl.reshape(tl.join(b, a), (M, N))
    tl.store(o + tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :], tl.trans(w))


@triton.jit
def collatz(x, o):
    """Data-dependent loop per program and a scalar branch."""
    p = tl.program_id(0)
    v = tl.load(x + p)
    c = 0
    while v > 1:
        v = tl.where(v % 2 == 0, v // 2, 3 * v + 1)
        c += 1
    if c % 2 == 0:
        c = -c
    tl.store(o + p, c)


@triton.jit
def flash_wrong(q, k, v, o, T, scale, BM: tl.constexpr, BN: tl.constexpr, D: tl.constexpr):
    """Intentionally wrong: the strict causal mask drops the diagonal for rows > 0."""
    pid = tl.program_id(0)
    h = tl.program_id(1)
    rm = pid * BM + tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rd = tl.arange(0, D)
    q += h * T * D
    k += h * T * D
    v += h * T * D
    o += h * T * D
    Q = tl.load(q + rm[:, None] * D + rd[None, :], mask=rm[:, None] < T, other=0.0)
    m = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for s in range(0, tl.minimum((pid + 1) * BM, T), BN):
        kn = s + rn
        K = tl.load(k + kn[None, :] * D + rd[:, None], mask=kn[None, :] < T, other=0.0)
        S = tl.dot(Q, K) * (scale * 1.4426950408889634)
        S = tl.where((kn[None, :] < tl.maximum(rm[:, None], 1)) & (kn[None, :] < T), S, -float("inf"))
        mn = tl.maximum(m, tl.max(S, 1))
        p = tl.math.exp2(S - mn[:, None])
        al = tl.math.exp2(m - mn)
        total = total * al + tl.sum(p, 1)
        V = tl.load(v + kn[:, None] * D + rd[None, :], mask=kn[:, None] < T, other=0.0)
        acc = tl.dot(p.to(V.dtype), V, acc * al[:, None])
        m = mn
    tl.store(o + rm[:, None] * D + rd[None, :], (acc / total[:, None]).to(o.dtype.element_ty), mask=rm[:, None] < T)


@triton.jit
def softmax_nomask(x, o, n, N: tl.constexpr):
    """Intentionally wrong: reads past the row end without a mask."""
    r = tl.program_id(0)
    j = tl.arange(0, N)
    v = tl.load(x + r * n + j).to(tl.float32)
    v = tl.exp(v - tl.max(v, 0))
    tl.store(o + r * n + j, (v / tl.sum(v, 0)).to(o.dtype.element_ty), mask=j < n)
