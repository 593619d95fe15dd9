"""Prints, as JSON, in how many rows the interpreted kernel of portable sampling gives another id than the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from unittest import mock

import torch

from k3port.backends.portable.kernels import sample as portable
from k3port.backends.portable.kernels.sample_cut import find_cuts
from k3port.backends.portable.launch import force_config
from k3port.ops.sample import SamplingTensors, sample
from k3port.testing.harness import poisoned_memory

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


def wrong_cuts(vocab: int, seed: int, shape: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Rows in which another logit is cut at, or another number of its equals is kept, than a sort by size says.

    A draw seldom tells: it is one id of many. Small sizes make many spans, and count most rows twice.
    """
    gen = torch.Generator().manual_seed(seed)
    rows = 6
    logits = shape(torch.randn(rows, vocab, generator=gen))
    top_k = torch.randint(1, vocab, (rows,), generator=gen)
    ones = torch.ones(rows, dtype=torch.float64)
    sizes = {"SPAN": 64, "BLOCK": 64, "PIVOTS": 8, "TALLY": 32, "MANY": 8, "CUT": 64, "cut_warps": 4, "num_warps": 4}
    with force_config("sample", sizes), mock.patch.object(portable, "find_cuts", wraps=find_cuts) as spy:
        cuts: list[tuple[torch.Tensor, torch.Tensor]] = []
        spy.side_effect = lambda *args: cuts.append(find_cuts(*args)) or cuts[0]
        portable.sample(logits, SamplingTensors(20 * ones, top_k, ones, 0 * ones), 0.7 * ones)
    ((cut, ties),) = cuts
    least = logits.sort(descending=True).values.gather(1, top_k[:, None] - 1)
    kept = top_k - (logits > least).sum(dim=1)
    return int(((cut != least[:, 0]) | (ties != kept)).sum())


def main() -> None:
    found: dict[str, int] = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        found[f"cuts, {name}"] = wrong_cuts(400, seed, shape)
    # Settings that are every second number of a longer tensor.
    logits, params, uniform = random_rows(12, 300, 5, SHAPES["distinct"])
    every = [
        torch.stack((x, x + 1), dim=1)[:, 0] for x in (params.temperature, params.top_k, params.top_p, params.min_p)
    ]
    apart = torch.stack((uniform, uniform), dim=1)[:, 0]
    found["settings apart"] = wrong((logits, SamplingTensors(*every), apart))
    for seed, (name, shape) in enumerate(SHAPES.items()):
        for vocab, count in ((1, 2), (7, 8), (400, 8)):
            found[f"{name}, {vocab}"] = wrong(random_rows(count, vocab, seed, shape))
    # Parts that hold one row, and that do not divide the rows.
    for step in (1, 7):
        with mock.patch.object(portable, "rows_at_once", lambda vocab, step=step: step):
            found[f"in parts of {step}"] = wrong(random_rows(15, 50, 77, SHAPES["distinct"]))
    # With a uniform number of 0 the first kept id is meant, however small its probability.
    ones = torch.ones(2, dtype=torch.float64)
    params = SamplingTensors(ones, torch.tensor([0, 2]), ones, ones * 0)
    ids = portable.sample(torch.linspace(-80, 80, 300).repeat(2, 1), params, ones * 0)
    found["unlikely ids"] = int((ids != torch.tensor([0, 298])).sum())
    # Infinite logits are nobody's right, but must not be written beside the row's candidates.
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(8))
    logits[2, ::3] = float("-inf")
    ones = torch.ones(3, dtype=torch.float64)
    with poisoned_memory() as guards:
        portable.sample(logits, SamplingTensors(ones, torch.full((3,), 290), ones, ones * 0), ones / 2)
    found["outside its memory, minus infinity"] = len(guards.faults())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
