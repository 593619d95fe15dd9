"""The shared device functions, interpreted, against torch: ``interpreted_lib`` runs them in a process of its own."""

from __future__ import annotations

import pytest
from interpreted import interpreted

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")


@pytest.fixture(scope="module")
def results() -> dict[str, float]:
    return interpreted("interpreted_lib")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cast_rounds_like_torch(results: dict[str, float], dtype: str) -> None:
    """Bit for bit: halfway cases, subnormal numbers, the largest numbers, infinities, NaN."""
    assert results[f"cast {dtype}: wrong bits"] == 0


def test_the_interpreters_own_conversion_is_still_wrong(results: dict[str, float]) -> None:
    """The day this fails, ``lib.cast`` is not needed any more."""
    assert results["plain bfloat16: wrong bits"] > 1000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products(results: dict[str, float], dtype: str) -> None:
    assert results[f"dot {dtype}: relative RMS"] < 2e-7


def test_the_interpreters_own_product_of_bfloat16_is_still_wrong(results: dict[str, float]) -> None:
    assert results["plain dot bfloat16: relative RMS"] > 1


FUNCTIONS = {"sigmoid": 6e-7, "silu": 6e-7, "softplus": 7e-7, "capped": 4e-7, "coarsely capped": 2.1e-5}


@pytest.mark.parametrize(("name", "bound"), FUNCTIONS.items(), ids=FUNCTIONS)
def test_functions_over_the_whole_range(results: dict[str, float], name: str, bound: float) -> None:
    assert results[f"{name}: largest relative error"] < bound
    assert results[f"{name}: ends"] == 0
