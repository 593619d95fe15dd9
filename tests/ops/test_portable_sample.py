"""What portable sampling launches and allocates; its numbers are in the contract and in tests/interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the kernel's module needs Triton")

from k3port.backends.portable import sample_scratch
from k3port.backends.portable.kernels import sample as portable
from k3port.backends.portable.sample_scratch import rows_at_once, sample_workspace
from k3port.ops.sample import SamplingTensors
from k3port.oracle.spec import OpQuery
from k3port.testing.launches import Recording, record

V = 163840


class Allocated(TorchDispatchMode):
    """Bytes of all new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like):
            self.bytes += made.nbytes
        return made


def workspace(rows: int, vocab: int) -> int:
    return sample_workspace(OpQuery("sample", None, {"B": rows, "V": vocab}, "float32"))


def launched(rows: int, vocab: int, **flags: bool) -> Recording:
    ones = torch.ones(rows, dtype=torch.float64)
    params = SamplingTensors(ones, torch.ones(rows, dtype=torch.int64), ones, ones * 0, **flags)
    with record("sm_90") as recording:
        portable.sample(torch.zeros(rows, vocab), params, ones * 0)
    return recording


@pytest.mark.parametrize(
    ("flags", "count"),
    [({"all_greedy": True, "any_filter": False}, 2), ({"all_greedy": True}, 2), ({"any_filter": False}, 3), ({}, 9)],
)
def test_number_of_launches(flags: dict[str, bool], count: int) -> None:
    assert len(launched(3, V, **flags).launches) == count


@pytest.mark.parametrize("flags", [{}, {"any_filter": False}])
def test_nothing_that_fixes_the_order_of_sums_depends_on_the_batch(flags: dict[str, bool]) -> None:
    """Constants and warps are those of a row alone, so a row gives the same bits in every batch."""
    one, many = (launched(rows, 3000, **flags) for rows in (1, 33))
    assert one.tuned == many.tuned and [dict(lookup.axes) for lookup in one.tuned] == [{"V": 3000}]
    for a, b in zip(one.launches, many.launches, strict=True):
        names = [param.name for param in a.function.params if param.is_constexpr]
        assert names and {n: a.constant(n) for n in names} == {n: b.constant(n) for n in names}
        assert (a.name, a.options["num_warps"]) == (b.name, b.options["num_warps"])


@pytest.mark.parametrize(("rows", "vocab"), [(3, 300), (2, V)])
def test_the_scratch_memory_that_the_record_names_is_what_a_call_allocates(rows: int, vocab: int) -> None:
    ones = torch.ones(rows, dtype=torch.float64)
    params = SamplingTensors(ones, torch.ones(rows, dtype=torch.int64), ones, ones * 0)
    with record("sm_90"), Allocated() as allocated:
        portable.sample(torch.zeros(rows, vocab), params, ones * 0)
    # Without the ids, which are the result; the record takes the configuration that needs most.
    assert allocated.bytes - 8 * rows <= workspace(rows, vocab) < 1.3 * allocated.bytes + 4096 * rows


def test_many_rows_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 256 << 20 < workspace(10**6, V) < 300 << 20
    assert rows_at_once(V) == 409 and rows_at_once(1 << 40) == 1
    monkeypatch.setattr(sample_scratch, "CANDIDATE_BYTES", 4 * 300 * 4)
    assert [launch.grid[0] for launch in launched(10, 300).launches if launch.name.endswith("cut_kernel")] == [4, 4, 2]
    # Without a filter there are no candidates.
    assert len(launched(10, 300, any_filter=False).launches) == 3


def test_no_rows() -> None:
    none = torch.empty(0, dtype=torch.float64)
    params = SamplingTensors(none, none.long(), none, none)
    assert portable.sample(torch.empty(0, 10), params, none).tolist() == []
