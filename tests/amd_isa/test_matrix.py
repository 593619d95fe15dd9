"""Matrix instructions against matrices laid out here, element by element, from the tables of the ISA documents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from amd_asm import Ran, run_asm

from k3port.testing.amd_isa.formats import FP4
from k3port.testing.amd_isa.wave import Wave

rng = np.random.default_rng(11)


def operand(x: np.ndarray, kl: int) -> np.ndarray:
    """Rows x K as 64 lanes x kl elements: row l mod rows, kl consecutive elements of K per group of lanes."""
    rows = x.shape[0]
    out = np.zeros((64, kl), x.dtype)
    for lane in range(64):
        for e in range(kl):
            out[lane, e] = x[lane % rows, lane // rows * kl + e]
    return out


def registers(elements: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(elements).view(np.uint32).reshape(64, -1).T


def placed(**rows: np.ndarray) -> Callable[[Wave], None]:
    """``v8=array`` puts the registers from v8 on."""

    def setup(w: Wave) -> None:
        for name, bits in rows.items():
            start = int(name[1:])
            w.V[start : start + len(bits)] = bits

    return setup


def result(ran: Ran, first: int, m: int, n: int, t: type) -> np.ndarray:
    """The M x N result of a one-block shape, from its registers."""
    out = np.zeros((m, n), t)
    for lane in range(64):
        for r in range(m * n // 64):
            row = 4 * (lane // 16) + r if m == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            out[row, lane % n] = ran.v(first + r, t)[lane]
    return out


HALF = [
    ("v_mfma_f32_32x32x8_f16", "gfx942", 32, 8), ("v_mfma_f32_16x16x16_f16", "gfx942", 16, 16),
    ("v_mfma_f32_32x32x16_f16", "gfx950", 32, 16), ("v_mfma_f32_16x16x32_f16", "gfx950", 16, 32),
]  # fmt: skip


@pytest.mark.parametrize(("op", "arch", "m", "k"), HALF)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision(op: str, arch: str, m: int, k: int, dtype: str) -> None:
    tdtype = torch.float16 if dtype == "f16" else torch.bfloat16
    a, b = (torch.from_numpy(rng.standard_normal((m, k))).to(tdtype) for _ in range(2))  # b: columns x K
    bits_a, bits_b = (operand(x.view(torch.int16).numpy(), k * m // 64) for x in (a, b))
    n = m * m // 64
    c = rng.standard_normal((n, 64)).astype(np.float32)
    words = k * m // 128
    text = f"{op.replace('f16', dtype)} a[0:{n - 1}], v[8:{7 + words}], v[16:{15 + words}], v[32:{31 + n}]"
    ran = run_asm(text, arch, setup=placed(v8=registers(bits_a), v16=registers(bits_b), v32=c.view(np.uint32)))
    plain = run_asm(text.rsplit(",", 1)[0] + ", 0", arch, setup=placed(v8=registers(bits_a), v16=registers(bits_b)))
    want = (a.double() @ b.double().T).numpy()
    np.testing.assert_array_equal(result(plain, 256, m, m, np.float32), want.astype(np.float32))
    added = np.stack([ran.v(256 + r, np.float32) for r in range(n)])
    base = np.stack([plain.v(256 + r, np.float32) for r in range(n)])
    np.testing.assert_allclose(added, base + c, rtol=1e-5, atol=1e-5)


def test_integers() -> None:
    a, b = (rng.integers(-128, 128, (16, 32)).astype(np.int8) for _ in range(2))
    ran = run_asm("v_mfma_i32_16x16x32_i8 v[0:3], v[8:9], v[16:17], 5",
                  setup=placed(v8=registers(operand(a, 8)), v16=registers(operand(b, 8))))  # fmt: skip
    np.testing.assert_array_equal(result(ran, 0, 16, 16, np.int32), a.astype(int) @ b.T.astype(int) + 5)


@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)])
def test_fp8(arch: str, dtype: torch.dtype) -> None:
    a, b = (torch.from_numpy(rng.standard_normal((32, 16))).to(dtype) for _ in range(2))
    bits_a, bits_b = (registers(operand(x.view(torch.uint8).numpy(), 8)) for x in (a, b))
    ran = run_asm(
        "v_mfma_f32_32x32x16_fp8_fp8 v[64:79], v[8:9], v[16:17], 0", arch, setup=placed(v8=bits_a, v16=bits_b)
    )
    want = (a.double() @ b.double().T).numpy().astype(np.float32)
    np.testing.assert_array_equal(result(ran, 64, 32, 32, np.float32), want)


def test_f32_and_xf32() -> None:
    a, b = (rng.standard_normal((16, 8)).astype(np.float32) for _ in range(2))
    setup = placed(v8=registers(operand(a[:, :4], 1)), v16=registers(operand(b[:, :4], 1)))
    got = result(run_asm("v_mfma_f32_16x16x4_f32 v[0:3], v8, v16, 0", setup=setup), 0, 16, 16, np.float32)
    np.testing.assert_array_equal(got, (a[:, :4].astype(float) @ b[:, :4].T.astype(float)).astype(np.float32))
    setup = placed(v8=registers(operand(a, 2)), v16=registers(operand(b, 2)))
    got = result(run_asm("v_mfma_f32_16x16x8_xf32 v[0:3], v[8:9], v[16:17], 0", setup=setup), 0, 16, 16, np.float32)
    exact = a.astype(float) @ b.T.astype(float)
    assert 0 < np.abs(got - exact).max() < 8 * 4 * 2**-10


def test_f64() -> None:
    a, b = (rng.standard_normal((16, 4)) for _ in range(2))
    ran = run_asm("v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[16:17], 0",
                  setup=placed(v8=registers(operand(a, 1)), v16=registers(operand(b, 1))))  # fmt: skip
    got = np.zeros((16, 16))
    for lane in range(64):
        for r in range(4):
            bits = int(ran.v(2 * r)[lane]) | int(ran.v(2 * r + 1)[lane]) << 32
            got[4 * r + lane // 16, lane % 16] = np.uint64(bits).view(np.float64)
    np.testing.assert_allclose(got, a @ b.T, rtol=1e-14)


def test_sixteen_small_blocks() -> None:
    a, b = (rng.standard_normal((16, 4, 4)).astype(np.float16) for _ in range(2))  # block, row, k
    ran = run_asm("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[8:9], v[16:17], 0",
                  setup=placed(v8=registers(a.reshape(64, 4)), v16=registers(b.reshape(64, 4))))  # fmt: skip
    want = a.astype(float) @ b.transpose(0, 2, 1).astype(float)
    for lane in range(64):
        for r in range(4):
            assert ran.v(r, np.float32)[lane] == np.float32(want[lane // 4, r, lane % 4])


def test_fp4_with_scales() -> None:
    """gfx950: lane l has row l mod 16 and 32 consecutive elements of K, one scale byte for them."""
    codes = [rng.integers(0, 16, (16, 128)).astype(np.uint8) for _ in range(2)]
    exponents = [rng.integers(120, 134, (16, 4)) for _ in range(2)]

    def lanes(c: np.ndarray) -> np.ndarray:
        pairs = operand(c, 32)
        return registers(pairs[:, 0::2] | pairs[:, 1::2] << 4)

    def scale(e: np.ndarray, byte: int) -> np.ndarray:
        return np.array([[int(e[lane % 16, lane // 16]) << 8 * byte for lane in range(64)]], np.uint32)

    setup = placed(v8=lanes(codes[0]), v16=lanes(codes[1]), v24=scale(exponents[0], 0), v25=scale(exponents[1], 2))
    text = (
        "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[8:11], v[16:19], 0, v24, v25 "
        "op_sel:[0,0,0] op_sel_hi:[0,1,0] cbsz:4 blgp:4"
    )
    got = result(run_asm(text, "gfx950", setup=setup), 0, 16, 16, np.float32)
    x, y = (FP4.dec(c) * np.repeat(2.0 ** (e - 127.0), 32, axis=1) for c, e in zip(codes, exponents, strict=True))
    np.testing.assert_array_equal(got, (x @ y.T).astype(np.float32))
