"""Routed experts on the CPU, from plain stacked weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3port.ops.activation import situ_mul
from k3port.ops.contract import accumulation_dtype
from k3port.ops.moe_weights import DenseExperts


def moe_experts_dense(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    experts: DenseExperts,
    beta: float | None,
    linear_beta: float | None,
) -> torch.Tensor:
    """See :func:`k3port.ops.moe.moe_experts`; one product per expert that has tokens."""
    acc = accumulation_dtype(x)
    num_tokens, top_k = expert_ids.shape
    if num_tokens == 1:
        chosen = [
            (e, w)
            for e, w in zip(expert_ids[0].tolist(), weights[0].tolist(), strict=True)
            if 0 <= e < experts.gate_up.shape[0]
        ]
        if not chosen:
            return torch.zeros_like(x)
        hidden = situ_mul(torch.cat([F.linear(x, experts.gate_up[e]) for e, _ in chosen]), beta, linear_beta)
        routed = torch.cat([F.linear(hidden[i : i + 1], experts.down[e]) for i, (e, _) in enumerate(chosen)])
        mixed = torch.tensor([[w for _, w in chosen]], dtype=acc) @ routed.to(acc)
        return mixed.to(x.dtype)
    # Rows in expert order: one slice per expert, then back to (token, choice) order for the weighted sum.
    flat = expert_ids.flatten()
    order = torch.argsort(flat, stable=True)
    rows = x[order // top_k]
    routed = torch.zeros(num_tokens * top_k, x.shape[1], dtype=x.dtype)
    counts = torch.bincount(flat.clamp(min=0), minlength=experts.gate_up.shape[0]).tolist()
    begin = int((flat < 0).sum())
    counts[0] -= begin
    for expert, count in enumerate(counts[: experts.gate_up.shape[0]]):
        if count:
            hidden = situ_mul(F.linear(rows[begin : begin + count], experts.gate_up[expert]), beta, linear_beta)
            routed[order[begin : begin + count]] = F.linear(hidden, experts.down[expert])
            begin += count
    routed = routed.view(num_tokens, top_k, x.shape[1]).to(acc)
    return (weights.to(acc).unsqueeze(1) @ routed).squeeze(1).to(x.dtype)
