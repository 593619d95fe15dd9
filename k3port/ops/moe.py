"""Mixture of experts: routing, and the chosen experts' gated MLPs with their weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3port.ops.activation import situ_mul
from k3port.ops.contract import FLOAT32_RESULT_TOLERANCE, Contract, Cost, Invariant, Sample, accumulation_dtype
from k3port.ops.linear import linear
from k3port.ops.moe_weights import ExpertMatrix, StoredExperts
from k3port.ops.quant import Mxfp4Tensor, quantize_mxfp4


@dataclass(frozen=True, slots=True)
class RouterParams:
    """Weights and switches of one layer's router.

    ``weight`` float32 ``[E, D]``; ``bias`` float32 ``[E]`` steers the choice only, None where the model has none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    top_k: int
    softmax: bool
    renormalize: bool
    scaling_factor: float
    num_groups: int = 1
    top_k_groups: int = 1


def moe_route(h: torch.Tensor, router: RouterParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts on the biased scores and weighs them with the unbiased ones; everything in float32.

    With several groups, only the ``top_k_groups`` groups with the largest sum of their two best biased scores stay
    in the choice. Equal scores take the lower expert number first.

    Args:
        h: ``[T, D]``.

    Returns:
        expert ids int64 ``[T, X]`` in order of falling biased score, and weights ``[T, X]``.
    """
    acc = accumulation_dtype(h)
    scores = h.to(acc) @ router.weight.to(acc).T
    scores = torch.softmax(scores, dim=-1) if router.softmax else torch.sigmoid(scores)
    biased = scores if router.bias is None else scores + router.bias.to(acc)
    if router.num_groups > router.top_k_groups:
        groups = biased.unflatten(-1, (router.num_groups, -1))
        group_score = groups.topk(2, dim=-1).values.sum(dim=-1)
        kept = top_k_lowest_first(group_score, router.top_k_groups)
        dropped = torch.ones_like(group_score, dtype=torch.bool).scatter(-1, kept, False)
        biased = groups.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = top_k_lowest_first(biased, router.top_k)
    weights = scores.gather(-1, ids)
    if router.top_k > 1 and router.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * router.scaling_factor


def top_k_lowest_first(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest along the last axis, falling; equals in id order, which ``torch.topk`` does not promise."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def moe_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: StoredExperts,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """``sum_j weight_j · w2_j(act(w1_j x, w3_j x))`` over each token's experts: float32 sum, one rounding.

    Args:
        x: ``[T, L]`` latent (or hidden) rows.
        expert_ids: int64 ``[T, X]``; ids outside this rank's experts belong to other ranks and add nothing.
        weights: float32 ``[T, X]``.
        experts: as stored, MXFP4 or plain.

    Returns:
        ``[T, L]`` in the dtype of ``x``.
    """
    acc = accumulation_dtype(x)
    total = torch.zeros(x.shape, dtype=acc, device=x.device)
    for expert in range(len(experts.gate)):
        tokens, choice = (expert_ids == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        gate_up = torch.cat([_plain(matrices[expert], x.dtype) for matrices in (experts.gate, experts.up)])
        hidden = situ_mul(linear(x[tokens], gate_up), beta, linear_beta)
        out = linear(hidden, _plain(experts.down[expert], x.dtype))
        total.index_add_(0, tokens, out.to(acc) * weights[tokens, choice].to(acc).unsqueeze(-1))
    return total.to(x.dtype)


def _plain(matrix: ExpertMatrix, dtype: torch.dtype) -> torch.Tensor:
    return matrix.dequantize(dtype) if isinstance(matrix, Mxfp4Tensor) else matrix.to(dtype)


def moe(
    h: torch.Tensor,
    x: torch.Tensor,
    router: RouterParams,
    experts: StoredExperts,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """Routing on ``h`` ``[T, D]``, experts on ``x`` ``[T, L]``; returns the weighted sum ``[T, L]``."""
    ids, weights = moe_route(h, router)
    return moe_experts(x, ids, weights, experts, beta, linear_beta)


def _router(gen: torch.Generator, num_experts: int, dim: int, **switches: Any) -> RouterParams:
    settings = {"top_k": 16, "softmax": False, "renormalize": True, "scaling_factor": 1.0, **switches}
    return RouterParams(
        weight=torch.randn(num_experts, dim, generator=gen).bfloat16().float() * dim**-0.5,
        bias=torch.randn(num_experts, generator=gen) * 0.1,
        **settings,
    )


def _route_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    cases: dict[str, tuple[int, dict[str, Any]]] = {
        "896 experts, top 16": (896, {}),
        "scaled": (896, {"scaling_factor": 2.446}),
        "no renormalisation": (64, {"renormalize": False, "top_k": 8}),
        "softmax": (64, {"softmax": True, "top_k": 8}),
        "grouped": (64, {"num_groups": 8, "top_k_groups": 3, "top_k": 8}),
        "top 1": (12, {"top_k": 1}),
        "every expert": (8, {"top_k": 8}),
    }
    for name, (num_experts, switches) in cases.items():
        for tokens in (1, 33):
            h = torch.randn(tokens, 64, generator=gen).to(dtype)
            yield Sample(f"{name}, {tokens} tokens", {"h": h, "router": _router(gen, num_experts, 64, **switches)})
    h = torch.zeros(4, 64, dtype=dtype)
    tied = RouterParams(torch.zeros(896, 64), torch.zeros(896), 16, False, True, 1.0)
    yield Sample("all scores equal", {"h": h, "router": tied}, adversarial=True)
    yield Sample("no tokens", {"h": h[:0], "router": _router(gen, 12, 64, top_k=3)})


def stored_experts(gen: torch.Generator, num_experts: int, dim: int, width: int, packed: bool) -> StoredExperts:
    """Random experts for samples: MXFP4 or bfloat16."""

    def weights(rows: int, cols: int) -> list[Any]:
        plain = [torch.randn(rows, cols, generator=gen) * cols**-0.5 for _ in range(num_experts)]
        return [quantize_mxfp4(w) if packed else w.bfloat16() for w in plain]

    return StoredExperts(gate=weights(width, dim), up=weights(width, dim), down=weights(dim, width))


def _experts_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    num_experts, dim, width, top_k = 6, 64, 96, 3
    for packed in (True, False):
        experts = stored_experts(gen, num_experts, dim, width, packed)
        kind = "MXFP4" if packed else "bfloat16"

        def sample(
            name: str, ids: torch.Tensor, adversarial: bool = False, kind: str = kind, experts: Any = experts
        ) -> Sample:
            args = {
                "x": torch.randn(ids.shape[0], dim, generator=gen).to(dtype),
                "expert_ids": ids,
                "weights": torch.rand(ids.shape, generator=gen),
                "experts": experts,
                "beta": 4.0,
                "linear_beta": 25.0,
            }
            return Sample(f"{kind}, {name}", args, adversarial)

        for tokens in (1, 2, 33):
            ids = torch.stack([torch.randperm(num_experts, generator=gen)[:top_k] for _ in range(tokens)])
            yield sample(f"{tokens} tokens", ids)
        yield sample("all tokens to one expert", torch.full((17, 1), 4), adversarial=True)
        yield sample("most experts idle", torch.tensor([[0, 5], [5, 0]]), adversarial=True)
        yield sample("experts of other ranks", torch.tensor([[-1, 2, 6], [9, -3, 7], [5, 0, 6]]), adversarial=True)
        yield sample("one token, experts of other ranks", torch.tensor([[6, 1, -1]]), adversarial=True)
        yield sample("one token, no expert here", torch.tensor([[6, -2, 99]]), adversarial=True)
        yield sample("no tokens", torch.zeros(0, top_k, dtype=torch.int64))


def _block_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    experts = stored_experts(gen, 12, 64, 96, packed=True)
    for tokens, beta in ((1, 4.0), (17, 4.0), (17, None)):
        # Scores far enough apart that rounding does not flip a choice.
        router = _router(gen, 12, 96, top_k=3)
        args = {
            "h": torch.randn(tokens, 96, generator=gen).to(dtype),
            "x": torch.randn(tokens, 64, generator=gen).to(dtype),
            "router": router,
            "experts": experts,
            "beta": beta,
            "linear_beta": 25.0,
        }
        yield Sample(f"{tokens} tokens, beta {beta}", args)


def _check_tie_order(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Equal scores take the lowest expert numbers, in order, and share the weight."""
    router = RouterParams(torch.zeros(896, 8), torch.zeros(896), 16, False, True, 1.0)
    ids, weights = function(torch.randn(3, 8, generator=gen).to(dtype), router)
    assert ids.tolist() == [list(range(16))] * 3
    assert torch.allclose(weights.double(), torch.tensor(1 / 16).double(), atol=1e-7)


def _check_weights_unbiased(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """The correction bias moves the choice, never the weights."""
    router = RouterParams(
        torch.eye(4), torch.tensor([0.3, 0.0, -0.5, 0.0]), top_k=2, softmax=False, renormalize=True, scaling_factor=1.0
    )
    ids, weights = function(torch.tensor([[0.2, -0.1, 1.0, 0.9]]).to(dtype), router)
    assert sorted(ids[0].tolist()) == [0, 3]
    expected = torch.sigmoid(torch.tensor([0.2, 0.9]).to(dtype).double())
    by_expert = weights[0].double()[torch.argsort(ids[0])]
    assert torch.allclose(by_expert, expected / expected.sum(), atol=1e-6)


def _route_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    t, d, e, x = axes["T"], axes["D"], axes["E"], axes["X"]
    return Cost(bytes=t * d * itemsize + 4 * e * (d + 1) + 12 * t * x, flops=2 * t * d * e)


def _experts_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    """MXFP4 weights: 4.25 bits each; only experts that some token chose are read."""
    t, x, width, dim = axes["T"], axes["X"], axes["I"], axes["L"]
    active = min(axes["E"], t * x)
    weight_bytes = active * 3 * width * dim * 17 // 32
    return Cost(bytes=weight_bytes + 2 * t * dim * itemsize + 12 * t * x, flops=6 * t * x * width * dim)


def _block_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    route, experts = _route_cost(axes, itemsize), _experts_cost(axes, itemsize)
    return Cost(bytes=route.bytes + experts.bytes, flops=route.flops + experts.flops)


_EXPERT_TOLERANCE = {torch.float64: 2e-14, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

MOE_ROUTE = Contract(
    op="moe_route",
    inputs={"h": "T D", "router": ""},
    outputs={"expert_ids": "T X", "weights": "T X"},
    reference=moe_route,
    samples=_route_samples,
    cost=_route_cost,
    tolerance=FLOAT32_RESULT_TOLERANCE,
    invariants=(
        Invariant("ties take the lowest id", _check_tie_order),
        Invariant("weights are unbiased", _check_weights_unbiased),
    ),
)
MOE_EXPERTS = Contract(
    op="moe_experts",
    inputs={"x": "T L", "expert_ids": "T X", "weights": "T X", "experts": "", "beta": "", "linear_beta": ""},
    outputs={"y": "T L"},
    packed=("experts",),
    reference=moe_experts,
    samples=_experts_samples,
    cost=_experts_cost,
    tolerance=_EXPERT_TOLERANCE,
)
MOE = Contract(
    op="moe",
    inputs={"h": "T D", "x": "T L", "router": "", "experts": "", "beta": "", "linear_beta": ""},
    outputs={"y": "T L"},
    packed=("experts",),
    reference=moe,
    samples=_block_samples,
    cost=_block_cost,
    tolerance=_EXPERT_TOLERANCE,
)
