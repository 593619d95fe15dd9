"""Collectives over the tensor-parallel ranks. The reference is one rank: it is its own sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from k3port.ops.contract import Contract, Cost, Sample


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum of ``x`` ``[T, D]`` over the ranks, on every rank. A kernel may overwrite and return ``x``."""
    return x


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """``[T, V]`` of every rank concatenated along the last axis in rank order: ``[T, ranks V]``."""
    return x


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for shape in ((1, 96), (33, 96), (0, 96)):
        yield Sample(f"{shape[0]} rows", {"x": torch.randn(shape, generator=gen).to(dtype)})
    x = torch.tensor([[0.0, torch.inf, -torch.inf, 1e38]]).to(dtype)
    yield Sample("infinities pass through", {"x": x}, adversarial=True)


def _reduce_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    size, ranks = axes["T"] * axes["D"], axes.get("ranks", 1)
    # A ring moves 2 (n-1)/n of the message through every rank.
    return Cost(bytes=2 * (ranks - 1) * size * itemsize // ranks, flops=(ranks - 1) * size)


def _gather_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    return Cost(bytes=axes.get("ranks", 1) * axes["T"] * axes["V"] * itemsize, flops=0)


ALL_REDUCE = Contract(
    op="all_reduce",
    inputs={"x": "T D"},
    outputs={"y": "T D"},
    reference=all_reduce,
    samples=_samples,
    cost=_reduce_cost,
)
ALL_GATHER = Contract(
    op="all_gather",
    inputs={"x": "T V"},
    outputs={"y": "T ranksV"},
    reference=all_gather,
    samples=_samples,
    cost=_gather_cost,
)
