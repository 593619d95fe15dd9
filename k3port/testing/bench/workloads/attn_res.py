"""Attention Residuals: with pending output, between 0 and 8 finished blocks (K3 has 93 layers in blocks of 12)."""

from __future__ import annotations

from typing import Any

import torch

from k3port.testing.bench.workload import Case, Workload, copy_peers

HIDDEN = 7168
SHAPES = ((0, 4096), (4, 1), (4, 64), (4, 1024), (4, 4096), (4, 16384), (8, 4096), (8, 16384))


def case(blocks: int, tokens: int, write_block: bool = False, dim: int = HIDDEN) -> Case:
    """``blocks`` finished blocks of ``[tokens, dim]``, one more slot in the bank, a pending output, and the norm."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        def rows() -> torch.Tensor:
            # Eighths: their sum is exact in bfloat16, so its rounding does not move the scores of the reference.
            return ((torch.randn(tokens, dim, device=device, generator=gen) * 8).round().clamp(-63, 63) / 8).bfloat16()

        bank = torch.randn(blocks + 1, tokens, dim, device=device, generator=gen).bfloat16()
        res_norm, norm = (1 + 0.2 * torch.randn(dim, device=device, generator=gen) for _ in range(2))
        res_proj = torch.randn(dim, device=device, generator=gen) * dim**-0.5
        return {
            "partial": rows(),
            "pending": rows(),
            "blocks": bank,
            "num_blocks": blocks,
            "write_block": write_block,
            "res_norm": res_norm.bfloat16() if blocks else None,
            "res_proj": res_proj.bfloat16() if blocks else None,
            "norm_weight": norm.bfloat16(),
            "eps": 1e-5,
        }

    name = f"R{blocks} T{tokens}{' write' if write_block else ''}"
    return Case(name, {"R": blocks, "T": tokens, "D": dim}, make, (blocks, tokens) in ((4, 1024), (4, 4096)))


WORKLOADS = (
    Workload(
        "attn_res",
        None,
        (*(case(blocks, tokens) for blocks, tokens in SHAPES), case(4, 4096, write_block=True)),
        copy_peers,
    ),
)
