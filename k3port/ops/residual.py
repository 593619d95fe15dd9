"""Attention Residuals: a softmax mixture over the finished blocks of the depth and the running sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from k3port.ops.contract import DEFAULT_TOLERANCE, Contract, Cost, Sample, accumulation_dtype


def attn_res(
    blocks: torch.Tensor, partial: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor, eps: float
) -> torch.Tensor:
    """``sum_j softmax_j(v_j · (gamma w) / rms(v_j)) v_j`` over the blocks and, last, the running sum.

    The scores see the normalised sources, the sum takes the raw ones. Everything between the casts is float32; the
    mixture is rounded once. There is no 1/sqrt(D), no temperature, and no information crosses tokens.

    Args:
        blocks: ``[R, T, D]`` finished blocks, R may be 0.
        partial: ``[T, D]`` running sum of the current block.
        gamma: ``[D]`` weight of the source norm.
        w: ``[D]`` projection to one score.

    Returns:
        ``[T, D]`` in the dtype of ``partial``.
    """
    acc = accumulation_dtype(partial)
    sources = torch.cat((blocks, partial.unsqueeze(0))).to(acc)
    inv_rms = torch.rsqrt(sources.square().mean(dim=-1) + eps)
    scores = (sources @ (gamma.to(acc) * w.to(acc))) * inv_rms
    weights = torch.softmax(scores, dim=0)
    return (weights.unsqueeze(-1) * sources).sum(dim=0).to(partial.dtype)


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    def sample(name: str, blocks: torch.Tensor, partial: torch.Tensor, adversarial: bool = False) -> Sample:
        dim = partial.shape[-1]
        args = {
            "blocks": blocks.to(dtype),
            "partial": partial.to(dtype),
            "gamma": (1 + 0.2 * torch.randn(dim, generator=gen)).to(dtype),
            "w": torch.randn(dim, generator=gen).to(dtype),
            "eps": 1e-5,
        }
        return Sample(name, args, adversarial)

    for num_blocks in range(10):
        blocks = torch.randn(num_blocks, 5, 96, generator=gen)
        yield sample(f"{num_blocks} blocks", blocks, torch.randn(5, 96, generator=gen))
    same = torch.randn(1, 4, 96, generator=gen)
    yield sample("equal sources", same.expand(3, 4, 96), same[0], adversarial=True)
    loud = torch.randn(3, 4, 96, generator=gen) * torch.tensor([1e-4, 1.0, 300.0]).view(3, 1, 1)
    yield sample("tiny and loud sources", loud, torch.zeros(4, 96), adversarial=True)
    yield sample("all zero", torch.zeros(2, 3, 96), torch.zeros(3, 96), adversarial=True)
    bank = torch.randn(9, 6, 96, generator=gen)
    yield sample("bank with unused slots", bank[:4], bank[8], adversarial=True)
    yield sample("no tokens", torch.zeros(2, 0, 96), torch.zeros(0, 96))


def _cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    sources = (axes["R"] + 1) * axes["T"] * axes["D"]
    return Cost(bytes=(sources + axes["T"] * axes["D"] + 2 * axes["D"]) * itemsize, flops=6 * sources)


ATTN_RES = Contract(
    op="attn_res",
    inputs={"blocks": "R T D", "partial": "T D", "gamma": "D", "w": "D", "eps": ""},
    outputs={"y": "T D"},
    reference=attn_res,
    samples=_samples,
    cost=_cost,
    # A softmax over scores of up to hundreds passes their rounding on.
    tolerance={**DEFAULT_TOLERANCE, torch.float32: 2e-6},
)
