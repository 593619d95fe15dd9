"""Inputs and invariants of the commit of verified drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from k3port.ops.contract import cloned, relative_rms
from k3port.ops.kda_state import KdaDrafts, KdaState, empty_drafts
from k3port.ops.segment import NULL_SLOT, make_segment


def commit_inputs(
    dtype: torch.dtype,
    gen: torch.Generator,
    lengths: Sequence[int],
    slots: Sequence[int],
    counts: Sequence[int],
    *,
    heads: int = 2,
    dim: int = 64,
    width: int = 4,
    decay: float = -1.0,
) -> dict[str, Any]:
    """Arguments of ``kda_commit``. Rows of the record that were not written, and the null slot, hold NaN.

    Args:
        decay: size of the log decays.
    """
    num_slots = max([*slots, 1]) + 2
    state = KdaState(
        conv=torch.randn(num_slots, width - 1, 3 * heads * dim, generator=gen).to(dtype),
        recurrent=torch.randn(num_slots, heads, dim, dim, generator=gen) * 0.3,
    )
    drafts = empty_drafts(state)
    for rows in (drafts.x, drafts.k, drafts.g, drafts.u):
        rows.fill_(torch.nan)
    for length, slot in zip(lengths, slots, strict=True):
        if slot != NULL_SLOT:
            for rows, scale in ((drafts.x, 1.0), (drafts.k, 1.0), (drafts.u, 0.5)):
                rows[slot, :length] = (torch.randn(rows[slot, :length].shape, generator=gen) * scale).to(rows.dtype)
            drafts.g[slot, :length] = decay * torch.rand(drafts.g[slot, :length].shape, generator=gen)
    return {
        "state": replace(state, drafts=drafts),
        "counts": torch.tensor(counts, dtype=torch.int32),
        "segment": make_segment("decode", lengths, slots, draft=True),
    }


def check_published_values(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Two tokens of a state of 2 x 2 that can be computed by hand."""
    first, second = [[1.25, 0.0], [-0.5, 2.0]], [[0.8, -0.6], [0.04, 1.22]]
    for count, expected in ((1, first), (2, second), (0, [[1.0, 0.0], [0.0, 2.0]])):
        state = KdaState(
            conv=torch.arange(3 * 6).reshape(1, 3, 6).repeat(2, 1, 1).to(dtype),
            recurrent=torch.tensor([[[[1.0, 0.0], [0.0, 2.0]]]]).repeat(2, 1, 1, 1),
        )
        drafts = empty_drafts(state)
        for rows in (drafts.x, drafts.k, drafts.g, drafts.u):
            rows.zero_()
        drafts.x[1, 0], drafts.x[1, 1] = 100, 101
        # Long keys: the epsilon of the normalisation does not count.
        drafts.k[1, :2, 0] = torch.tensor([[1024.0, 0.0], [600.0, 800.0]]).to(dtype)
        drafts.g[1, :2, 0] = torch.tensor([[0.5, 1.0], [1.0, 0.25]]).log()
        drafts.u[1, :2, 0] = torch.tensor([[0.75, -0.5], [-0.75, 0.9]])
        conv = torch.cat((state.conv[1], drafts.x[1, :count]))[count:]
        state = replace(state, drafts=drafts)
        function(state, torch.tensor([count], dtype=torch.int32), make_segment("decode", [3], [1], draft=True))
        assert torch.allclose(state.recurrent[1, 0], torch.tensor(expected), atol=1e-6), f"{count} tokens"
        assert torch.equal(state.conv[1], conv), f"tail after {count} tokens"


def check_nothing(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Count 0 leaves the slot as it is, and so does a negative count, beside requests that go on."""
    args = commit_inputs(dtype, gen, [8, 8, 8, 2], [3, 1, 2, 4], [3, 0, 8, -1], dim=32)
    before = cloned(args["state"])
    function(**args)
    for slot in range(before.recurrent.shape[0]):
        for mine, old in ((args["state"].recurrent, before.recurrent), (args["state"].conv, before.conv)):
            assert torch.equal(mine[slot], old[slot]) == (slot not in (3, 2)), f"slot {slot}"


def check_split(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """The first m tokens, then the others as a record of their own, equal all at once."""
    args = commit_inputs(dtype, gen, [8], [1], [8], heads=1, dim=32)
    whole = cloned(args["state"])
    function(whole, args["counts"], args["segment"])
    for first in (1, 3, 7):
        state = cloned(args["state"])
        function(state, torch.tensor([first], dtype=torch.int32), args["segment"])
        assert state.drafts is not None
        rest = KdaDrafts(
            *(
                torch.roll(rows, -first, dims=1)
                for rows in (getattr(state.drafts, name) for name in ("x", "k", "g", "u"))
            )
        )
        segment = make_segment("decode", [8 - first], [1], draft=True)
        function(replace(state, drafts=rest), torch.tensor([8 - first], dtype=torch.int32), segment)
        assert torch.equal(state.conv[1], whole.conv[1]), f"tail, cut at {first}"
        assert relative_rms(state.recurrent[1], whole.recurrent[1]) < 2e-6, f"state, cut at {first}"
