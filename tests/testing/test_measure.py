"""When a difference is a fault: at the edge of a dtype's range, and beside what plain torch shows."""

from __future__ import annotations

import math

import pytest
import torch

from k3port.ops.contract import DEFAULT_TOLERANCE
from k3port.testing.contract.measure import compare, plain_error, same_bits

MAX = 65504.0


def faults(value: list[float], expected: list[float], dtype: torch.dtype = torch.float16) -> list[str]:
    found: list[str] = []
    compare("y", torch.tensor(value).to(dtype), torch.tensor(expected, dtype=torch.float64), 1e-3, found)
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, 1e8),
        (-math.inf, -1e8),
        (MAX, 65510.0),
        (math.inf, 65510.0),
        (math.inf, 65480.0),
        (math.inf, math.inf),
        (1.0, 1.0),
    ],
)
def test_beyond_the_range_infinity_is_right(value: float, expected: float) -> None:
    assert faults([value, 1.0], [expected, 1.0]) == []


@pytest.mark.parametrize(("value", "expected"), [(math.inf, 60000.0), (-math.inf, 1e8), (math.nan, 1e8), (1.0, 1e8)])
def test_infinity_elsewhere_is_wrong(value: float, expected: float) -> None:
    assert faults([value, 1.0], [expected, 1.0]) == [
        "y: 1 of 2 numbers are not finite, or finite where they must not be"
    ]


def test_the_error_of_plain_torch() -> None:
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert plain_error(torch.tensor([3.3, 4.4]), expected) == pytest.approx(0.1, rel=1e-6)
    # One wrong number: the peak counts a quarter, and here more than the RMS of many right ones.
    many = torch.full((10000,), 1.0, dtype=torch.float64)
    value = many.clone()
    value[7] = 1.2
    assert plain_error(value, many) == pytest.approx(0.05)
    assert plain_error(torch.tensor([math.inf, 4.0]), torch.tensor([1e9, 4.0]).double()) == 0
    assert plain_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == 0
    assert plain_error(torch.zeros(2), torch.zeros(2).double()) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_of_a_millionth_are_measured_too(dtype: torch.dtype) -> None:
    """What is allowed beside zero is far smaller."""
    right = torch.full((64,), 1e-6, dtype=torch.float64)
    for value, ok in ((right, True), (torch.zeros(64), False), (-right, False)):
        found: list[str] = []
        assert compare("y", value.to(dtype), right.to(dtype).double(), DEFAULT_TOLERANCE[dtype], found).ok == ok
        assert bool(found) != ok


def test_bits() -> None:
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.zeros(0), torch.zeros(0))
    # An axis of size 1 with an odd stride.
    assert same_bits(torch.zeros(5, 1).as_strided((5, 1), (1, 5)), torch.zeros(5, 1))
