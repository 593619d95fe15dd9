"""Canaries and poison: every write beside a tensor shows, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from k3port.testing.contract.memory import (
    ALIGNMENT_BYTES,
    MAX_BORDER_BYTES,
    MIN_BORDER_BYTES,
    Guards,
    count_unwritten,
    dense_strides,
    poison,
    poisoned_memory,
    usable_strides,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn]


def at(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The element ``offset`` places from the first one, wherever that is."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_placed_tensor_has_the_same_numbers_and_no_fault(dtype: torch.dtype) -> None:
    guards = Guards()
    x = torch.arange(12).reshape(3, 4).to(dtype)
    placed = guards.place(x, "x")
    assert placed.dtype == dtype
    assert torch.equal(placed.view(torch.uint8), x.view(torch.uint8))
    assert placed.stride() == x.stride()
    assert placed.data_ptr() % 64 == 0
    assert placed.data_ptr() != x.data_ptr()
    placed.zero_()
    assert guards.faults() == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("offset", "where"),
    [(-1, "1 before its first element"), (12, "1 after its last element"), (40, "29 after its last element")],
)
def test_a_write_beside_it_is_seen(dtype: torch.dtype, offset: int, where: str) -> None:
    guards = Guards()
    placed = guards.place(torch.zeros(3, 4).to(dtype), "x")
    at(placed, offset).copy_(torch.ones(1))
    assert guards.faults() == [f"x: 1 elements outside it were overwritten, the first one {where}"]


def test_a_write_far_beside_a_small_tensor_is_seen() -> None:
    guards = Guards()
    at(guards.place(torch.zeros(4), "x"), 1000).fill_(1)
    assert guards.faults() == ["x: 1 elements outside it were overwritten, the first one 997 after its last element"]


def test_even_nan_is_seen() -> None:
    """The canary is a NaN too, but not the one that arithmetic makes."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        guards = Guards()
        at(guards.place(torch.zeros(4, dtype=dtype), "x"), 4).fill_(torch.nan)
        assert len(guards.faults()) == 1, dtype


def test_the_borders_are_as_wide_as_the_tensor() -> None:
    for elements, border in ((16, MIN_BORDER_BYTES), (5000, 20480), (1 << 20, MAX_BORDER_BYTES)):
        guards = Guards()
        placed = guards.place(torch.zeros(elements), "x")
        assert placed.storage_offset() * 4 == border
        assert border % ALIGNMENT_BYTES == 0
        at(placed, elements + border // 4 - 1).fill_(1)
        at(placed, -border // 4).fill_(1)
        assert "2 elements outside" in guards.faults()[0]


def test_gaps_between_rows_hold_canaries_too() -> None:
    guards = Guards()
    placed = guards.place(torch.ones(3, 4), "x", strides=(7, 1), shift=2)
    assert placed.stride() == (7, 1)
    assert placed.storage_offset() % 8 == 2
    placed.fill_(2)
    assert guards.faults() == []
    assert at(placed, 5).isnan().all()
    at(placed, 5).fill_(1)
    assert guards.faults() == [
        "x: 1 elements outside it were overwritten, the first one in a gap between its rows, at 5"
    ]


def test_empty_tensors_are_guarded() -> None:
    guards = Guards()
    placed = guards.place(torch.zeros(0, 8), "x")
    assert placed.shape == (0, 8)
    at(placed, 0).fill_(1)
    assert guards.faults() == ["x: 1 elements outside it were overwritten, the first one 1 after its last element"]


def test_strides_that_share_memory_become_dense() -> None:
    assert usable_strides(torch.zeros(1, 4).expand(3, 4)) == (4, 1)
    assert usable_strides(torch.zeros(6).as_strided((3, 3), (1, 1))) == (3, 1)
    assert usable_strides(torch.zeros(3, 8)[:, 2:5]) == (8, 1)
    assert usable_strides(torch.zeros(3, 8).T) == (1, 8)
    assert dense_strides((2, 3, 4), [1, 0, 2]) == (4, 8, 1)


ALLOCATIONS: list[tuple[str, Callable[[], torch.Tensor], bool]] = [
    ("empty", lambda: torch.empty(3, 5), True),
    ("empty_like", lambda: torch.empty_like(torch.ones(3, 5).T), True),
    ("empty_strided", lambda: torch.empty_strided((3, 5), (1, 3)), True),
    ("new_empty", lambda: torch.ones(1).new_empty((3, 5)), True),
    ("new_empty_strided", lambda: torch.ones(1).new_empty_strided((3, 5), (5, 1)), True),
    ("zeros", lambda: torch.zeros(3, 5), False),
    ("zeros_like", lambda: torch.zeros_like(torch.ones(3, 5)), False),
    ("ones", lambda: torch.ones(3, 5), False),
    ("full", lambda: torch.full((3, 5), 2.0), False),
    ("new_zeros", lambda: torch.ones(1).new_zeros(3, 5), False),
    ("new_full", lambda: torch.ones(1).new_full((3, 5), 1.0), False),
]


@pytest.mark.parametrize(("name", "allocate", "unset"), ALLOCATIONS, ids=[a[0] for a in ALLOCATIONS])
def test_every_allocation_is_guarded(name: str, allocate: Callable[[], torch.Tensor], unset: bool) -> None:
    plain = allocate()
    with poisoned_memory() as guards:
        x = allocate()
    assert x.shape == plain.shape and x.stride() == plain.stride() and x.dtype == plain.dtype
    assert bool(x.isnan().all()) == unset
    assert count_unwritten(x) == (15 if unset else 0)
    if not unset:
        assert torch.equal(x, plain)
    assert guards.faults() == []
    at(x, 15).fill_(1)
    guards.rename(x, name)
    assert guards.faults() == [
        f"{name}: 1 elements outside it were overwritten, the first one 1 after its last element"
    ]


def test_an_output_argument_stays_where_it_is() -> None:
    out = torch.ones(4)
    with poisoned_memory() as guards:
        assert torch.zeros(4, out=out) is out
    assert not out.any() and guards.faults() == []


def test_memory_on_no_device_is_left_alone() -> None:
    with poisoned_memory():
        assert torch.empty(3, device="meta").is_meta


def test_what_was_never_written_is_counted() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = poison(torch.zeros(6, dtype=dtype))
        assert x.isnan().all()
        x[:2] = torch.nan
        assert count_unwritten(x) == 4
    assert (poison(torch.zeros(2, dtype=torch.int32)) == 2**31 - 1).all()
    assert count_unwritten(poison(torch.zeros(2, dtype=torch.int32))) == 0
    assert count_unwritten(torch.empty(0)) == 0
    assert poison(torch.zeros(2).to(torch.float8_e4m3fn)).isnan().all()
