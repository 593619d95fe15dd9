"""The whole mixer core: a fused kernel beside our own separate ones, which do the same in four launches or more."""

from __future__ import annotations

from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.testing.bench.peers.parts import parts_peer
from k3port.testing.bench.workload import Case, Peers, Workload, contract_args
from k3port.testing.bench.workloads.kda_core import DECODE, HEADS
from k3port.testing.bench.workloads.kda_data import HEAD_DIM, TAPS, block_answer, block_args
from k3port.testing.harness import op_contracts

PREFILL = ((1, 1024), (1, 8192), (8, 8192))
"""Longer prompts would need more memory for the float64 answer than most GPUs have."""


def case(phase: Phase, requests: int, tokens: int, heads: int, quick: bool = False) -> Case:
    """``tokens`` of all requests together, equally long."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        contract = next(c for c in op_contracts("kda") if c.phase in (None, phase))
        return contract_args(contract, block_args(phase, requests, tokens, heads, device, gen))

    axes = {"T": tokens, "B": requests, "H": heads, "K": HEAD_DIM, "V": HEAD_DIM, "W": TAPS}
    name = f"H{heads} B{requests}" if phase == "decode" else f"H{heads} {requests}x{tokens // requests}"
    return Case(name, axes, make, quick)


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
        tuple(case("decode", n, n, heads, n in (1, 32)) for heads in HEADS for n in DECODE),
        _peers("decode"),
        block_answer,
    ),
)
