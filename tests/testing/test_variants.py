"""Memory orders: the same numbers, where the variant says they lie."""

from __future__ import annotations

import pytest
import torch

from k3port.ops.segment import Segment, make_segment
from k3port.testing.contract.memory import Guards
from k3port.testing.contract.variants import VARIANTS, Variant, has_variant, moved, placed, tensors

INPUTS = {"q": "T H K", "x": "T D", "ids": "T", "weight": "D", "segment": "", "eps": ""}


def call() -> dict[str, object]:
    return {
        "q": torch.randn(5, 3, 8),
        "x": torch.randn(5, 16).bfloat16(),
        "ids": torch.arange(5),
        "weight": torch.randn(16),
        "segment": make_segment("prefill", [5], [1]),
        "eps": 1e-5,
    }


@pytest.mark.parametrize(
    ("variant", "q", "x", "shift"),
    [
        ("plain", (24, 8, 1), (16, 1), 0),
        ("strided", (48, 8, 1), (40, 1), 8),
        ("permuted", (8, 40, 1), (1, 5), 0),
        ("unaligned", (25, 8, 1), (17, 1), 1),
    ],
)
def test_rows_lie_where_the_variant_says(variant: Variant, q: tuple[int, ...], x: tuple[int, ...], shift: int) -> None:
    args, guards = call(), Guards()
    there = placed(args, INPUTS, variant, guards)
    assert there["q"].stride() == q
    assert there["x"].stride() == x
    assert there["x"].data_ptr() % 64 == 2 * shift
    for (path, old), (other, new) in zip(tensors(args), tensors(there), strict=True):
        assert path == other
        assert torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr() or not old.numel()
        if path not in ("q", "x"):
            assert new.stride() == old.stride()
    assert isinstance(there["segment"], Segment)
    assert there["segment"].lengths == (5,)
    assert there["eps"] == 1e-5
    assert guards.faults() == []


def test_odd_widths_get_odd_rows_as_well() -> None:
    there = placed({"x": torch.randn(4, 7)}, {"x": "T D"}, "unaligned", Guards())
    assert there["x"].stride() == (9, 1)


def test_calls_without_rows_have_only_one_variant() -> None:
    args = {"ids": torch.arange(5), "weight": torch.randn(16)}
    inputs = {"ids": "T", "weight": "D"}
    assert [v for v in VARIANTS if has_variant(args, inputs, v)] == ["plain"]
    assert all(has_variant(call(), INPUTS, v) for v in VARIANTS)


def test_paths_of_tensors() -> None:
    paths = [
        path for path, _ in tensors({"a": [torch.ones(1), {"b": torch.ones(1)}], "s": make_segment("decode", [1], [1])})
    ]
    assert paths[:2] == ["a.0", "a.1.b"]
    assert "s.cu_seqlens" in paths


def test_what_is_there_already_is_not_copied() -> None:
    args = call()
    assert moved(args, "cpu")["x"] is args["x"]


def test_what_is_elsewhere_gets_memory_of_its_own() -> None:
    """``cpu:0`` counts as another device."""
    args = call() | {"x": torch.randn(16, 5).T}
    there = moved(args, "cpu:0")
    for (path, old), (other, new) in zip(tensors(args), tensors(there), strict=True):
        assert path == other and torch.equal(old, new) and old.stride() == new.stride()
        assert old.data_ptr() != new.data_ptr() or not old.numel(), path
