"""What the engine tells a sampling kernel of its rows, so that the kernel need not read them back from a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from k3port.ops.sample import SamplingTensors, sample
from k3port.runtime.request import SamplingParams
from k3port.runtime.runtime import Runtime


@pytest.mark.parametrize(
    ("settings", "all_greedy", "any_filter"),
    [
        ([{"temperature": 0}, {"temperature": 0}], True, False),
        ([{"temperature": 0, "top_k": 5}, {"temperature": 0, "top_p": 0.5}], True, False),
        ([{"temperature": 0}, {"temperature": 0.8, "min_p": 0.1}], False, False),
        ([{"temperature": 0}, {"temperature": 0.8, "top_k": 5}], False, True),
        ([{"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.5}], False, True),
    ],
    ids=["greedy", "greedy rows have no filter", "temperature and min-p", "top-k", "top-p"],
)
def test_hints_fit_the_rows(
    tiny_k3_folder: Path, settings: list[dict[str, float]], all_greedy: bool, any_filter: bool
) -> None:
    seen: list[SamplingTensors] = []

    def watched(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
        seen.append(params)
        return sample(logits, params, uniform)

    runtime = Runtime.load(tiny_k3_folder, kv_tokens=256, overrides={"sample": watched})
    params = [SamplingParams(max_tokens=2, seed=1, ignore_eos=True, **s) for s in settings]  # type: ignore[arg-type]
    runtime.generate([[1, 2], [3, 4]], params)
    assert len(seen) == 2
    assert {(p.all_greedy, p.any_filter) for p in seen} == {(all_greedy, any_filter)}
