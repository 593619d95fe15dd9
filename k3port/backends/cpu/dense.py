"""Projections, norms and residual mixtures through torch's own CPU kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3port.ops.contract import accumulation_dtype


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See :func:`k3port.ops.linear.logits`."""
    return F.linear(x, weight).to(accumulation_dtype(x))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See :func:`k3port.ops.norm.rms_norm`; in float32 torch's fused order of rounding is the same."""
    return F.rms_norm(x, weight.shape, weight, eps)


def attn_res(
    blocks: torch.Tensor, partial: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor, eps: float
) -> torch.Tensor:
    """See :func:`k3port.ops.residual.attn_res`; one token takes its weighted sum as a matrix product."""
    sources = torch.cat((blocks, partial.unsqueeze(0)))
    inv_rms = sources.square().mean(dim=-1).add_(eps).rsqrt_()
    weights = torch.softmax((sources @ (gamma * w)).mul_(inv_rms), dim=0)
    if partial.shape[0] == 1:
        return weights.T @ sources[:, 0]
    return torch.einsum("rt,rtd->td", weights, sources)
