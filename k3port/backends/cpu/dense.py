"""Projections and norms through torch's own CPU kernels."""

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
