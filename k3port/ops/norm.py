"""RMSNorm and KDA's gated output norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from k3port.ops.contract import Contract, Cost, Sample, accumulation_dtype


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axis.

    The order of the official code: statistics in float32, the normalised value rounded to the activation dtype, then
    the product with the weight rounded again.

    Args:
        x: ``[..., D]`` activations.
        weight: ``[D]``, used as it is (no "1 + w").

    Returns:
        ``[..., D]`` in the dtype of ``x``.
    """
    acc = accumulation_dtype(x)
    value = x.to(acc)
    normed = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight.to(x.dtype)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x²) + eps) * weight * sigmoid(gate)`` per head: all in float32, one rounding.

    Args:
        x: ``[T, H, V]`` output of the recurrence.
        gate: ``[T, H, V]`` gate logits.
        weight: ``[V]`` float32, shared by all heads.

    Returns:
        ``[T, H, V]`` in the dtype of ``x``.
    """
    acc = accumulation_dtype(x)
    value = x.to(acc)
    normed = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + eps) * weight.to(acc)
    return (normed * torch.sigmoid(gate.to(acc))).to(x.dtype)


def _rms_norm_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for name, shape in (("one row", (1, 96)), ("rows", (37, 256)), ("wide", (3, 7168)), ("no rows", (0, 64))):
        x = torch.randn(shape, generator=gen)
        yield Sample(name, {"x": x.to(dtype), "weight": _weight(shape[-1], gen).to(dtype), "eps": 1e-5})
    scale = torch.tensor([0.0, 1e-4, 1e-2, 1.0, 1e3]).unsqueeze(1)
    x = torch.randn(5, 256, generator=gen) * scale
    for eps in (1e-5, 1e-6):
        args = {"x": x.to(dtype), "weight": _weight(256, gen).to(dtype), "eps": eps}
        yield Sample(f"zero, tiny and large rows, eps {eps:g}", args, adversarial=True)
    strided = torch.randn(9, 130, generator=gen).to(dtype)[:, 2:98]
    yield Sample("strided rows", {"x": strided, "weight": _weight(96, gen).to(dtype), "eps": 1e-5}, adversarial=True)


def _gated_norm_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for name, shape in (("one token", (1, 2, 128)), ("tokens", (33, 3, 128)), ("no tokens", (0, 2, 128))):
        x, gate = torch.randn(shape, generator=gen), torch.randn(shape, generator=gen)
        yield Sample(name, {"x": x.to(dtype), "gate": gate.to(dtype), "weight": _weight(shape[-1], gen), "eps": 1e-5})
    x = torch.randn(4, 2, 128, generator=gen) * torch.tensor([0.0, 1e-4, 3e-3, 50.0]).view(4, 1, 1)
    gate = torch.randn(4, 2, 128, generator=gen) * 40
    args = {"x": x.to(dtype), "gate": gate.to(dtype), "weight": _weight(128, gen), "eps": 1e-5}
    yield Sample("tiny rows and saturated gates", args, adversarial=True)


def _weight(size: int, gen: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size, generator=gen)


def _rms_norm_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    return Cost(bytes=(2 * axes["T"] + 1) * axes["D"] * itemsize, flops=4 * axes["T"] * axes["D"])


def _gated_norm_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    elements = axes["T"] * axes["H"] * axes["V"]
    return Cost(bytes=3 * elements * itemsize + 4 * axes["V"], flops=8 * elements)


RMS_NORM = Contract(
    op="rms_norm",
    inputs={"x": "T D", "weight": "D", "eps": ""},
    outputs={"y": "T D"},
    reference=rms_norm,
    samples=_rms_norm_samples,
    cost=_rms_norm_cost,
)
GATED_NORM = Contract(
    op="gated_norm",
    inputs={"x": "T H V", "gate": "T H V", "weight": "V", "eps": ""},
    outputs={"y": "T H V"},
    reference=gated_norm,
    samples=_gated_norm_samples,
    cost=_gated_norm_cost,
)
