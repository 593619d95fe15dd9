"""The whole KDA mixer core of decode in three launches: convolution, recurrence with the gate inside, gated norm.

For the fused kernel's record, which takes this way where the tuned configuration says that it is faster.
"""

from __future__ import annotations

import torch

from k3port.backends.portable.kernels.gated_norm import gated_norm
from k3port.backends.portable.kernels.kda_step import kda_core_step
from k3port.backends.portable.kernels.short_conv import short_conv
from k3port.ops.kda import split_heads
from k3port.ops.kda_state import KdaParams, KdaState, required_record
from k3port.ops.segment import Segment


def kda_separate(
    qkv: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    out_gate: torch.Tensor,
    params: KdaParams,
    state: KdaState,
    segment: Segment,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda`, for decode: one token per request, or drafts.

    Raises:
        ValueError: drafts without a record.
    """
    heads, drafts = params.num_heads, required_record(segment, state.drafts)
    inputs = None if drafts is None else drafts.x
    q, k, v = split_heads(short_conv(qkv, params.conv, state.conv, segment, inputs), heads)
    gate = (gate_raw, beta_logit, params.A_log, params.dt_bias, params.lower_bound)
    o = kda_core_step(q, k, v, *gate, state.recurrent, segment, drafts)
    return gated_norm(o, out_gate.unflatten(-1, (heads, -1)), params.o_norm, params.norm_eps).flatten(1)
