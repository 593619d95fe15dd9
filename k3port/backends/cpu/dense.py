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
    partial: torch.Tensor,
    pending: torch.Tensor | None,
    blocks: torch.Tensor,
    num_blocks: int,
    write_block: bool,
    res_norm: torch.Tensor,
    res_proj: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See :func:`k3port.ops.residual.attn_res`; one token takes its weighted sum as a matrix product."""
    x = partial if pending is None or write_block else partial.add_(pending)
    if write_block:
        x = blocks[num_blocks]
        if pending is None:
            x.copy_(partial)
        else:
            torch.add(partial, pending, out=x)
    if num_blocks:
        # A block that was just written lies behind the finished ones already.
        sources = blocks[: num_blocks + 1] if write_block else torch.cat((blocks[:num_blocks], x.unsqueeze(0)))
        inv_rms = sources.square().mean(dim=-1).add_(eps).rsqrt_()
        weights = torch.softmax((sources @ (res_norm * res_proj)).mul_(inv_rms), dim=0)
        x = weights.T @ sources[:, 0] if x.shape[0] == 1 else torch.einsum("rt,rtd->td", weights, sources)
    return x if norm_weight is None else F.rms_norm(x, norm_weight.shape, norm_weight, eps)
