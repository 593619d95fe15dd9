"""What is kept of verified drafts: the accepted tokens are replayed from their record into the state.

Verification leaves the state before the first draft alone. With k normalised, g and u of the record,

    S_m = S_0 exp(g_1 + .. + g_m) + sum_(i <= m) u_i (k_i exp(g_(i+1) + .. + g_m))ᵀ

is the state after m of the tokens: what m decode steps would have left, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from k3port.ops import kda_commit_checks as checks
from k3port.ops.contract import Contract, Cost, Invariant, Sample, accumulation_dtype
from k3port.ops.kda_state import KdaState, normalize_qk
from k3port.ops.segment import NULL_SLOT, Segment


def kda_commit(state: KdaState, counts: torch.Tensor, segment: Segment) -> None:
    """Brings states and convolution tails from before the drafts to after the accepted ones.

    Args:
        state: with the record that :func:`k3port.ops.kda.kda` wrote for the same segment; ``conv`` and ``recurrent``
            are updated in place at the segment's slots.
        counts: int32 ``[B]`` accepted tokens per request, the first token of the step included. A number outside of 0
            and the request's tokens counts as the nearer of the two; with 0 the slot keeps its bits.
        segment: the decode segment that was verified; padding is neither read nor written.

    Raises:
        ValueError: the state has no record.
    """
    drafts = state.drafts
    if drafts is None:
        raise ValueError("there is no record to replay: KdaState.drafts is None, see empty_drafts")
    for length, slot, count in zip(segment.lengths, segment.slot_ids, counts.tolist(), strict=True):
        kept = min(max(count, 0), length)
        if slot == NULL_SLOT or kept == 0:
            continue
        k, g, u = (rows[slot, :kept] for rows in (drafts.k, drafts.g, drafts.u))
        acc = accumulation_dtype(g)
        _, k = normalize_qk(k, k, acc)
        fallen = g.to(acc).cumsum(dim=0)
        keys = k * torch.exp(fallen[-1] - fallen)
        written = torch.einsum("ihv,ihk->hvk", u.to(acc), keys)
        old = state.recurrent[slot].to(acc)
        state.recurrent[slot] = (old * torch.exp(fallen[-1]).unsqueeze(-2) + written).to(state.recurrent.dtype)
        window = torch.cat((state.conv[slot], drafts.x[slot, :kept].to(state.conv.dtype)))
        state.conv[slot] = window[kept:]


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for name, lengths, slots, counts, adversarial in (
        ("some of them", [4, 8, 1], [2, 3, 1], [2, 8, 1], False),
        ("none of one request", [8, 8, 8], [1, 3, 2], [3, 0, 8], True),
        ("one token", [1], [1], [1], False),
        ("none at all", [2, 8], [2, 1], [0, 0], True),
        ("counts out of range", [3, 5, 2, 1], [4, 1, 3, 2], [7, -1, 2, 2**31 - 1], True),
        ("padding", [4, 2, 8, 1], [0, 2, 0, 1], [4, 1, 2, 1], True),
    ):
        yield Sample(name, checks.commit_inputs(dtype, gen, lengths, slots, counts), adversarial)
    for width in (2, 3):
        args = checks.commit_inputs(dtype, gen, [1, 8, 3], [2, 1, 3], [1, 5, 2], width=width)
        yield Sample(f"convolution of width {width}", args)
    # Decays to nothing: what was there before must not come back through an overflow.
    args = checks.commit_inputs(dtype, gen, [8], [1], [8], decay=-30.0)
    yield Sample("decays to nothing", args, adversarial=True)


def _cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    tokens, requests, width = axes["T"], axes["B"], axes["H"] * axes["K"]
    state = axes["H"] * axes["V"] * axes["K"]
    record = tokens * axes["H"] * (axes["K"] * (itemsize + 4) + axes["V"] * 4)
    tails = 2 * requests * (axes["W"] - 1) * 3 * width * itemsize
    return Cost(bytes=2 * requests * state * 4 + record + tails, flops=3 * tokens * state)


KDA_COMMIT = Contract(
    op="kda_commit",
    inputs={"state": "", "counts": "B", "segment": ""},
    outputs={},
    mutates=("state.conv", "state.recurrent"),
    reference=kda_commit,
    samples=_samples,
    cost=_cost,
    invariants=(
        Invariant("published values", checks.check_published_values),
        Invariant("a commit of nothing keeps every bit", checks.check_nothing),
        Invariant("two commits equal one", checks.check_split),
    ),
)
