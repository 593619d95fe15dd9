"""The whole mixer core: a fused kernel beside our own separate ones, which do the same in four launches or more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Cost
from k3port.ops.kda import KDA
from k3port.testing.bench.peers.parts import parts_peer
from k3port.testing.bench.workload import Case, Peers, Workload, contract_args
from k3port.testing.bench.workloads.kda_core import DECODE, DRAFTS, HEADS
from k3port.testing.bench.workloads.kda_data import (
    HEAD_DIM,
    TAPS,
    block_answer,
    block_args,
    case_name,
    draft_bytes,
    verifies,
)
from k3port.testing.harness import op_contracts

PREFILL = ((1, 1024), (1, 8192), (8, 8192))
"""Longer prompts would need more memory for the float64 answer than most GPUs have."""


def case(phase: Phase, requests: int, tokens: int, heads: int, quick: bool = False) -> Case:
    """``tokens`` of all requests together, equally long; more than one each in decode are drafts."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        contract = next(c for c in op_contracts("kda") if c.phase in (None, phase))
        return contract_args(contract, block_args(phase, requests, tokens, heads, device, gen))

    axes = {"T": tokens, "B": requests, "H": heads, "K": HEAD_DIM, "V": HEAD_DIM, "W": TAPS}
    cost = _draft_cost if verifies(phase, requests, tokens) else None
    return Case(case_name(phase, requests, tokens, heads), axes, make, quick, cost)


def _draft_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    """Inputs of the convolution go into the record, and the tail is only read."""
    plain = KDA.cost(axes, itemsize)
    inputs = (axes["T"] - axes["B"] * (axes["W"] - 1)) * 3 * axes["H"] * axes["K"] * itemsize
    return Cost(plain.bytes + draft_bytes(axes, itemsize) + inputs, plain.flops)


def _peers(phase: Phase) -> Peers:
    return lambda case, cost, kernels: (parts_peer("kda", phase, kernels),)


WORKLOADS = (
    Workload(
        "kda",
        "prefill",
        tuple(case("prefill", n, tokens, heads, (n, tokens) == (1, 8192)) for heads in HEADS for n, tokens in PREFILL),
        _peers("prefill"),
        block_answer,
    ),
    Workload(
        "kda",
        "decode",
        (
            *(case("decode", n, n, heads, n in (1, 32)) for heads in HEADS for n in DECODE),
            *(
                case("decode", n, n * tokens, heads, (heads, n, tokens) == (96, 32, 4))
                for heads in HEADS
                for n, tokens in DRAFTS
            ),
        ),
        _peers("decode"),
        block_answer,
    ),
)
