"""Vector float instructions, conversions, division: against float64, with the corner cases of the ISA document."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from amd_asm import run_asm

rng = np.random.default_rng(5)
X, Y, Z = (rng.standard_normal(64).astype(np.float32) for _ in range(3))
F = np.float32


def test_arithmetic() -> None:
    for text, want in {
        "v_add_f32 v0, v1, v2": X + Y,
        "v_subrev_f32 v0, v1, v2": Y - X,
        "v_mul_f32 v0, -v1, |v2|": -X * np.abs(Y),
        "v_fma_f32 v0, v1, v2, v3": (X.astype(float) * Y + Z).astype(F),
        "v_fmac_f32 v3, v1, v2": (X.astype(float) * Y + Z).astype(F),
        "v_fmamk_f32 v0, v1, 0x40000000, v2": (X.astype(float) * 2 + Y).astype(F),
        "v_fmaak_f32 v0, v1, v2, 0x40000000": (X.astype(float) * Y + 2).astype(F),
        "v_add_f32_e64 v0, v1, v2 mul:2": (X + Y) * 2,
        "v_add_f32_e64 v0, v1, v2 clamp": np.clip(X + Y, 0, 1),
        "v_med3_f32 v0, v1, v2, v3": np.median([X, Y, Z], axis=0).astype(F),
        "v_max3_f32 v0, v1, v2, v3": np.max([X, Y, Z], axis=0),
        "v_rndne_f32 v0, v1": np.rint(X),
        "v_fract_f32 v0, v1": X - np.floor(X),
        "v_ldexp_f32 v0, v1, 3": X * 8,
        "v_frexp_mant_f32 v0, v1": np.frexp(X)[0],
    }.items():
        dst = 3 if "v_fmac" in text else 0
        np.testing.assert_array_equal(run_asm(text, v={1: X, 2: Y, 3: Z}).v(dst, F), want, text)


def test_nan_loses_against_a_number_in_min_and_max() -> None:
    assert run_asm("v_max_f32 v0, v1, v2", v={1: F(np.nan), 2: F(2)}).v(0, F)[0] == 2
    assert np.isnan(run_asm("v_maximum3_f32 v0, v1, v2, v2", "gfx950", v={1: F(np.nan), 2: F(2)}).v(0, F)[0])


@pytest.mark.parametrize("k", range(3))
def test_median_with_nan_is_the_minimum(k: int) -> None:
    v = {1: F(5), 2: F(2), 3: F(9)}
    assert run_asm("v_med3_f32 v0, v1, v2, v3", v=v).v(0, F)[0] == 5
    low = min(x for i, x in v.items() if i != k + 1)
    assert run_asm("v_med3_f32 v0, v1, v2, v3", v={**v, k + 1: F(np.nan)}).v(0, F)[0] == low
    half = {i: int(np.float16(x).view(np.uint16)) for i, x in v.items()} | {k + 1: 0x7E00}
    assert run_asm("v_med3_f16 v0, v1, v2, v3", v=half).v(0)[0] == np.float16(low).view(np.uint16)


@pytest.mark.parametrize(("a", "b"), [(-0.0, 0.0), (0.0, -0.0), (-0.0, -0.0), (0.0, 0.0)])
def test_minus_zero_is_less_than_zero(a: float, b: float) -> None:
    v = {1: F(a), 2: F(b)}
    any_, all_ = np.signbit(a) or np.signbit(b), np.signbit(a) and np.signbit(b)
    for text, negative in {
        "v_max_f32 v0, v1, v2": all_,
        "v_min_f32 v0, v1, v2": any_,
        "v_max3_f32 v0, v1, v2, v1": all_,
        "v_maximum3_f32 v0, v1, v2, v1": all_,
        "v_minimum3_f32 v0, v2, v1, v1": any_,
    }.items():
        assert run_asm(text, "gfx950", v=v).v(0)[0] == (0x80000000 if negative else 0), text


def test_tiny_negative_fraction_stays_below_one() -> None:
    assert run_asm("v_fract_f32 v0, v1", v={1: F(-1e-20)}).v(0, F)[0] == F(1 - 2**-24)


APPROXIMATE: dict[str, Any] = {
    "v_rcp_f32": lambda x: 1 / x,
    "v_rsq_f32": lambda x: 1 / math.sqrt(x),
    "v_sqrt_f32": math.sqrt,
    "v_exp_f32": lambda x: 2**x,
    "v_log_f32": math.log2,
    "v_sin_f32": lambda x: math.sin(2 * math.pi * x),
    "v_cos_f32": lambda x: math.cos(2 * math.pi * x),
}


@pytest.mark.parametrize("op", APPROXIMATE)
def test_approximations(op: str) -> None:
    """Correctly rounded; with noise never further than one ulp, and off in a good part of the lanes."""
    x = (np.abs(X) + F(0.1)).astype(F)
    exact = np.array([APPROXIMATE[op](float(v)) for v in x])
    got = run_asm(f"{op} v0, v1", v={1: x}).v(0, F)
    np.testing.assert_array_equal(got, exact.astype(F))
    noisy = run_asm(f"{op} v0, v1", v={1: x}, ulp_noise=True).v(0, F)
    assert (np.abs(noisy - exact) <= np.spacing(np.abs(exact).astype(F))).all()
    assert 10 < (noisy != got).sum() < 54
    np.testing.assert_array_equal(run_asm(f"{op} v0, v1", v={1: x}).v(0, F), got)  # the noise does not stay


def test_denormals_of_exp_and_log() -> None:
    assert run_asm("v_exp_f32 v0, v1", v={1: F(-140)}).v(0, F)[0] == 0
    assert run_asm("v_log_f32 v0, v1", v={1: F(1e-40)}).v(0, F)[0] == -np.inf
    assert run_asm("v_mul_f32 v0, v1, 0.5", v={1: F(1e-40)}).v(0, F)[0] == F(1e-40) * F(0.5)


def test_reciprocal_and_roots_flush_denormals() -> None:
    for text, x, want in (
        ("v_rcp_f32 v0, v1", 1e-40, np.inf),
        ("v_rcp_f32 v0, v1", -1e-40, -np.inf),
        ("v_rcp_f32 v0, v1", 3e38, 0.0),
        ("v_rsq_f32 v0, v1", 1e-40, np.inf),
        ("v_sqrt_f32 v0, v1", 1e-40, 0.0),
    ):
        assert run_asm(text, v={1: F(x)}).v(0, F)[0] == F(want), text


def test_parts_of_f64() -> None:
    bits = int(np.float64(-10.25).view(np.uint64))
    v = {2: bits & 0xFFFFFFFF, 3: bits >> 32}

    def result(text: str) -> float:
        ran = run_asm(text, v=v)
        return float((ran.v(0).astype(np.uint64) | ran.v(1).astype(np.uint64) << np.uint64(32)).view(np.float64)[0])

    assert result("v_frexp_mant_f64 v[0:1], v[2:3]") == -0.640625
    assert result("v_fract_f64 v[0:1], v[2:3]") == 0.75
    assert result("v_fract_f64 v[0:1], |v[2:3]|") == 0.25
    assert result("v_add_f64 v[0:1], -|v[2:3]|, 1.0") == -9.25
    assert run_asm("v_frexp_exp_i32_f64 v0, v[2:3]", v=v).v(0, np.int32)[0] == 4
    v = {2: 0, 3: 0x7FF00000}
    assert run_asm("v_frexp_exp_i32_f64 v0, v[2:3]", v=v).v(0, np.int32)[0] == 0
    assert result("v_frexp_mant_f64 v[0:1], v[2:3]") == np.inf


def test_division_sequence() -> None:
    """As the compiler writes it, for ordinary, huge, tiny and special numbers."""
    a = np.concatenate([X[:50], [1e38, 1e-38, 3, 1, 0, -1, 1e-40, np.inf, 7, 1, 5, 2, 1e30, 1]]).astype(F)
    b = np.concatenate([Y[:50], [1e-3, 1e30, 1e-40, 3e38, 5, 0, 3, 2, np.inf, np.nan, 3, 3, 1e-5, 3]]).astype(F)
    text = """v_div_scale_f32 v3, s[2:3], v2, v2, v1
v_div_scale_f32 v4, vcc, v1, v2, v1
v_rcp_f32 v5, v3
v_fma_f32 v6, -v3, v5, 1.0
v_fmac_f32 v5, v6, v5
v_mul_f32 v6, v4, v5
v_fma_f32 v7, -v3, v6, v4
v_fmac_f32 v6, v7, v5
v_fma_f32 v3, -v3, v6, v4
v_div_fmas_f32 v3, v3, v5, v6
v_div_fixup_f32 v0, v3, v2, v1"""
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run_asm(text, v={1: a, 2: b}).v(0, F), a / b)


@pytest.mark.parametrize(
    ("special", "scaled", "flags"),
    [(1e-40, 1e-40 * 2.0**64, 1 << 7), (3e38, 3e38 * 2.0**-64, 0), (0.0, np.nan, 0)],
)
def test_only_active_lanes_decide_how_a_division_is_scaled(special: float, scaled: float, flags: int) -> None:
    """Ordinary operands are left as they are; another one in an active lane is scaled, and leaves the rest alone."""
    den, num = np.full(64, 3, F), np.full(64, 5, F)
    den[7] = special
    text = "v_div_scale_f32 v3, s[2:3], v2, v2, v1"
    for exec_mask, wanted, flag in ((((1 << 64) - 1) & ~(1 << 7), 1, 0), ((1 << 64) - 1, scaled, flags)):
        ran = run_asm(text, v={1: num, 2: den, 3: np.ones(64, F)}, exec_mask=exec_mask)
        assert (np.delete(ran.v(3, F), 7) == 3).all()
        np.testing.assert_allclose(ran.v(3, F)[7], wanted, rtol=1e-4)
        assert (ran.s(2), ran.s(3)) == (flag, 0)


def test_f64() -> None:
    x = rng.standard_normal(64)
    bits = x.view(np.uint64)
    v = {2: (bits & 0xFFFFFFFF).tolist(), 3: (bits >> np.uint64(32)).tolist()}

    def result(text: str) -> np.ndarray:
        ran = run_asm(text, v=v)
        return (ran.v(0).astype(np.uint64) | ran.v(1).astype(np.uint64) << np.uint64(32)).view(np.float64)

    np.testing.assert_array_equal(result("v_add_f64 v[0:1], v[2:3], 1.0"), x + 1)
    np.testing.assert_array_equal(result("v_mul_f64 v[0:1], v[2:3], -v[2:3]"), -x * x)
    np.testing.assert_allclose(result("v_fma_f64 v[0:1], v[2:3], v[2:3], 0.5"), x * x + 0.5, rtol=1e-15)


def test_f16_and_op_sel() -> None:
    a, b = X.astype(np.float16), Y.astype(np.float16)
    packed = a.view(np.uint16).astype(int) | b.view(np.uint16).astype(int) << 16
    ran = run_asm("v_add_f16_e64 v0, v1, v1 op_sel:[0,1,1]", v={0: 0x1234, 1: packed})
    assert (ran.v(0) & 0xFFFF).tolist() == [0x1234] * 64
    np.testing.assert_array_equal((ran.v(0) >> 16).astype(np.uint16).view(np.float16), a + b)


def test_conversions() -> None:
    x = np.array([1.5, -2.7, 1e20, -1e20, np.nan, 0.5, 300.2, -0.4] * 8, F)
    assert run_asm("v_cvt_i32_f32 v0, v1", v={1: x}).v(0, np.int32)[:8].tolist() == [
        1,
        -2,
        2**31 - 1,
        -(2**31),
        0,
        0,
        300,
        0,
    ]
    assert run_asm("v_cvt_u32_f32 v0, v1", v={1: x}).v(0)[:8].tolist() == [1, 0, 2**32 - 1, 0, 0, 0, 300, 0]
    assert run_asm("v_cvt_flr_i32_f32 v0, v1", v={1: F(-2.2)}).v(0, np.int32)[0] == -3
    assert run_asm("v_cvt_f32_ubyte2 v0, v1", v={1: 0x00AB1234}).v(0, F)[0] == 0xAB
    assert run_asm("v_cvt_f32_i32 v0, v1", v={1: -7}).v(0, F)[0] == -7
    half = run_asm("v_cvt_f16_f32 v0, v1", v={1: X}).v(0).astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(half, X.astype(np.float16))
    assert run_asm("v_cvt_pk_i16_i32 v0, v1, v2", v={1: 70000, 2: -5}).v(0)[0] == 0xFFFB7FFF


@pytest.mark.parametrize(
    ("mask", "value"),
    [(0x3, np.nan), (0x4, -np.inf), (0x8, -1.0), (0x10, -1e-40), (0x20, -0.0), (0x40, 0.0), (0x80, 1e-40), (0x100, 2.0), (0x200, np.inf)],
)  # fmt: skip
def test_classes(mask: int, value: float) -> None:
    for m, inside in ((mask, True), (0x3FF & ~mask, False)):
        ran = run_asm("v_cmp_class_f32_e64 s[0:1], v1, v2", v={1: F(value), 2: m})
        assert (ran.s(0) & 1) == inside


@pytest.mark.parametrize(
    ("condition", "want"), [("lt", 0), ("nlt", 1), ("neq", 1), ("lg", 0), ("u", 1), ("o", 0), ("nge", 1)]
)
def test_comparisons_with_nan(condition: str, want: int) -> None:
    assert run_asm(f"v_cmp_{condition}_f32_e64 s[0:1], v1, 1.0", v={1: F(np.nan)}).s(0) & 1 == want
