"""What the device can do at most, measured in the same run: copying memory and multiplying matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from k3port.ops.contract import Cost
from k3port.testing.bench.clock import Clock
from k3port.testing.bench.timing import Settings, Subject, measure


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second (read plus written) of a device copy, and FLOP per second of a bfloat16 matrix product."""

    copy_bytes_per_second: float
    matmul_flops_per_second: float
    copy_bytes: int
    matmul_size: int


@dataclass(frozen=True)
class Bound:
    """The least time of one call: the larger one of bytes over bandwidth and operations over the matrix rate."""

    microseconds: float
    limit: Literal["memory", "matrix"]
    bytes: int
    flops: int

    def percent(self, microseconds: float) -> float:
        """How much of the bound a time reaches; 100 is the bound itself."""
        return 100 * self.microseconds / microseconds


def bound(cost: Cost, ceilings: Ceilings) -> Bound:
    """The bound of a call with this cost."""
    memory = cost.bytes / ceilings.copy_bytes_per_second * 1e6
    matrix = cost.flops / ceilings.matmul_flops_per_second * 1e6
    return Bound(max(memory, matrix), "memory" if memory >= matrix else "matrix", cost.bytes, cost.flops)


def measure_ceilings(clock: Clock, settings: Settings, copy_bytes: int = 2**32, matmul_size: int = 8192) -> Ceilings:
    """Copies ``copy_bytes`` (half read, half written) and multiplies two square bfloat16 matrices of random numbers.

    Random, since a product of zeros draws less power and runs faster than real data. Eager timings: calls this long
    hide their launch.
    """
    source = torch.randn(max(1, copy_bytes // 8), device=clock.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(matmul_size, matmul_size, device=clock.device).bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    subjects = (
        Subject("copy", (lambda: target.copy_(source),), capturable=False),
        Subject("matmul", (lambda: torch.mm(a, b, out=c),), capturable=False),
    )
    copied, multiplied = (found.eager.median * 1e-6 for found in measure(subjects, clock, settings))
    moved = 2 * source.numel() * source.element_size()
    return Ceilings(moved / copied, 2 * matmul_size**3 / multiplied, moved, matmul_size)
