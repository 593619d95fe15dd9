"""The gated activations: SiTU (Kimi K3) and SwiGLU (Kimi-Linear)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from k3port.ops.contract import Contract, Cost, Sample, accumulation_dtype


def situ_mul(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    """SiTU: ``[β tanh(a/β) sigmoid(a)] · [λ tanh(b/λ)]``; the sigmoid sees the uncapped gate.

    Args:
        gate_up: ``[T, 2I]``: the gate branch ``a`` in the first half of the columns, the linear branch ``b`` after.
        beta: cap β of the gate; None selects SwiGLU, ``silu(a) · b``.
        linear_beta: cap λ of the linear branch; None leaves it uncapped.

    Returns:
        ``[T, I]`` in the dtype of ``gate_up``, rounded once.
    """
    acc = accumulation_dtype(gate_up)
    a, b = gate_up.to(acc).chunk(2, dim=-1)
    if beta is None:
        return (a * torch.sigmoid(a) * b).to(gate_up.dtype)
    capped = beta * torch.tanh(a / beta) * torch.sigmoid(a)
    linear = b if linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
    return (capped * linear).to(gate_up.dtype)


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for name, shape in (("one row", (1, 64)), ("rows", (19, 320)), ("no rows", (0, 64))):
        x = torch.randn(shape, generator=gen) * 2
        yield Sample(name, {"gate_up": x.to(dtype), "beta": 4.0, "linear_beta": 25.0})
    grid = torch.tensor([-1e4, -100, -25, -4, -1, -1e-3, 0, 1e-3, 1, 4, 25, 100, 1e4])
    a, b = torch.meshgrid(grid, grid, indexing="ij")
    far = torch.cat((a, b), dim=1).to(dtype)
    for beta, linear_beta in ((4.0, 25.0), (4.0, None), (1.0, 25.0), (None, None)):
        args = {"gate_up": far, "beta": beta, "linear_beta": linear_beta}
        yield Sample(f"far beyond the caps, beta {beta}, linear beta {linear_beta}", args, adversarial=True)


def _cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    elements = axes["T"] * axes["I"]
    return Cost(bytes=3 * elements * itemsize, flops=10 * elements)


SITU_MUL = Contract(
    op="situ_mul",
    inputs={"gate_up": "T 2I", "beta": "", "linear_beta": ""},
    outputs={"y": "T I"},
    reference=situ_mul,
    samples=_samples,
    cost=_cost,
)
