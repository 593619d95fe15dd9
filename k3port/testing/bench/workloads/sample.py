"""Choosing the next token from K3's vocabulary: greedy, with temperature and min-p, with top-p, with every filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from k3port.ops.sample import SamplingTensors
from k3port.testing.bench.workload import Case, Workload, copy_peers

VOCABULARY = 163840
BATCHES = (1, 8, 32, 128)


@dataclass(frozen=True)
class Settings:
    """What every row of a case asks for."""

    name: str
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


KINDS = (
    Settings("greedy", 0.0),
    Settings("min-p", 0.8, min_p=0.02),
    Settings("top-p", 0.8, top_p=0.95),
    Settings("top-k, top-p, min-p", 0.8, 50, 0.95, 0.02),
)


def case(rows: int, kind: Settings, vocabulary: int = VOCABULARY) -> Case:
    """``[rows, vocabulary]`` logits with a spread like a model's."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        def full(value: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        params = SamplingTensors(
            temperature=full(kind.temperature),
            top_k=full(kind.top_k, torch.int64),
            top_p=full(kind.top_p),
            min_p=full(kind.min_p),
            # What the engine knows of its requests without reading the tensors back.
            all_greedy=kind.temperature == 0,
            any_filter=kind.top_k > 0 or kind.top_p < 1,
        )
        return {
            "logits": torch.randn(rows, vocabulary, device=device, generator=gen) * 4,
            "params": params,
            "uniform": torch.rand(rows, device=device, generator=gen, dtype=torch.float64),
        }

    return Case(f"B{rows} {kind.name}", {"B": rows, "V": vocabulary}, make, rows in (1, 32))


WORKLOADS = (Workload("sample", None, tuple(case(rows, kind) for kind in KINDS for rows in BATCHES), copy_peers),)
