"""Dense projections: embedding, linear, logits and the gated MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from k3port.ops.activation import situ_mul
from k3port.ops.contract import Contract, Cost, Sample, accumulation_dtype


def embed(token_ids: torch.Tensor, weight: torch.Tensor, first_id: int) -> torch.Tensor:
    """Rows of this rank's vocabulary shard; ids outside it give zeros, so that ranks can be summed.

    Args:
        token_ids: int64 ``[T]``.
        weight: ``[V, D]`` rows of the ids from ``first_id`` on.

    Returns:
        ``[T, D]`` in the dtype of ``weight``.
    """
    local = token_ids - first_id
    inside = (local >= 0) & (local < weight.shape[0])
    return weight[local.clamp(0, weight.shape[0] - 1)] * inside.unsqueeze(-1).to(weight.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x Wᵀ`` summed in float32 and rounded once.

    Args:
        x: ``[T, D]``.
        weight: ``[O, D]``.

    Returns:
        ``[T, O]`` in the dtype of ``x``.
    """
    acc = accumulation_dtype(x)
    return (x.to(acc) @ weight.to(acc).T).to(x.dtype)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scores of this rank's vocabulary shard, rounded to the activation dtype and given as float32.

    Args:
        x: ``[T, D]`` rows that need scores.
        weight: ``[V, D]``.

    Returns:
        ``[T, V]`` float32 (float64 for float64 inputs).
    """
    return linear(x, weight).to(accumulation_dtype(x))


def dense_mlp(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, beta: float | None, linear_beta: float | None
) -> torch.Tensor:
    """``down(act(gate(x), up(x)))`` with SiTU, or SwiGLU where ``beta`` is None.

    Args:
        x: ``[T, D]``.
        gate_up: ``[2I, D]``, gate rows first.
        down: ``[D, I]``.
    """
    return linear(situ_mul(linear(x, gate_up), beta, linear_beta), down)


def _weight(gen: torch.Generator, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, cols, generator=gen) * cols**-0.5).to(dtype)


def _linear_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for tokens, cols, rows in ((1, 96, 64), (33, 96, 640), (5, 512, 16), (0, 96, 64)):
        x = torch.randn(tokens, cols, generator=gen).to(dtype)
        yield Sample(f"{tokens} x {cols} -> {rows}", {"x": x, "weight": _weight(gen, rows, cols, dtype)})
    strided = torch.randn(7, 200, generator=gen).to(dtype)[:, 40:136]
    yield Sample("strided rows", {"x": strided, "weight": _weight(gen, 32, 96, dtype)}, adversarial=True)


def _embed_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    weight = torch.randn(32, 16, generator=gen).to(dtype)
    for first, ids in ((0, [0, 31, 5, 5]), (64, [64, 95, 63, 96, 0]), (0, [])):
        args = {"token_ids": torch.tensor(ids, dtype=torch.int64), "weight": weight, "first_id": first}
        yield Sample(f"shard from {first}, ids {ids}", args, adversarial=first > 0)


def _mlp_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for tokens, beta, linear_beta in ((1, 4.0, 25.0), (19, 4.0, 25.0), (19, None, None), (0, 4.0, 25.0)):
        args = {
            "x": torch.randn(tokens, 96, generator=gen).to(dtype) * 3,
            "gate_up": _weight(gen, 320, 96, dtype),
            "down": _weight(gen, 96, 160, dtype),
            "beta": beta,
            "linear_beta": linear_beta,
        }
        yield Sample(f"{tokens} tokens, beta {beta}", args)


def _embed_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    return Cost(bytes=2 * axes["T"] * axes["D"] * itemsize + 8 * axes["T"], flops=0)


def _linear_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    t, d, o = axes["T"], axes["D"], axes["O"]
    return Cost(bytes=(t * d + o * d + t * o) * itemsize, flops=2 * t * d * o)


def _logits_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    t, d, v = axes["T"], axes["D"], axes["V"]
    return Cost(bytes=(t * d + v * d) * itemsize + 4 * t * v, flops=2 * t * d * v)


def _mlp_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    t, d, i = axes["T"], axes["D"], axes["I"]
    return Cost(bytes=(2 * t * d + 3 * d * i) * itemsize, flops=6 * t * d * i + 10 * t * i)


EMBED = Contract(
    op="embed",
    inputs={"token_ids": "T", "weight": "V D", "first_id": ""},
    outputs={"x": "T D"},
    reference=embed,
    samples=_embed_samples,
    cost=_embed_cost,
)
LINEAR = Contract(
    op="linear",
    inputs={"x": "T D", "weight": "O D"},
    outputs={"y": "T O"},
    reference=linear,
    samples=_linear_samples,
    cost=_linear_cost,
)
LOGITS = Contract(
    op="logits",
    inputs={"x": "T D", "weight": "V D"},
    outputs={"logits": "T V"},
    reference=logits,
    samples=_linear_samples,
    cost=_logits_cost,
)
DENSE_MLP = Contract(
    op="dense_mlp",
    inputs={"x": "T D", "gate_up": "2I D", "down": "D I", "beta": "", "linear_beta": ""},
    outputs={"y": "T D"},
    reference=dense_mlp,
    samples=_mlp_samples,
    cost=_mlp_cost,
    tolerance={torch.float64: 2e-14, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3},
)
