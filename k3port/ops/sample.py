"""Choosing the next token: temperature, top-k, top-p, min-p, then one uniform number per request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from k3port.ops.contract import Contract, Cost, Invariant, Sample


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One entry per row: ``temperature`` (0: greedy), ``top_k`` (0: off), ``top_p`` (1: off), ``min_p`` (0: off).

    Attributes:
        temperature, top_p, min_p: float64 ``[B]``.
        top_k: int64 ``[B]``.
        all_greedy: what the host knows of the rows, so that nobody reads the tensors back: every temperature is 0.
            False where it does not know.
        any_filter: some row that is not greedy has top-k or top-p. True where the host does not know.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    all_greedy: bool = False
    any_filter: bool = True


def sample(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    """Draws one id per row by inverting the cumulative distribution at ``uniform``.

    Per row: greedy takes the largest logit, the lowest id among equals. Otherwise ``p = softmax(logits /
    temperature)``; top-k keeps the k largest (lowest ids among equals); top-p then keeps the smallest set of the
    renormalised rest, largest first, whose sum reaches p; min-p drops what is below ``min_p`` times the largest.
    The draw takes the first kept id, in id order, at which the cumulative probability exceeds ``uniform``. A row
    depends on nothing but its own numbers, so a request gives the same ids alone and in a batch.

    Args:
        logits: float32 ``[B, V]``, finite.
        uniform: float64 ``[B]`` in [0, 1).

    Returns:
        int64 ``[B]``.
    """
    ids = [
        _sample_row(row, t, k, p, m, u)
        for row, t, k, p, m, u in zip(
            logits,
            params.temperature.tolist(),
            params.top_k.tolist(),
            params.top_p.tolist(),
            params.min_p.tolist(),
            uniform.tolist(),
            strict=True,
        )
    ]
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def _sample_row(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> int:
    if temperature == 0:
        return int(torch.argmax(row))
    # Shifted before the division: a tiny temperature must not turn a finite logit into infinity minus infinity.
    probs = torch.softmax((row.double() - row.max()) / temperature, dim=-1)
    if 0 < top_k < row.numel() or top_p < 1:
        order = torch.sort(probs, descending=True, stable=True).indices
        kept = order[: top_k if 0 < top_k < row.numel() else row.numel()]
        if top_p < 1:
            # A token stays while the tokens before it have not reached p: at least the first one stays.
            sorted_probs = probs[kept] / probs[kept].sum()
            before = sorted_probs.cumsum(0) - sorted_probs
            kept = kept[(before < top_p) | (torch.arange(kept.numel(), device=row.device) == 0)]
        mask = torch.zeros_like(probs)
        mask[kept] = 1
        probs = probs * mask
    if min_p > 0:
        probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    cumulative = probs.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1:], right=True))
    # Rounding can push u * total onto the total itself; the last id with any probability is then meant.
    return min(index, int(probs.nonzero()[-1]))


def _params(rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.full((rows,), temperature, dtype=torch.float64),
        top_k=torch.full((rows,), top_k, dtype=torch.int64),
        top_p=torch.full((rows,), top_p, dtype=torch.float64),
        min_p=torch.full((rows,), min_p, dtype=torch.float64),
        all_greedy=temperature == 0,
        any_filter=temperature > 0 and (top_k > 0 or top_p < 1),
    )


def _mixed_params(rows: int, filtered: bool) -> SamplingTensors:
    """Another temperature and min-p in each row, every third row greedy; on request top-k and top-p in every second."""
    row = torch.arange(rows)
    on = (row % 2 == 0) & filtered
    return SamplingTensors(
        temperature=torch.where(row % 3 == 0, 0.0, 0.5 + 0.2 * row.double()),
        top_k=torch.where(on, 3 + row, 0),
        top_p=torch.where(on, 0.9, 1.0).double(),
        min_p=torch.where(row % 4 == 1, 0.05, 0.0).double(),
        any_filter=filtered,
    )


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    rows, vocab = 7, 300
    settings: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.7},
        "greedy": {"temperature": 0.0},
        "top-k": {"temperature": 1.0, "top_k": 20},
        "top-p": {"temperature": 1.0, "top_p": 0.9},
        "min-p": {"temperature": 1.3, "min_p": 0.1},
        "all": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    }
    for name, values in settings.items():
        args = {
            "logits": torch.randn(rows, vocab, generator=gen) * 3,
            "params": _params(rows, **values),
            "uniform": torch.rand(rows, generator=gen, dtype=torch.float64),
        }
        yield Sample(name, args)
    few = torch.randint(0, 3, (rows, vocab), generator=gen).float()
    draws = torch.rand(rows, generator=gen, dtype=torch.float64)
    yield Sample("greedy ties", {"logits": few, "params": _params(rows, 0.0), "uniform": draws}, adversarial=True)
    yield Sample("min-p ties", {"logits": few, "params": _params(rows, 1.0, min_p=1.0), "uniform": draws}, True)
    for filtered in (False, True):
        args = {
            # More ids than a kernel holds at once, and no round number of them.
            "logits": torch.randn(rows, 1300, generator=gen) * 2,
            "params": _mixed_params(rows, filtered),
            "uniform": draws,
        }
        yield Sample(f"greedy and drawn rows, {'with' if filtered else 'no'} top-k", args, adversarial=True)
    edge = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    spread = torch.linspace(-80, 80, vocab).repeat(2, 1)
    yield Sample("edges of uniform", {"logits": spread, "params": _params(2, 1.0), "uniform": edge}, True)
    cold = {"logits": spread, "params": _params(2, 1e-6), "uniform": edge}
    yield Sample("nearly cold", cold, adversarial=True)
    ties = {"logits": torch.zeros(2, vocab), "params": _params(2, 1.0, top_k=3), "uniform": edge}
    yield Sample("ties", ties, adversarial=True)
    yield _rows_hard_to_cut(gen)
    yield _ties_far_apart()


def _rows_hard_to_cut(gen: torch.Generator) -> Sample:
    """Rows where top-k and top-p end among equals, among most of the ids, or at the largest alone.

    Warm, with a uniform number from 1/2 on: one id too many or too few moves the draw to another id.
    """
    vocab = 1300
    # As a product in bfloat16 gives them: a few hundred values, each many times.
    tied = (torch.randn(vocab, generator=gen) * 2).bfloat16().float()
    zeros = torch.where(torch.rand(vocab, generator=gen) < 0.5, 0.0, -0.0)
    allowed = torch.where(torch.arange(vocab) % 29 == 7, tied, -1e9)
    rows = (
        (tied, 20.0, 100, 1.0),
        (tied, 3.0, 0, 0.9),
        (tied, 20.0, 850, 0.63),
        (tied, 50.0, 1290, 1.0),
        (zeros, 1.0, 37, 0.57),
        (zeros.roll(1), 1.0, 37, 0.3),
        (zeros.roll(2), 1.0, 37, 0.57),
        (allowed, 20.0, 50, 0.95),
        (tied, 20.0, 0, 0.0),
        (tied.round(), 1e-6, 20, 0.45),
    )
    logits, temperature, top_k, top_p = zip(*rows, strict=True)
    params = SamplingTensors(
        temperature=torch.tensor(temperature, dtype=torch.float64),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float64),
        min_p=torch.zeros(len(rows), dtype=torch.float64),
    )
    uniform = 0.5 + 0.5 * torch.rand(len(rows), generator=gen, dtype=torch.float64)
    args = {"logits": torch.stack(logits), "params": params, "uniform": uniform}
    return Sample("rows that are hard to cut", args, adversarial=True)


def _ties_far_apart() -> Sample:
    """Top-k ends among equals that lie further apart than a kernel holds ids at once; the draws cover all that stay."""
    rows, vocab = 8, 1300
    logits = torch.zeros(rows, vocab)
    logits[:, 600:] = 0.25
    # The 700 ids of a quarter, and the first 350 of the 600 zeros.
    params = _params(rows, 1.0, top_k=1050)
    uniform = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    return Sample("ties far apart", {"logits": logits, "params": params, "uniform": uniform}, adversarial=True)


def _check_distribution(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """An even grid of uniform numbers reproduces the distribution."""
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, 0.5]])
    rows = 40
    uniform = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    ids = function(logits.expand(rows, -1), _params(rows, 0.8), uniform)
    counts = torch.bincount(ids, minlength=5).double() / rows
    assert torch.allclose(counts, torch.softmax(logits[0].double() / 0.8, dim=0), atol=1.5 / rows)


def _check_row_alone(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """A row gives the same id alone as in a batch with other settings."""
    logits = torch.randn(4, 60, generator=gen) * 2
    params = SamplingTensors(
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.5], dtype=torch.float64),
        top_k=torch.tensor([0, 5, 0, 40]),
        top_p=torch.tensor([1.0, 1.0, 0.8, 0.9], dtype=torch.float64),
        min_p=torch.tensor([0.0, 0.0, 0.1, 0.0], dtype=torch.float64),
    )
    uniform = torch.rand(4, generator=gen, dtype=torch.float64)
    batch = function(logits, params, uniform)
    for i in range(4):
        row = SamplingTensors(*(getattr(params, f)[i : i + 1] for f in ("temperature", "top_k", "top_p", "min_p")))
        assert int(function(logits[i : i + 1], row, uniform[i : i + 1])) == int(batch[i])


def _check_kept(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Even draws of a flat row give every id that top-k and top-p keep, and no other one."""
    vocab, k, kept = 24, 17, 15
    logits = torch.tensor([2.0, 1.0, 0.0, -0.0]).repeat(vocab // 4)[None] / 1024
    # Largest first, the lowest ids among equals: two values whole, then some of the zeros.
    wanted = sorted(range(vocab), key=lambda i: (-float(logits[0, i]), i))[:kept]
    uniform = (torch.arange(kept, dtype=torch.float64) + 0.5) / kept
    params = _params(kept, 1.0, top_k=k, top_p=(kept - 0.5) / k)
    assert function(logits.expand(kept, -1), params, uniform).tolist() == sorted(wanted)


def _check_any_batch(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """A row without top-k and top-p gives the same id whether the host knows of that or not."""
    logits = torch.randn(3, 1500, generator=gen) * 2
    params = _params(3, 1.2, min_p=0.01)
    uniform = torch.rand(3, generator=gen, dtype=torch.float64)
    told, untold = (function(logits, replace(params, any_filter=known), uniform) for known in (False, True))
    assert torch.equal(told, untold)


def _cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    return Cost(bytes=4 * axes["B"] * axes["V"], flops=5 * axes["B"] * axes["V"])


SAMPLE = Contract(
    op="sample",
    inputs={"logits": "B V", "params": "", "uniform": "B"},
    outputs={"ids": "B"},
    reference=sample,
    samples=_samples,
    cost=_cost,
    invariants=(
        Invariant("reproduces the distribution", _check_distribution),
        Invariant("row alone equals row in a batch", _check_row_alone),
        Invariant("what top-k and top-p keep", _check_kept),
        Invariant("rows without a filter in a batch that may have one", _check_any_batch),
    ),
)
