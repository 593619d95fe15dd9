"""Accepted drafts into states and tails: all of them, or some."""

from __future__ import annotations

from typing import Any

import torch

from k3port.ops.contract import map_tensors
from k3port.ops.kda_state import KdaState, empty_drafts
from k3port.testing.bench.workload import Case, Workload, copy_peers
from k3port.testing.bench.workloads.kda_core import HEADS
from k3port.testing.bench.workloads.kda_data import HEAD_DIM, LOWER_BOUND, TAPS, equal_segment

REQUESTS = (1, 8, 32, 128)
KEPT = ((4, 4), (3, 4), (8, 8), (5, 8))
"""Tokens of each request that are accepted, and that were verified."""


def case(requests: int, kept: int, tokens: int, heads: int, quick: bool = False, dim: int = HEAD_DIM) -> Case:
    """``kept`` of ``tokens`` of every request are accepted.

    The axis T counts the accepted ones, whose part of the record is read. States are by far the most, so a number of
    requests has about the same best configuration for all: the longest case is tuned for, which would decide anyway.
    """

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        return commit_args(requests, kept, tokens, heads, device, gen, dim)

    axes = {"T": kept * requests, "B": requests, "H": heads, "K": dim, "V": dim, "W": TAPS}
    longest = max(kept for kept, _ in KEPT)
    return Case(f"H{heads} B{requests} {kept} of {tokens}", axes, make, quick, tuned=kept == longest)


def commit_args(
    requests: int, kept: int, tokens: int, heads: int, device: torch.device, gen: torch.Generator, dim: int = HEAD_DIM
) -> dict[str, Any]:
    """Arguments of the op ``kda_commit``. The record holds NaN behind the verified tokens."""
    slots = requests + 1
    state = KdaState(
        conv=torch.randn(slots, TAPS - 1, 3 * heads * dim, device=device, generator=gen).bfloat16(),
        recurrent=torch.randn(slots, heads, dim, dim, device=device, generator=gen) * 0.1,
    )
    record = map_tensors(empty_drafts(state), lambda rows: torch.full_like(rows, torch.nan))

    def random(rows: torch.Tensor) -> torch.Tensor:
        return torch.randn(rows[1:, :tokens].shape, device=device, generator=gen)

    record.x[1:, :tokens] = random(record.x).to(record.x.dtype)
    record.k[1:, :tokens] = random(record.k).to(record.k.dtype)
    # Decays all over (-5, 0), weak ones often.
    record.g[1:, :tokens] = LOWER_BOUND * torch.sigmoid(random(record.g) - 2)
    record.u[1:, :tokens] = random(record.u) * 0.5
    return {
        "state": KdaState(state.conv, state.recurrent, drafts=record),
        "counts": torch.full((requests,), kept, dtype=torch.int32, device=device),
        "segment": equal_segment("decode", requests, requests * tokens, device),
    }


WORKLOADS = (
    Workload(
        "kda_commit",
        None,
        tuple(
            case(n, kept, tokens, heads, (heads, n, kept) == (96, 32, 8))
            for heads in HEADS
            for n in REQUESTS
            for kept, tokens in KEPT
        ),
        copy_peers,
    ),
)
