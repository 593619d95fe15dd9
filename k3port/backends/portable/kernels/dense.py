"""Products and rows through torch: cuBLASLt on NVIDIA, hipBLASLt on AMD."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3port.ops.contract import accumulation_dtype


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See :func:`k3port.ops.linear.linear`."""
    return F.linear(x, weight)


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """See :func:`k3port.ops.linear.logits`."""
    return F.linear(x, weight).to(accumulation_dtype(x))


def embed(token_ids: torch.Tensor, weight: torch.Tensor, first_id: int) -> torch.Tensor:
    """See :func:`k3port.ops.linear.embed`. An id outside the shard is read as the nearest row, then blanked."""
    local = token_ids - first_id
    row = local.clamp(0, weight.shape[0] - 1)
    return F.embedding(row, weight).masked_fill_((row != local).unsqueeze(-1), 0)
