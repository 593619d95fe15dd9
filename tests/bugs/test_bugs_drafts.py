"""Rows of the bug list about verified drafts and snapshots of KDA's state, on the kernels that run here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builtin_kernels import functions

from k3port.ops.contract import cloned, relative_rms
from k3port.ops.kda_samples import BLOCK_INPUTS, block_inputs
from k3port.ops.kda_state import KdaState, empty_drafts
from k3port.ops.segment import make_segment

Op = Callable[..., Any]
VERIFY: list[Op] = functions("kda", "decode")
PREFILL: list[Op] = functions("kda", "prefill")
COMMIT: list[Op] = functions("kda_commit")


def counts(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rows_of(args: dict[str, Any], rows: slice) -> dict[str, torch.Tensor]:
    return {name: args[name][rows].clone() for name in BLOCK_INPUTS}


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("commit", COMMIT)
def test_b74_a_cancelled_row_keeps_its_state_and_spares_its_neighbours(verify: Op, commit: Op) -> None:
    gen = torch.Generator().manual_seed(74)
    args = block_inputs(torch.float32, gen, [8, 8, 8], [2, 4, 3], phase="decode", draft=True)
    before = cloned(args["state"])
    verify(**args)
    commit(args["state"], counts(3, 0, 8), args["segment"])
    for slot in range(before.recurrent.shape[0]):
        kept = torch.equal(args["state"].recurrent[slot], before.recurrent[slot])
        assert kept == torch.equal(args["state"].conv[slot], before.conv[slot]) == (slot not in (2, 3)), slot


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("commit", COMMIT)
def test_b75_two_hundred_steps_of_rejected_drafts_equal_plain_decode(verify: Op, commit: Op) -> None:
    gen = torch.Generator().manual_seed(75)
    args = block_inputs(torch.float32, gen, [4], [1], phase="decode", heads=1, dim=16, draft=True)
    drafted, plain = args["state"], cloned(args["state"])
    single = make_segment("decode", [1], [1])
    for _ in range(200):
        fresh = block_inputs(torch.float32, gen, [4], [1], phase="decode", heads=1, dim=16, draft=True)
        streams = {name: fresh[name] for name in BLOCK_INPUTS}
        out = verify(**streams, params=args["params"], state=drafted, segment=args["segment"])
        commit(drafted, counts(1), args["segment"])
        expected = verify(**rows_of(fresh, slice(0, 1)), params=args["params"], state=plain, segment=single)
        assert relative_rms(out[:1], expected) < 1e-5
    assert torch.equal(drafted.conv[1], plain.conv[1])
    assert relative_rms(drafted.recurrent[1], plain.recurrent[1]) < 1e-5


@pytest.mark.parametrize("verify", VERIFY)
def test_b75_no_kernel_verifies_without_a_record(verify: Op) -> None:
    args = block_inputs(torch.float32, torch.Generator().manual_seed(75), [2], [1], phase="decode", draft=True)
    before = cloned(args["state"])
    with pytest.raises(ValueError, match="drafts are verified with a record of them"):
        verify(**{**args, "state": replace(args["state"], drafts=None)})
    short = replace(args["state"], drafts=empty_drafts(args["state"], 1))
    with pytest.raises(ValueError, match="the record holds 1 tokens per request, the segment has up to 2"):
        verify(**{**args, "state": short})
    assert torch.equal(args["state"].recurrent, before.recurrent)


@pytest.mark.parametrize("commit", COMMIT)
def test_b75_there_is_nothing_to_commit_without_a_record(commit: Op) -> None:
    state = KdaState(torch.zeros(2, 3, 6), torch.zeros(2, 1, 2, 2))
    with pytest.raises(ValueError, match="there is no record to replay"):
        commit(state, counts(1), make_segment("decode", [1], [1], draft=True))


@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("shared", [127, 128, 129, 130])
def test_b67_b68_a_prefix_is_used_up_to_its_last_whole_boundary(prefill: Op, shared: int) -> None:
    """A prompt of 130 tokens leaves states after 64 and 128; another one shares its first tokens and starts from there."""
    gen = torch.Generator().manual_seed(68)
    args = block_inputs(torch.float32, gen, [130], [1], heads=1, dim=16, snapshots=[(0, 64, 2), (0, 128, 3)])
    other = block_inputs(torch.float32, gen, [140], [4], heads=1, dim=16)
    prompt = {name: torch.cat((args[name][:shared], other[name][shared:])) for name in BLOCK_INPUTS}
    start = {tensor: getattr(args["state"], tensor)[1].clone() for tensor in ("conv", "recurrent")}
    prefill(**args)
    warm = args["state"]
    reused, slot = (64, 2) if shared < 128 else (128, 3)
    cold = KdaState(torch.zeros_like(warm.conv), torch.zeros_like(warm.recurrent))
    cold.conv[1], cold.recurrent[1] = start["conv"], start["recurrent"]
    whole = prefill(**prompt, params=args["params"], state=cold, segment=make_segment("prefill", [140], [1]))
    rest = {name: rows[reused:].clone() for name, rows in prompt.items()}
    segment = make_segment("prefill", [140 - reused], [slot], [reused])
    out = prefill(**rest, params=args["params"], state=warm, segment=segment)
    assert relative_rms(out, whole[reused:]) < 1e-5
    assert torch.equal(warm.conv[slot], cold.conv[1]), "the tail must come from the same position as the state"
    assert relative_rms(warm.recurrent[slot], cold.recurrent[1]) < 1e-5


@pytest.mark.parametrize(
    ("snapshot", "message"),
    [
        ((0, 63, 9), "a multiple of 64"),
        ((0, 192, 9), "up to the request's 130 new tokens"),
        ((0, 0, 9), "a multiple of 64"),
        ((2, 64, 9), "no such request"),
        ((1, 64, 9), "padding"),
        ((0, 64, 0), "slot 0"),
        ((0, 64, 3), "slot 3: the slot is in use"),
    ],
)
def test_b67_a_snapshot_that_cannot_be_taken_is_refused(snapshot: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_segment("prefill", [130, 64], [3, 0], snapshots=[snapshot])


def test_b67_snapshots_have_slots_of_their_own_and_are_taken_in_prefill() -> None:
    for snapshots in ([(0, 64, 5), (0, 128, 5)], [(0, 64, 5), (0, 64, 6)]):
        with pytest.raises(ValueError, match="in use, or the boundary has a snapshot already"):
            make_segment("prefill", [130], [1], snapshots=snapshots)
    with pytest.raises(ValueError, match="snapshots are taken in prefill"):
        make_segment("decode", [1], [1], snapshots=[(0, 64, 2)])
    segment = make_segment("prefill", [130, 5], [1, 2], snapshots=[(0, 128, 6)])
    assert segment.snapshot_slots is not None
    assert segment.snapshot_slots.tolist() == [[0, 6], [0, 0]]
    assert make_segment("prefill", [130], [1]).snapshot_slots is None


def test_the_record_has_the_sizes_and_types_of_its_state() -> None:
    state = KdaState(torch.zeros(3, 3, 24, dtype=torch.bfloat16), torch.zeros(3, 2, 4, 4, dtype=torch.bfloat16))
    drafts = empty_drafts(state)
    assert (drafts.x.shape, drafts.x.dtype) == ((3, 8, 24), torch.bfloat16)
    assert (drafts.k.shape, drafts.k.dtype) == ((3, 8, 2, 4), torch.bfloat16)
    assert (drafts.g.shape, drafts.g.dtype) == (drafts.u.shape, drafts.u.dtype) == ((3, 8, 2, 4), torch.float32)
