"""Kimi Delta Attention: gate, gated delta-rule recurrence, and the block between its projections.

Formulas: Kimi Linear technical report (arXiv 2510.26692) and fla-org/flash-linear-attention ``fla/ops/kda``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from k3port.ops import kda_samples as samples
from k3port.ops.contract import FLOAT32_RESULT_TOLERANCE, Contract, Cost, Invariant, accumulation_dtype
from k3port.ops.conv import short_conv
from k3port.ops.norm import gated_norm
from k3port.ops.segment import NULL_SLOT, Segment

L2_EPS = 1e-6
"""Added to the *sum* of squares of q and k, not to their mean."""


@dataclass(frozen=True, slots=True)
class KdaParams:
    """What a KDA layer needs between its projections; one record per layer.

    ``conv`` float32 ``[3P, W]`` (rows q, k, v), ``A_log`` float32 ``[H]``, ``dt_bias`` float32 ``[P]``, ``o_norm``
    float32 ``[V]``; ``lower_bound`` None selects the softplus gate; P = H x K.
    """

    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor
    num_heads: int
    head_dim: int
    lower_bound: float | None
    norm_eps: float


@dataclass(frozen=True, slots=True)
class KdaState:
    """Per layer and state slot: ``conv`` ``[S, W-1, 3P]`` raw inputs, ``recurrent`` float32 ``[S, H, V, K]``.

    ``arrivals`` int32 ``[S, H]``, zero between calls: where programs that share a head count themselves. It belongs to
    the slot because one slot is never worked on twice at a time. None where no kernel needs it.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor
    arrivals: torch.Tensor | None = None


def kda_gate(
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay per key channel and write strength per head, both float32.

    With ``z = gate_raw + dt_bias`` and ``a = exp(A_log)`` per head: bounded gate ``g = L sigmoid(a z)`` in (L, 0);
    softplus gate ``g = -a softplus(z)``. The bounded form replaces the softplus, it is not a clamp of it.
    ``beta = sigmoid(beta_logit)``.

    Args:
        gate_raw: ``[T, P]`` output of ``f_b_proj``.
        beta_logit: ``[T, H]`` output of ``b_proj``.
        A_log: float32 ``[H]``, one number per head.
        dt_bias: float32 ``[P]``.
        lower_bound: L in [-5, 0), or None.

    Returns:
        ``g`` ``[T, H, K]`` and ``beta`` ``[T, H]``.
    """
    acc = accumulation_dtype(gate_raw)
    num_heads = A_log.shape[0]
    z = (gate_raw.to(acc) + dt_bias.to(acc)).unflatten(-1, (num_heads, -1))
    a = torch.exp(A_log.to(acc)).unsqueeze(-1)
    g = -a * F.softplus(z, threshold=20) if lower_bound is None else lower_bound * torch.sigmoid(a * z)
    return g, torch.sigmoid(beta_logit.to(acc))


def normalize_qk(q: torch.Tensor, k: torch.Tensor, acc: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(sum(x²) + 1e-6)`` over the last axis, and q times K^-0.5."""
    q, k = q.to(acc), k.to(acc)
    q = q * torch.rsqrt(q.square().sum(dim=-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    return q, k * torch.rsqrt(k.square().sum(dim=-1, keepdim=True) + L2_EPS)


def kda_core(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    segment: Segment,
) -> torch.Tensor:
    """The recurrence, token by token: decay, read, write, then the output from the written state.

    ``S <- S exp(g)`` along the key axis; ``u = beta (v - S k)``; ``S <- S + u kᵀ``; ``o = S q``, with q and k
    normalised here and q scaled by K^-0.5.

    Args:
        q, k: ``[T, H, K]`` after the convolution, not yet normalised.
        v: ``[T, H, V]``.
        g: ``[T, H, K]`` log decay, at most 0.
        beta: ``[T, H]``.
        state: ``[S, H, V, K]`` float32, value-major; updated in place at the segment's slots.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``; rows of padding requests are zero.
    """
    acc = accumulation_dtype(v, g)
    q, k = normalize_qk(q, k, acc)
    out = torch.zeros_like(v)
    for (begin, end), slot in zip(segment.spans(), segment.slot_ids, strict=True):
        if slot == NULL_SLOT:
            continue
        s = state[slot].to(acc)
        for t in range(begin, end):
            s = s * torch.exp(g[t].to(acc)).unsqueeze(-2)
            read = (s @ k[t].unsqueeze(-1)).squeeze(-1)
            u = beta[t].to(acc).unsqueeze(-1) * (v[t].to(acc) - read)
            s = s + u.unsqueeze(-1) * k[t].unsqueeze(-2)
            out[t] = (s @ q[t].unsqueeze(-1)).squeeze(-1).to(v.dtype)
        state[slot] = s.to(state.dtype)
    return out


def split_heads(qkv: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, ...]:
    """``[T, 3P]`` to q, k, v of ``[T, H, K]`` each."""
    return tuple(part.unflatten(-1, (num_heads, -1)) for part in qkv.chunk(3, dim=-1))


def kda(
    qkv: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    out_gate: torch.Tensor,
    params: KdaParams,
    state: KdaState,
    segment: Segment,
) -> torch.Tensor:
    """Convolution, gate, recurrence and gated output norm of one layer.

    Args:
        qkv: ``[T, 3P]`` raw projections.
        gate_raw: ``[T, P]`` output of ``f_b_proj``.
        beta_logit: ``[T, H]``.
        out_gate: ``[T, P]`` gate logits of the output.

    Returns:
        ``[T, P]``, the input of ``o_proj``.
    """
    q, k, v = split_heads(short_conv(qkv, params.conv, state.conv, segment), params.num_heads)
    g, beta = kda_gate(gate_raw, beta_logit, params.A_log, params.dt_bias, params.lower_bound)
    o = kda_core(q, k, v, g, beta, state.recurrent, segment)
    return gated_norm(o, out_gate.unflatten(-1, (params.num_heads, -1)), params.o_norm, params.norm_eps).flatten(1)


def _gate_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    elements = axes["T"] * axes["H"] * axes["K"]
    return Cost(bytes=elements * (itemsize + 4), flops=6 * elements)


def _core_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    tokens, requests = axes["T"], axes["B"]
    state = axes["H"] * axes["V"] * axes["K"]
    streams = tokens * axes["H"] * (2 * axes["K"] + 2 * axes["V"]) * itemsize + tokens * axes["H"] * axes["K"] * 4
    return Cost(bytes=2 * requests * state * 4 + streams, flops=7 * tokens * state)


def _block_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    core, gate = _core_cost(axes, itemsize), _gate_cost(axes, itemsize)
    tails = 2 * axes["B"] * (axes["W"] - 1) * 3 * axes["H"] * axes["K"] * itemsize
    # q, k, v and both gates are read once and the result is written once; the float32 decay never leaves the chip.
    streams = axes["T"] * axes["H"] * (5 * axes["K"] + axes["V"]) * itemsize
    return Cost(
        bytes=2 * axes["B"] * axes["H"] * axes["V"] * axes["K"] * 4 + streams + tails,
        flops=core.flops + gate.flops,
    )


KDA_GATE = Contract(
    op="kda_gate",
    inputs={"gate_raw": "T P", "beta_logit": "T H", "A_log": "H", "dt_bias": "P", "lower_bound": ""},
    outputs={"g": "T H K", "beta": "T H"},
    reference=kda_gate,
    samples=samples.gate_samples,
    cost=_gate_cost,
    tolerance=FLOAT32_RESULT_TOLERANCE,
    invariants=(Invariant("published values", samples.check_gate_values),),
)
KDA_CORE = Contract(
    op="kda_core",
    inputs={
        "q": "T H K",
        "k": "T H K",
        "v": "T H V",
        "g": "T H K",
        "beta": "T H",
        "state": "S H V K",
        "segment": "",
    },
    outputs={"o": "T H V"},
    mutates=("state",),
    reference=kda_core,
    samples=samples.core_samples,
    cost=_core_cost,
    # A float32 kernel may keep the state in another order of sums; the recurrence amplifies that a little.
    tolerance={torch.float64: 2e-14, torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3},
    invariants=(
        Invariant("split equals whole", samples.check_core_split),
        Invariant("batch equals singles", samples.check_core_batch),
        Invariant("other slots untouched", samples.check_core_slots),
    ),
)
KDA = Contract(
    op="kda",
    inputs={
        "qkv": "T 3P",
        "gate_raw": "T P",
        "beta_logit": "T H",
        "out_gate": "T P",
        "params": "",
        "state": "",
        "segment": "",
    },
    outputs={"y": "T P"},
    mutates=("state.conv", "state.recurrent"),
    reference=kda,
    samples=lambda dtype, gen: samples.block_samples(dtype, gen, KdaParams, KdaState),
    cost=_block_cost,
    tolerance={torch.float64: 2e-14, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3},
)
