"""The KDA recurrence: chunked over prompts, a step per request in decode, or drafts; beside the kernels of fla-core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Cost
from k3port.ops.kda import KDA_CORE
from k3port.oracle.spec import KernelSpec
from k3port.testing.bench.peers import fla
from k3port.testing.bench.workload import Case, Peer, Workload, contract_args
from k3port.testing.bench.workloads.kda_data import (
    HEAD_DIM,
    case_name,
    core_answer,
    core_args,
    draft_bytes,
    verifies,
)
from k3port.testing.harness import op_contracts

HEADS = (96, 12)
PREFILL = ((1, 1024), (1, 4096), (1, 8192), (8, 8192), (1, 16384), (1, 65536), (8, 65536))
DECODE = (1, 8, 32, 128, 256)
DRAFTS = tuple((requests, tokens) for tokens in (4, 8) for requests in (1, 8, 32, 128))
"""Requests, and tokens of each that are verified."""


def case(phase: Phase, requests: int, tokens: int, heads: int, quick: bool = False, dim: int = HEAD_DIM) -> Case:
    """``tokens`` of all requests together, equally long; more than one each in decode are drafts. These are not tuned
    for: steps of one token, which are far more, ask for the same configurations."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        contract = next(c for c in op_contracts("kda_core") if c.phase in (None, phase))
        return contract_args(contract, core_args(phase, requests, tokens, heads, device, gen, dim))

    axes = {"T": tokens, "B": requests, "H": heads, "K": dim, "V": dim}
    drafts = verifies(phase, requests, tokens)
    name = case_name(phase, requests, tokens, heads)
    return Case(name, axes, make, quick, cost=_draft_cost if drafts else None, tuned=not drafts)


def _draft_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    plain = KDA_CORE.cost(axes, itemsize)
    return Cost(plain.bytes + draft_bytes(axes, itemsize), plain.flops)


def _prefill_peers(case: Case, cost: Cost, kernels: Sequence[KernelSpec]) -> Iterable[Peer]:
    return (fla.chunk_peer(),)


def _decode_peers(case: Case, cost: Cost, kernels: Sequence[KernelSpec]) -> Iterable[Peer]:
    return (fla.step_peer(),)


WORKLOADS = (
    Workload(
        "kda_core",
        "prefill",
        tuple(
            case("prefill", n, tokens, heads, quick=(n, tokens) in ((1, 1024), (1, 8192)))
            for heads in HEADS
            for n, tokens in PREFILL
        ),
        _prefill_peers,
        core_answer,
    ),
    Workload(
        "kda_core",
        "decode",
        (
            *(case("decode", n, n, heads, quick=n in (1, 32)) for heads in HEADS for n in DECODE),
            *(case("decode", n, n * tokens, heads) for heads in HEADS for n, tokens in DRAFTS),
        ),
        _decode_peers,
        core_answer,
    ),
)
