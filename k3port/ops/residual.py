"""The residual stream between two sublayers: pending add, block write, Attention Residuals mixture, RMSNorm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from k3port.ops.contract import (
    DEFAULT_TOLERANCE,
    Contract,
    Cost,
    Invariant,
    Sample,
    accumulation_dtype,
    relative_rms,
)
from k3port.ops.norm import rms_norm


def attn_res(
    partial: torch.Tensor,
    pending: torch.Tensor | None,
    blocks: torch.Tensor,
    num_blocks: int,
    write_block: bool,
    res_norm: torch.Tensor | None,
    res_proj: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Everything between two sublayers, in this order:

    1. ``p = partial + pending``, rounded to the activation dtype.
    2. ``p`` is stored once: in ``blocks[num_blocks]`` where a block ends here, else in ``partial``.
    3. ``x = sum_j softmax_j(v_j · (res_norm res_proj) / rms(v_j)) v_j`` over the finished blocks and, last, ``p``. The
       scores see normalised sources, the sum takes the raw ones; float32 between the casts, ``x`` is rounded once.
       There is no 1/sqrt(D), no temperature, and no information crosses tokens.
    4. :func:`k3port.ops.norm.rms_norm` of ``x``.

    Without finished blocks ``x`` is ``p`` itself, exactly (a softmax over one score is 1), so the same op serves models
    with an ordinary residual stream: add and norm.

    Args:
        partial: ``[T, D]`` running sum of the current block. Updated in place where there is a pending output and
            no block is written; a written block leaves it as it was.
        pending: ``[T, D]`` output of the previous sublayer, not added yet; None: ``partial`` is complete.
        blocks: ``[R, T, D]`` bank of R slots, R may be 0. Slots from ``num_blocks`` on are not read.
        num_blocks: finished blocks, the first slots of the bank.
        write_block: whether ``p`` is the next finished block. This call's mixture still has it as the running sum.
        res_norm: ``[D]`` weight of the sources' norm; may be None where ``num_blocks`` is 0.
        res_proj: ``[D]`` projection to one score; may be None where ``num_blocks`` is 0.
        norm_weight: ``[D]`` weight of the RMSNorm that follows; None: the mixture itself is wanted.
        eps: of both norms.

    Returns:
        ``[T, D]`` in the dtype of ``partial``. Without blocks and norm it may be the stored sum itself.
    """
    total = partial if pending is None else partial + pending
    if write_block:
        blocks[num_blocks] = total
    elif pending is not None:
        partial.copy_(total)
    mixture = total
    if num_blocks:
        assert res_norm is not None
        assert res_proj is not None
        acc = accumulation_dtype(partial)
        sources = torch.cat((blocks[:num_blocks], total.unsqueeze(0))).to(acc)
        inv_rms = torch.rsqrt(sources.square().mean(dim=-1) + eps)
        scores = (sources @ (res_norm.to(acc) * res_proj.to(acc))) * inv_rms
        weights = torch.softmax(scores, dim=0)
        mixture = (weights.unsqueeze(-1) * sources).sum(dim=0).to(partial.dtype)
    return mixture if norm_weight is None else rms_norm(mixture, norm_weight, eps)


def _grid(shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """Normal numbers as eighths up to 8: the sum of two is exact in bfloat16, so its rounding hides no error."""
    return (torch.randn(shape, generator=gen) * 8).round().clamp(-63, 63) / 8


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    def sample(
        name: str,
        blocks: torch.Tensor,
        partial: torch.Tensor,
        pending: torch.Tensor | None = None,
        write_block: bool = False,
        unused: int = 0,
        norm: bool = True,
        adversarial: bool = False,
    ) -> Sample:
        dim, num_blocks = partial.shape[-1], blocks.shape[0]
        # What lies in slots that are not finished blocks must not be read.
        rest = torch.full((unused + write_block, *partial.shape), torch.nan)
        res_norm, norm_weight = (1 + 0.2 * torch.randn(dim, generator=gen) for _ in range(2))
        res_proj = torch.randn(dim, generator=gen)
        args = {
            "partial": partial.to(dtype),
            "pending": None if pending is None else pending.to(dtype),
            "blocks": torch.cat((blocks, rest)).to(dtype),
            "num_blocks": num_blocks,
            "write_block": write_block,
            "res_norm": res_norm.to(dtype) if num_blocks else None,
            "res_proj": res_proj.to(dtype) if num_blocks else None,
            "norm_weight": norm_weight.to(dtype) if norm else None,
            "eps": 1e-5,
        }
        return Sample(name, args, adversarial)

    for num_blocks in range(10):
        blocks = torch.randn(num_blocks, 5, 96, generator=gen)
        yield sample(f"{num_blocks} blocks", blocks, torch.randn(5, 96, generator=gen))
        pending, write = _grid((5, 96), gen), num_blocks % 2 == 1
        name = f"{num_blocks} blocks, pending output{', block write' if write else ''}"
        yield sample(name, blocks, _grid((5, 96), gen), pending, write)
    none, partial = torch.zeros(0, 3, 96), torch.randn(3, 96, generator=gen)
    yield sample("first layer", none, partial, None, True)
    yield sample("no blocks, pending output, block write", none, _grid((3, 96), gen), _grid((3, 96), gen), True, 2)
    blocks = torch.randn(4, 3, 96, generator=gen)
    yield sample("block write without a pending output", blocks, partial, None, True)
    yield sample("the mixture itself", blocks, _grid((3, 96), gen), _grid((3, 96), gen), norm=False)
    yield sample("the sum itself", none, _grid((3, 96), gen), _grid((3, 96), gen), norm=False)
    narrow = torch.randn(3, 9, 24, generator=gen)
    yield sample("narrow", narrow, _grid((9, 24), gen), _grid((9, 24), gen))
    wide = torch.randn(8, 2, 7168, generator=gen)
    yield sample("wide", wide, _grid((2, 7168), gen), _grid((2, 7168), gen))
    same = torch.randn(1, 4, 96, generator=gen)
    yield sample("equal sources", same.expand(3, 4, 96), same[0], adversarial=True)
    loud = torch.randn(3, 4, 96, generator=gen) * torch.tensor([1e-4, 1.0, 300.0]).view(3, 1, 1)
    yield sample("tiny and loud sources", loud, torch.zeros(4, 96), adversarial=True)
    yield sample("all zero", torch.zeros(2, 3, 96), torch.zeros(3, 96), torch.zeros(3, 96), adversarial=True)
    sums = _grid((6, 96), gen)
    bank = torch.randn(4, 6, 96, generator=gen)
    yield sample("bank with unused slots", bank, sums, _grid((6, 96), gen), unused=5, adversarial=True)
    yield sample("block write before unused slots", bank, sums, _grid((6, 96), gen), True, 4, adversarial=True)
    yield sample("pending output cancels the sum", bank, sums, -sums, adversarial=True)
    yield sample("no tokens", torch.zeros(2, 0, 96), torch.zeros(0, 96), torch.zeros(0, 96), True)


def _random_call(dtype: torch.dtype, gen: torch.Generator) -> dict[str, Any]:
    """Two finished blocks of three slots, a sum that must be rounded, and scores that are sensitive to it."""
    partial, pending, res_proj = (torch.randn(shape, generator=gen).to(dtype) for shape in ((7, 64), (7, 64), (64,)))
    ones = torch.ones(64, dtype=dtype)
    blocks = torch.randn(3, 7, 64, generator=gen).to(dtype)
    return {
        "partial": partial,
        "pending": pending,
        "blocks": blocks,
        "num_blocks": 2,
        "write_block": False,
        "res_norm": ones,
        "res_proj": 4 * res_proj,
        "norm_weight": ones,
        "eps": 1e-5,
    }


def _check_rounded_sum(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """The stored sum is the rounded one, in the slot as in place, and it is what the mixture sees."""
    args = _random_call(dtype, gen)
    total = args["partial"] + args["pending"]
    expected = function(**{**args, "partial": total.clone(), "pending": None, "blocks": args["blocks"].clone()})
    for write in (False, True):
        partial, blocks = args["partial"].clone(), args["blocks"].clone()
        y = function(**{**args, "partial": partial, "blocks": blocks, "write_block": write})
        assert torch.equal(blocks[2] if write else partial, total), "the sum is rounded once, like a plain addition"
        assert torch.equal(partial if write else blocks[2], args["partial"] if write else args["blocks"][2])
        # Without the rounding, scores move by percents in bfloat16. A mixture may still round to its neighbour.
        assert relative_rms(y, expected) < (1e-6 if dtype == torch.float32 else 5e-4)


def _check_plain_stream(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Without finished blocks the mixture is the sum, bit for bit, however large its numbers are."""
    args = _random_call(dtype, gen)
    args |= {"num_blocks": 0, "res_norm": None, "res_proj": None, "norm_weight": None}
    args["partial"][0] *= 1e25  # its square overflows
    total = args["partial"] + args["pending"]
    assert torch.equal(function(**args), total)
    assert torch.equal(args["partial"], total)


def _cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    """R blocks and the sum are read, the result is written; with a pending output (``pending``, else 1), it is read and
    the sum written too."""
    rows = axes["T"] * axes["D"]
    sources, pending = axes["R"] + 1, axes.get("pending", 1)
    moved = (sources + 1 + 2 * pending) * rows + (3 if axes["R"] else 1) * axes["D"]
    return Cost(bytes=moved * itemsize, flops=(6 * sources + 4 + pending) * rows)


ATTN_RES = Contract(
    op="attn_res",
    inputs={
        "partial": "T D",
        "pending": "T D",
        "blocks": "R T D",
        "num_blocks": "",
        "write_block": "",
        "res_norm": "D",
        "res_proj": "D",
        "norm_weight": "D",
        "eps": "",
    },
    outputs={"y": "T D"},
    mutates=("partial", "blocks"),
    reference=attn_res,
    samples=_samples,
    cost=_cost,
    # A softmax over scores of up to hundreds passes their rounding on.
    tolerance={**DEFAULT_TOLERANCE, torch.float32: 2e-6},
    invariants=(
        Invariant("the rounded sum is stored and mixed", _check_rounded_sum),
        Invariant("no blocks: a plain residual stream", _check_plain_stream),
    ),
)
