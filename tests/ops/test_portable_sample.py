"""The part of portable sampling that is plain torch: rows with top-k and top-p, sorted for many rows at once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernel's module needs Triton, also for the part that runs here")

from k3port.backends.portable.kernels import sample as portable
from k3port.ops.sample import SamplingTensors, sample


def random_rows(rows: int, vocab: int, seed: int, tied: bool) -> tuple[torch.Tensor, SamplingTensors, torch.Tensor]:
    """Rows whose settings are drawn at random: each filter is off in a third of them, every fifth row is greedy."""
    gen = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(rows, generator=gen, dtype=torch.float64)

    logits = torch.randn(rows, vocab, generator=gen) * 3
    params = SamplingTensors(
        temperature=torch.where(uniform() < 0.2, 0.0, 0.1 + 2 * uniform()),
        # Larger than the vocabulary now and then, which keeps all.
        top_k=torch.where(uniform() < 0.33, 0, torch.randint(1, vocab + 5, (rows,), generator=gen)),
        top_p=torch.where(uniform() < 0.33, 1.0, uniform().clamp(min=1e-9)),
        min_p=torch.where(uniform() < 0.33, 0.0, uniform() * 0.5),
    )
    return logits.round() if tied else logits, params, uniform()


@pytest.mark.parametrize("tied", [False, True], ids=["distinct", "with ties"])
@pytest.mark.parametrize("vocab", [1, 7, 400])
def test_filtered_rows_give_the_ids_of_the_reference(vocab: int, tied: bool) -> None:
    logits, params, uniform = random_rows(150, vocab, seed=vocab, tied=tied)
    ids = portable.sample(logits, params, uniform)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, sample(logits, params, uniform))
    if vocab > 1:
        assert len(ids.unique()) > 3


@pytest.mark.parametrize("limit", [1, 400 * 7, 400 * 64])
def test_rows_are_sorted_in_parts(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Parts that hold one row, that do not divide the rows, and that are larger than all of them."""
    logits, params, uniform = random_rows(20, 400, seed=5, tied=False)
    monkeypatch.setattr(portable, "SORTED_NUMBERS", limit)
    assert torch.equal(portable.sample(logits, params, uniform), sample(logits, params, uniform))


def test_an_unlikely_id_can_still_be_drawn() -> None:
    """With a uniform number of 0 the first kept id is meant, however small its probability."""
    logits = torch.linspace(-80, 80, 300).repeat(2, 1)
    ones = torch.ones(2, dtype=torch.float64)
    params = SamplingTensors(ones, torch.tensor([0, 2]), torch.tensor([1.0, 1.0]).double(), ones * 0)
    assert portable.sample(logits, params, ones * 0).tolist() == [0, 298]


def test_no_rows() -> None:
    none = torch.empty(0, dtype=torch.float64)
    params = SamplingTensors(none, none.long(), none, none)
    assert portable.sample(torch.empty(0, 10), params, none).tolist() == []
