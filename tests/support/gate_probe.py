"""What a KDA core kernel makes of raw gates and logits, read from the states that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.segment import make_segment


def probed(
    kda_core: Callable[..., Any],
    phase: Phase,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays ``exp(g)`` ``[T, H, K]`` and write strengths ``[T, H]`` of tokens that are a request each.

    Without keys a state of ones becomes the decay. A long key that meets a state of zeros leaves beta v in its column.
    """
    tokens, heads = beta_logit.shape
    dim = gate_raw.shape[1] // heads
    rows = torch.zeros(tokens, heads, dim, dtype=gate_raw.dtype)
    key, value = torch.zeros_like(rows), torch.ones_like(rows)
    key[..., 0] = 2.0**20
    state = torch.ones(tokens + 1, heads, dim, dim, dtype=dt_bias.dtype)
    segment = make_segment(phase, [1] * tokens, range(1, tokens + 1))
    gate = (gate_raw, beta_logit, A_log, dt_bias, lower_bound)
    kda_core(rows, rows, rows, *gate, state, segment)
    decay = state[1:, :, 0].clone()
    assert torch.equal(state[1:], decay.unsqueeze(2).expand_as(state[1:])), "the decay is that of the key's channel"
    state.zero_()
    kda_core(rows, key, value, *gate, state, segment)
    return decay, state[1:, :, 0, 0]
