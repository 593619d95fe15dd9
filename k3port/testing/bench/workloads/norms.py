"""RMSNorm, gated norm and SiTU: every number is read once and written once, so the peer is a copy."""

from __future__ import annotations

from typing import Any

import torch

from k3port.testing.bench.workload import Case, Workload, copy_peers

HIDDEN = 7168
HEADS, HEAD_DIM = 96, 128
WIDTH = 7168
TOKENS = (1, 64, 1024, 4096, 16384)
QUICK = frozenset({1024, 4096})


def _randn(shape: tuple[int, ...], device: torch.device, gen: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, device=device, generator=gen).bfloat16()


def _weight(size: int, device: torch.device, gen: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size, device=device, generator=gen)


def rms_case(tokens: int, dim: int = HIDDEN) -> Case:
    """``[tokens, dim]``."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        weight = _weight(dim, device, gen).bfloat16()
        return {"x": _randn((tokens, dim), device, gen), "weight": weight, "eps": 1e-5}

    return Case(f"T{tokens}", {"T": tokens, "D": dim}, make, tokens in QUICK)


def gated_case(tokens: int, heads: int = HEADS, dim: int = HEAD_DIM) -> Case:
    """``[tokens, heads, dim]``, as it comes out of the recurrence."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        x, gate = (_randn((tokens, heads, dim), device, gen) for _ in range(2))
        return {"x": x, "gate": gate, "weight": _weight(dim, device, gen), "eps": 1e-5}

    return Case(f"H{heads} T{tokens}", {"T": tokens, "H": heads, "V": dim}, make, tokens in QUICK)


def situ_case(tokens: int, width: int = WIDTH) -> Case:
    """``[tokens, 2 width]`` to ``[tokens, width]``."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        return {"gate_up": _randn((tokens, 2 * width), device, gen) * 2, "beta": 4.0, "linear_beta": 25.0}

    return Case(f"T{tokens}", {"T": tokens, "I": width}, make, tokens in QUICK)


WORKLOADS = (
    Workload("rms_norm", None, tuple(rms_case(tokens) for tokens in TOKENS), copy_peers),
    Workload("gated_norm", None, tuple(gated_case(tokens) for tokens in TOKENS), copy_peers),
    Workload("situ_mul", None, tuple(situ_case(tokens) for tokens in TOKENS), copy_peers),
)
