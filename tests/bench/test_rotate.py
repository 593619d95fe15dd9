"""How many copies of a call's buffers take turns."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from k3port.ops.kda import KdaState
from k3port.testing.bench.rotate import COLD_BYTES, MAX_COPIES, copies_needed, tensor_bytes


@given(st.integers(0, 4 * COLD_BYTES))
def test_the_others_fill_the_cold_size_before_a_copy_comes_again(working_set: int) -> None:
    copies = copies_needed(working_set)
    assert 1 <= copies <= MAX_COPIES
    if working_set < COLD_BYTES and copies < MAX_COPIES:
        assert (copies - 1) * working_set >= COLD_BYTES
    if working_set >= COLD_BYTES:
        assert copies == 1


def test_bytes_of_nested_arguments() -> None:
    state = KdaState(torch.zeros(2, 3, 4), torch.zeros(2, 5, dtype=torch.float64))
    assert tensor_bytes(state, {"x": torch.zeros(7, dtype=torch.bfloat16)}, 1.5, None) == 96 + 80 + 14


def test_views_of_one_buffer_count_once() -> None:
    wide = torch.zeros(4, 10)
    assert tensor_bytes(wide, wide[:, :5]) == 160
    assert tensor_bytes(wide[:, :5], wide[:, 5:]) == 160
    assert tensor_bytes(torch.zeros(1).expand(1000)) == 4
