"""The patch embedding of the vision tower as one product: a stride that equals the kernel shares no pixel."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def vision_patch(pixels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See :func:`k3port.ops.vision.vision_patch`. The bias is added before the result is rounded."""
    return F.linear(pixels.flatten(1), weight.flatten(1), bias)
