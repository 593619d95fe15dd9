"""The whole KDA mixer core of a prefill: convolution, chunked recurrence with the gate inside, gated norm.

The log decay exists in registers and as running sums of one slab of chunks, never as a float32 tensor of all tokens.
"""

from __future__ import annotations

import torch

from k3port.backends.portable.kernels.gated_norm import gated_norm
from k3port.backends.portable.kernels.kda_chunk import chunk_forward, gate_decay
from k3port.backends.portable.kernels.short_conv import short_conv
from k3port.ops.kda import split_heads
from k3port.ops.kda_state import KdaParams, KdaState
from k3port.ops.segment import Segment


def kda_prefill(
    qkv: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    out_gate: torch.Tensor,
    params: KdaParams,
    state: KdaState,
    segment: Segment,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda`, for prefill."""
    heads = params.num_heads
    q, k, v = split_heads(short_conv(qkv, params.conv, state.conv, segment), heads)
    decay = gate_decay(params.A_log, params.dt_bias, params.lower_bound)
    raw, gate = gate_raw.unflatten(-1, (heads, -1)), out_gate.unflatten(-1, (heads, -1))
    o = chunk_forward(q, k, v, raw, beta_logit, decay, state.recurrent, segment)
    return gated_norm(o, gate, params.o_norm, params.norm_eps).flatten(1)
