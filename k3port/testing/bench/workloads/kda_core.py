"""The KDA recurrence: chunked over prompts, one step per request in decode; beside the kernels of fla-core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Cost
from k3port.oracle.spec import KernelSpec
from k3port.testing.bench.peers import fla
from k3port.testing.bench.workload import Case, Peer, Workload, contract_args
from k3port.testing.bench.workloads.kda_data import HEAD_DIM, core_answer, core_args
from k3port.testing.harness import op_contracts

HEADS = (96, 12)
PREFILL = ((1, 1024), (1, 4096), (1, 8192), (8, 8192), (1, 16384), (1, 65536), (8, 65536))
DECODE = (1, 8, 32, 128, 256)


def case(phase: Phase, requests: int, tokens: int, heads: int, quick: bool = False, dim: int = HEAD_DIM) -> Case:
    """``tokens`` of all requests together, equally long; what the contract does not take is left out."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        contract = next(c for c in op_contracts("kda_core") if c.phase in (None, phase))
        return contract_args(contract, core_args(phase, requests, tokens, heads, device, gen, dim))

    name = f"H{heads} B{requests}" if phase == "decode" else f"H{heads} {requests}x{tokens // requests}"
    return Case(name, {"T": tokens, "B": requests, "H": heads, "K": dim, "V": dim}, make, quick)


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
        tuple(case("decode", n, n, heads, quick=n in (1, 32)) for heads in HEADS for n in DECODE),
        _decode_peers,
        core_answer,
    ),
)
