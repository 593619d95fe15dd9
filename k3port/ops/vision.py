"""The first op of the vision tower: each image patch becomes one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from k3port.ops.contract import Contract, Cost, Sample, accumulation_dtype


def vision_patch(pixels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A convolution whose stride equals its kernel, which is one product per patch; float32 sums, rounded once.

    Args:
        pixels: ``[T, C, R, W]`` patches, already cut: channels, rows, columns.
        weight: ``[D, C, R, W]``.
        bias: ``[D]``, None where the tower has none.

    Returns:
        ``[T, D]`` in the dtype of ``pixels``.
    """
    acc = accumulation_dtype(pixels)
    out = pixels.flatten(1).to(acc) @ weight.flatten(1).to(acc).T
    return (out if bias is None else out + bias.to(acc)).to(pixels.dtype)


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for patches, side, with_bias in ((1, 14, False), (9, 14, True), (0, 14, False), (5, 6, True)):
        fan_in = 3 * side * side
        args = {
            "pixels": torch.randn(patches, 3, side, side, generator=gen).to(dtype),
            "weight": (torch.randn(48, 3, side, side, generator=gen) * fan_in**-0.5).to(dtype),
            "bias": torch.randn(48, generator=gen).to(dtype) if with_bias else None,
        }
        yield Sample(f"{patches} patches of {side}x{side}, {'with' if with_bias else 'no'} bias", args)
    weight = (torch.randn(48, 3, 14, 14, generator=gen) * 588**-0.5).to(dtype)
    for name, value in (("white", 1.0), ("black", -1.0), ("far too bright", 3e4)):
        pixels = torch.full((2, 3, 14, 14), value).to(dtype)
        yield Sample(f"a {name} image", {"pixels": pixels, "weight": weight, "bias": None}, adversarial=True)


def _cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    t, d, fan_in = axes["T"], axes["D"], axes["C"] * axes["R"] * axes["W"]
    return Cost(bytes=(t * fan_in + d * fan_in + t * d) * itemsize, flops=2 * t * d * fan_in)


VISION_PATCH = Contract(
    op="vision_patch",
    inputs={"pixels": "T C R W", "weight": "D C R W", "bias": "D"},
    outputs={"y": "T D"},
    reference=vision_patch,
    samples=_samples,
    cost=_cost,
)
