"""Sampling on the CPU."""

from __future__ import annotations

import torch

from k3port.ops.sample import SamplingTensors, sample


def sample_batched(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    """See :func:`k3port.ops.sample.sample`."""
    if params.all_greedy or not params.temperature.any():
        return torch.argmax(logits, dim=-1)
    return sample(logits, params, uniform)
