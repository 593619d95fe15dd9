"""Fused multiply-add of f64: one rounding, also where a wider format would round twice."""

from __future__ import annotations

from fractions import Fraction

import amd_needs  # noqa: F401
import numpy as np
import pytest
from amd_asm import run_asm

from k3port.testing.amd_isa.fused64 import fma64

E = 2.0**-52


@pytest.mark.parametrize(
    ("a", "b", "c", "want"),
    [
        (1 + E, 1 - E, -1.0, -(2.0**-104)),  # the product alone rounds to 1
        (2.0**-53 * (1 + E), 1.0, 1.0, 1 + E),  # just above the middle: 64 bits of fraction see a tie
        (2.0**-53 * (1 - E), 1.0, 1.0, 1.0),
        (2.0**-53, 1.0, 1.0, 1.0),
        (1e200, 1e200, -np.inf, -np.inf),
        (1e308, 10.0, -1e308, np.inf),
        (1e308, 2.0, -1.7e308, float(2 * Fraction(1e308) - Fraction(1.7e308))),
        (2.0**-600, 2.0**-474, 0.0, 2.0**-1074),
        (2.0**-600, -(2.0**-500), 0.0, -0.0),
        (1e308, -0.0, 0.0, 0.0),
        (-0.0, 1.0, -0.0, -0.0),
        (np.inf, 0.0, 1.0, np.nan),
    ],
)
def test_known_answers(a: float, b: float, c: float, want: float) -> None:
    got = fma64(np.float64(a), np.float64(b), np.float64(c))
    np.testing.assert_array_equal(got, want)
    assert np.isnan(want) or np.signbit(got) == np.signbit(want)


@pytest.mark.parametrize("cancels", [False, True])
def test_against_fractions(cancels: bool) -> None:
    rng = np.random.default_rng(3)
    a, b, c = (rng.standard_normal(400) * 2.0 ** rng.integers(-30, 30, 400) for _ in range(3))
    if cancels:
        c = -a * b * (1 + 2.0 ** -rng.integers(40, 60, 400))
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(fma64(a, b, c), [float(x) for x in exact])


def test_the_instruction_uses_it() -> None:
    v = {}
    for i, x in ((2, 1 + E), (4, 1 - E), (6, -1.0)):
        bits = int(np.float64(x).view(np.uint64))
        v[i], v[i + 1] = bits & 0xFFFFFFFF, bits >> 32
    ran = run_asm("v_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]", v=v)
    assert (ran.v(0)[0], ran.v(1)[0]) == (0, (1023 - 104) << 20 | 1 << 31)
