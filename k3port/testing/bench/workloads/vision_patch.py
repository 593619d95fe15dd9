"""Patches of 14 x 14 to rows of the vision tower; peers: ``torch.conv2d``, and a plain matrix product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from k3port.ops.contract import Cost
from k3port.oracle.spec import KernelSpec
from k3port.testing.bench.workload import Args, Case, Peer, Workload

WIDTH = 1024
SIDE = 14
PATCHES = (1024, 4096, 16384, 65536)


def case(patches: int, width: int = WIDTH) -> Case:
    """``[patches, 3, 14, 14]`` pixels in [-1, 1]."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        weight = torch.randn(width, 3, SIDE, SIDE, device=device, generator=gen) * (3 * SIDE * SIDE) ** -0.5
        pixels = torch.rand(patches, 3, SIDE, SIDE, device=device, generator=gen) * 2 - 1
        return {
            "pixels": pixels.bfloat16(),
            "weight": weight.bfloat16(),
            "bias": torch.randn(width, device=device, generator=gen).bfloat16() * 0.1,
        }

    axes = {"T": patches, "D": width, "C": 3, "R": SIDE, "W": SIDE}
    return Case(f"{patches} patches", axes, make, patches == 4096)


def conv2d(args: Args) -> Callable[[], Any]:
    """``[N, 3, 14, 14]`` to ``[N, D, 1, 1]``, with the same numbers in the same order."""
    pixels, weight, bias = args["pixels"], args["weight"], args["bias"]
    return lambda: F.conv2d(pixels, weight, bias, stride=SIDE)


def matmul(args: Args) -> Callable[[], Any]:
    """One product over flattened patches."""
    pixels, weight, bias = args["pixels"].flatten(1), args["weight"].flatten(1), args["bias"]
    return lambda: F.linear(pixels, weight, bias)


def _peers(case: Case, cost: Cost, kernels: Sequence[KernelSpec]) -> Iterable[Peer]:
    return Peer("torch.conv2d", conv2d), Peer("torch.linear", matmul)


WORKLOADS = (Workload("vision_patch", None, tuple(case(patches) for patches in PATCHES), _peers),)
