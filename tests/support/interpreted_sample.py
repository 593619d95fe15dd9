"""Prints, as JSON, in how many rows the interpreted kernel of portable sampling gives another id than the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from unittest import mock

import torch

from k3port.backends.portable.kernels import sample as portable
from k3port.ops.sample import SamplingTensors, sample

Rows = tuple[torch.Tensor, SamplingTensors, torch.Tensor]


def random_rows(rows: int, vocab: int, seed: int, shape: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    """Rows whose settings are drawn at random: each filter is off in a third of them, every fifth row is greedy."""
    gen = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(rows, generator=gen, dtype=torch.float64)

    logits = shape(torch.randn(rows, vocab, generator=gen))
    params = SamplingTensors(
        temperature=torch.where(uniform() < 0.2, 0.0, 0.1 + 4 * uniform()),
        # Larger than the vocabulary now and then, which keeps all.
        top_k=torch.where(uniform() < 0.33, 0, torch.randint(1, vocab + 5, (rows,), generator=gen)),
        top_p=torch.where(uniform() < 0.33, 1.0, uniform().clamp(min=1e-9)),
        min_p=torch.where(uniform() < 0.33, 0.0, uniform() * 0.5),
    )
    return logits, params, uniform()


def wrong(rows: Rows) -> int:
    ids = portable.sample(*rows)
    assert ids.dtype == torch.int64
    return int((ids != sample(*rows)).sum())


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "distinct": lambda x: 3 * x,
    "rounded to bfloat16": lambda x: (2 * x).bfloat16().float(),
    "few values": torch.round,
    "nearly equal": lambda x: 1 + x * 1e-6,
    "suppressed": lambda x: torch.where(x < 1, -3e38, x),
    "one outstanding": lambda x: torch.where(torch.arange(x.shape[1]) == 5, 30.0, x),
}


def main() -> None:
    found: dict[str, int] = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        for vocab, count in ((1, 4), (7, 12), (400, 20), (2310, 6)):
            found[f"{name}, {vocab}"] = wrong(random_rows(count, vocab, seed, shape))
    # Parts that hold one row, and that do not divide the rows.
    for step in (1, 7):
        with mock.patch.object(portable, "rows_at_once", lambda vocab, step=step: step):
            found[f"in parts of {step}"] = wrong(random_rows(20, 50, 77, SHAPES["distinct"]))
    # With a uniform number of 0 the first kept id is meant, however small its probability.
    ones = torch.ones(2, dtype=torch.float64)
    params = SamplingTensors(ones, torch.tensor([0, 2]), ones, ones * 0)
    ids = portable.sample(torch.linspace(-80, 80, 300).repeat(2, 1), params, ones * 0)
    found["unlikely ids"] = int((ids != torch.tensor([0, 298])).sum())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
