"""Triton kernels run under the AMD emulator against float64 references: name -> function(arch) -> (error, tolerance).

The functions launch with ordinary ``kernel[grid](...)`` and must be called inside ``emulate(arch)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import amd_kernels as kernels
import torch
import triton.language as tl

from k3port.testing.amd_isa.formats import FP4

Check = Callable[[str], tuple[float, float]]
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
NAN = float("nan")
FP8 = {
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2),
}
FP8_TYPES = {"gfx942": (tl.float8e4b8, tl.float8e5b16), "gfx950": (tl.float8e4nv, tl.float8e5)}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def worst(*errors: float) -> float:
    return NAN if any(math.isnan(e) for e in errors) else max(errors)


def elementwise(arch: str) -> tuple[float, float]:
    x, y, o = torch.randn(1000).to(BF16), torch.randn(1000), torch.full((1000,), NAN)
    kernels.elementwise[(2,)](x, y, o, 1000, B=512)
    a, b = x.double(), y.double()
    return relative(o, a.sigmoid() * b + (b.abs() + 1).log() - a / (b * b + 0.5) + a.abs().sqrt()), 1e-6


def rowsum(arch: str) -> tuple[float, float]:
    x, o = torch.randn(64, 128), torch.full((64,), NAN)
    kernels.rowsum[(4,)](x, o, M=16, N=128)
    return relative(o, x.double().sum(1) + x.double().amax(1)), 1e-6


def colscan(arch: str) -> tuple[float, float]:
    x, o = torch.randn(64, 16), torch.full((64, 16), NAN)
    kernels.colscan[(1,)](x, o, M=64, N=16)
    return relative(o, x.double().cumsum(0)), 1e-6


def _dot(
    a: torch.Tensor, b: torch.Tensor, tolerance: float, precision: str = "ieee", out: torch.dtype = F32, **options: int
) -> Check:
    def check(arch: str) -> tuple[float, float]:
        (m, k), n = a.shape, b.shape[1]
        c = torch.zeros(m, n, dtype=out) if out == torch.int32 else torch.full((m, n), NAN)
        kernels.dot[(1,)](a, b, c, M=m, N=n, K=k, PREC=precision, **options)
        return relative(c, a.double() @ b.double()), tolerance

    return check


def _dot_of(dtype: torch.dtype, m: int, n: int, k: int, **options: int) -> Check:
    def check(arch: str) -> tuple[float, float]:
        return _dot(torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), 1e-6, **options)(arch)

    return check


def dot_tf32(arch: str) -> tuple[float, float]:
    return _dot(torch.randn(32, 64), torch.randn(64, 32), 2e-3, "tf32")(arch)


def dot_fp8(arch: str) -> tuple[float, float]:
    dtype = FP8[arch][0]
    return _dot(torch.randn(64, 128).to(dtype), torch.randn(128, 32).to(dtype), 1e-6)(arch)


def dot_int8(arch: str) -> tuple[float, float]:
    a, b = (torch.randint(-128, 128, size, dtype=torch.int8) for size in ((32, 64), (64, 32)))
    return _dot(a, b, 0.0, out=torch.int32)(arch)


def gemm(arch: str) -> tuple[float, float]:
    m, n, k = 100, 90, 150
    a, b, c = torch.randn(m, k).to(BF16), torch.randn(k, n).to(BF16), torch.full((m, n), NAN, dtype=BF16)
    kernels.gemm[(2, 2)](a, b, c, m, n, k, BM=64, BN=64, BK=32)
    return relative(c, a.double() @ b.double()), 3e-3


def gemm_pipelined(arch: str) -> tuple[float, float]:
    m, n, k = 128, 128, 256
    a, b, c = torch.randn(m, k).to(BF16), torch.randn(k, n).to(BF16), torch.full((m, n), NAN)
    kernels.gemm[(2, 2)](a, b, c, m, n, k, BM=64, BN=64, BK=64, num_stages=3)
    return relative(c, a.double() @ b.double()), 1e-6


def softmax(arch: str) -> tuple[float, float]:
    x, o = (torch.randn(4, 777) * 3).to(BF16), torch.full((4, 777), NAN)
    kernels.softmax[(4,)](x, o, 777, N=1024)
    return relative(o, x.double().softmax(1)), 1e-6


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = q.double(), k.double(), v.double()
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    allowed = torch.ones(scores.shape[-2:]).tril().bool()
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v


def flash(arch: str) -> tuple[float, float]:
    h, t, d = 2, 100, 64
    q, k, v = (torch.randn(h, t, d).to(BF16) for _ in range(3))
    o = torch.full((h, t, d), NAN)
    kernels.flash[(2, h)](q, k, v, o, t, 1 / math.sqrt(d), BM=64, BN=32, D=d)
    return relative(o, causal_attention(q, k, v)), 4e-3


def delta(arch: str) -> tuple[float, float]:
    h, t, dk, dv = 2, 5, 128, 64
    q, k, v = torch.randn(h, t, dk).to(BF16), torch.randn(h, t, dk).to(BF16), torch.randn(h, t, dv).to(BF16)
    beta, g, start = torch.rand(h, t), -torch.rand(h, t), torch.randn(h, dk, dv)
    o, end = torch.full((h, t, dv), NAN), torch.full((h, dk, dv), NAN)
    kernels.delta[(dv // 32, h)](q, k, v, beta, g, o, start, end, t, K=dk, V=dv, BV=32)
    state, expected = start.double(), torch.empty(h, t, dv, dtype=F64)
    for i in range(t):
        kt, qt = (x[:, i].double() / (x[:, i].double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (k, q))
        state = state * g[:, i].double().exp()[:, None, None]
        change = (v[:, i].double() - torch.einsum("hkv,hk->hv", state, kt)) * beta[:, i].double()[:, None]
        state = state + kt[:, :, None] * change[:, None, :]
        expected[:, i] = torch.einsum("hkv,hk->hv", state, qt)
    return worst(relative(o, expected), relative(end, state)), 2e-6


def atomics(arch: str) -> tuple[float, float]:
    n = 700
    x, index = torch.randn(n), torch.randint(0, 50, (n,), dtype=torch.int32)
    o, last = torch.zeros(50), torch.zeros(50, dtype=torch.int32)
    kernels.atomics[(3,)](x, index, o, last, n, B=256)
    total = torch.zeros(50, dtype=F64).index_add_(0, index.long(), x.double())
    highest = torch.zeros(50, dtype=torch.int32)
    highest.scatter_reduce_(0, index.long(), torch.arange(n, dtype=torch.int32), "amax")
    return worst(relative(o, total), float((last != highest).sum())), 1e-6


def _random_mini(fmt: str, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random operand of an OCP format: (stored bytes, values)."""
    if fmt == "e2m1":
        codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8)
        return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous(), torch.from_numpy(FP4.dec(codes.numpy()))
    x = torch.randn(rows, k).to({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt])
    return x.view(torch.uint8).contiguous(), x.double()


def _scaled(fa: str, fb: str, m: int = 32, n: int = 32, k: int = 256, exact: bool = True, **options: int) -> Check:
    def scales(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        e = torch.randint(120, 134, (rows, k // 32), dtype=torch.uint8)
        return e, torch.exp2(e.double() - 127).repeat_interleave(32, 1)

    def check(arch: str) -> tuple[float, float]:
        b, vb = _random_mini(fb, n, k)
        sb, fac_b = scales(n)
        if fa == "bf16":
            a = torch.randn(m, k).to(BF16)
            va, sa, fac_a = a.double(), torch.zeros(1, dtype=torch.uint8), torch.ones(1, 1, dtype=F64)
        else:
            a, va = _random_mini(fa, m, k)
            sa, fac_a = scales(m)
        c = torch.full((m, n), NAN)
        packing = {"PA": k // a.shape[1], "PB": k // b.shape[1]}
        kernels.dot_scaled[(1,)](
            a, sa, b, sb, c, M=m, N=n, K=k, FA=fa, FB=fb, HAS_SA=fa != "bf16", **packing, **options
        )
        # gfx942 has no such instruction: Triton goes through bf16 there
        return relative(c, (va * fac_a) @ (vb * fac_b).T), 1e-6 if arch == "gfx950" and exact else 1e-2

    return check


def ops_int(arch: str) -> tuple[float, float]:
    n, m32 = 600, 0xFFFFFFFF
    a, b = (torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64) for _ in range(2))
    a[:200], b[:300] = torch.randint(-100, 100, (200,)), torch.randint(1, 50, (300,))
    b[b == 0] = 3
    a32, b32, o = a.to(torch.int32), b.to(torch.int32), torch.zeros(16, n, dtype=torch.int64)
    kernels.ops_int[(3,)](a32, b32, o, n, B=256)
    pairs = [(int(p), int(q)) for p, q in zip(a, b, strict=True)]
    s, x8, y16 = b & 31, a.to(torch.int8).long(), b.to(torch.int16).long()

    def low(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int32).long()

    def quotient(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return torch.div(p, q, rounding_mode="trunc")

    expected = [
        low(quotient(a, b)), a - quotient(a, b) * b, a * b + a, low(a << s), a >> s, (a & m32) >> s,
        ((x8 * 3).to(torch.int8).long() + y16).to(torch.int16).long(),  # int8 * 3 stays int8, then meets int16
        low(torch.tensor([((p & m32) * (q & m32)) >> 32 for p, q in pairs])),
        torch.minimum(a, b) - torch.maximum(a, b), (a ^ b) | (a & ~b), quotient(a, b * 3),
        torch.tensor([((((p << (q & 63)) + 2**63) % 2**64) - 2**63) >> 5 for p, q in pairs]),
        torch.where(a > b, x8, y16), a32.float().long(), (a & m32) % 7, low(a.abs()),
    ]  # fmt: skip
    return float((o != torch.stack(expected)).sum()), 0.0


def ops_float(arch: str) -> tuple[float, float]:
    n = 700
    a, b, o = torch.randn(n) * 2, torch.randn(n), torch.full((16, n), NAN)
    kernels.ops_float[(3,)](a, b, o, n, B=256)
    x, y = a.double(), b.double()
    expected = [
        x.exp(), y.abs().log(), x.sin(), (a * 10.0).double().cos(), x.erf(), x.abs().rsqrt(),
        (a * 3).floor().double() + (b * 3).ceil(), x * y + x, x.abs().sqrt(), x / y, x.clamp(-0.5, 0.5),
        (a.maximum(b) - a.minimum(b)).double(), x.tanh(), x.exp2() + y.abs().log2(), x * y + 1, x / y.abs() * 1e-10,
    ]  # fmt: skip
    return worst(*(relative(o[k], expected[k]) for k in range(16))), 1e-6


def casts(arch: str) -> tuple[float, float]:
    n, (e4, e5), (t4, t5) = 500, FP8[arch], FP8_TYPES[arch]
    x = torch.randn(n) * 2
    half, bf, small4, small5, i8, u32 = (
        torch.zeros(n, dtype=t) for t in (torch.float16, BF16, e4, e5, torch.int8, torch.uint32)
    )
    kernels.casts[(2,)](x, half, bf, small4, small5, i8, u32, n, B=256, FA=t4, FB=t5)
    h = x.half().double()
    # FP fusion may or may not round the product of h * h + h first
    wrong = int(((half.double() - (h * h + h)).abs() > 2e-3 * (h * h + h).abs().clamp_min(1e-3)).sum())
    expected = (x.to(BF16), x.to(e4), x.to(e5), (x * 20).to(torch.int8), (x.abs() * 1000).to(torch.int32))
    for got, want in zip((bf, small4, small5, i8, u32), expected, strict=True):
        wrong += int((got.double() != want.double()).sum())
    a, b, z = torch.randn(n).to(e4), torch.randn(n).to(e5), torch.full((n,), NAN)
    kernels.fp8_in[(2,)](a, b, z, n, B=256)
    return wrong + relative(z, a.float() + b.float()), 0.0


def selections(arch: str) -> tuple[float, float]:
    n = 128
    x = torch.randn(3, n)
    ordered, gathered = torch.full((3, n), NAN), torch.full((3, n), NAN)
    high, low = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    kernels.selections[(3,)](x, ordered, high, low, gathered, N=n)
    wrong = int((high != x.argmax(1)).sum() + (low != x.argmin(1)).sum())
    return wrong + relative(ordered, x.sort(1).values) + relative(gathered, 2 * x.flip(1)), 0.0


def reshape(arch: str) -> tuple[float, float]:
    x, o = torch.randn(32, 64), torch.full((64, 32), NAN)
    kernels.reshape[(1,)](x, o, M=32, N=64)
    return relative(o, x.view(32, 32, 2).flip(2).reshape(32, 64).T), 0.0


def collatz(arch: str) -> tuple[float, float]:
    x, o = torch.arange(2, 22, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
    kernels.collatz[(20,)](x, o)
    expected = []
    for v in x.tolist():
        steps = 0
        while v > 1:
            v, steps = (v // 2 if v % 2 == 0 else 3 * v + 1), steps + 1
        expected.append(-steps if steps % 2 == 0 else steps)
    return float((o != torch.tensor(expected)).sum()), 0.0


CHECKS: dict[str, Check] = {
    "elementwise": elementwise,
    "rowsum": rowsum,
    "colscan": colscan,
    "dot_bf16_32": _dot_of(BF16, 32, 32, 32),
    "dot_bf16_16": _dot_of(BF16, 16, 64, 128, num_warps=2),
    "dot_bf16_nk16": _dot_of(BF16, 64, 64, 64, matrix_instr_nonkdim=16),
    "dot_bf16_128": _dot_of(BF16, 128, 64, 64),
    "dot_fp16": _dot_of(torch.float16, 64, 64, 64),
    "dot_fp32": _dot_of(F32, 32, 32, 64),
    "dot_tf32": dot_tf32,
    "dot_fp8": dot_fp8,
    "dot_int8": dot_int8,
    "gemm": gemm,
    "gemm_pipelined": gemm_pipelined,
    "softmax": softmax,
    "flash": flash,
    "delta": delta,
    "atomics": atomics,
    "scaled_fp4": _scaled("e2m1", "e2m1"),
    "scaled_fp4_16": _scaled("e2m1", "e2m1", 16, 64, matrix_instr_nonkdim=16),
    "scaled_fp8": _scaled("e4m3", "e4m3"),
    "scaled_fp8_fp4": _scaled("e4m3", "e2m1"),
    "scaled_bf8_16": _scaled("e5m2", "e4m3", matrix_instr_nonkdim=16),
    "scaled_bf16_fp4": _scaled("bf16", "e2m1", 32, 64, 128, exact=False),
    "ops_int": ops_int,
    "ops_float": ops_float,
    "casts": casts,
    "selections": selections,
    "reshape": reshape,
    "collatz": collatz,
}
