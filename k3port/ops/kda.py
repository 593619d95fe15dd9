"""Kimi Delta Attention: gate, gated delta-rule recurrence, and the block between its projections.

Formulas: Kimi Linear technical report (arXiv 2510.26692) and fla-org/flash-linear-attention ``fla/ops/kda``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from k3port.ops import kda_checks as checks
from k3port.ops import kda_samples as samples
from k3port.ops.contract import Contract, Cost, Invariant, accumulation_dtype
from k3port.ops.conv import short_conv
from k3port.ops.kda_state import KdaDrafts, KdaParams, KdaState, normalize_qk, required_record
from k3port.ops.norm import gated_norm
from k3port.ops.segment import NULL_SLOT, Segment


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


def kda_core(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    state: torch.Tensor,
    segment: Segment,
    drafts: KdaDrafts | None = None,
) -> torch.Tensor:
    """The gate of :func:`kda_gate` and the recurrence of :func:`kda_recurrence`, as one op.

    Args:
        q, k: ``[T, H, K]`` after the convolution, not yet normalised.
        v: ``[T, H, V]``.
        gate_raw: ``[T, P]`` with P = H x K, as the projection leaves it.
        beta_logit: ``[T, H]``.
        A_log: float32 ``[H]``.
        dt_bias: float32 ``[P]``.
        lower_bound: of the bounded gate, in [-5, 0); None: softplus gate.
        state: ``[S, H, V, K]`` float32, value-major; updated in place at the segment's slots, except for drafts.
            Snapshots of the segment get the state after their number of tokens.
        drafts: where the segment verifies drafts, the record whose ``k``, ``g`` and ``u`` are written at their slots.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``; rows of padding requests are zero.

    Raises:
        ValueError: drafts without a record.
    """
    g, beta = kda_gate(gate_raw, beta_logit, A_log, dt_bias, lower_bound)
    return kda_recurrence(q, k, v, g, beta, state, segment, drafts)


def kda_recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    segment: Segment,
    drafts: KdaDrafts | None = None,
) -> torch.Tensor:
    """The recurrence, token by token: decay, read, write, then the output from the written state.

    ``S <- S exp(g)`` along the key axis; ``u = beta (v - S k)``; ``S <- S + u kᵀ``; ``o = S q``, with q and k
    normalised here and q scaled by K^-0.5.

    Args:
        g: ``[T, H, K]`` log decay, at most 0.
        beta: ``[T, H]`` write strength.
        q, k, v, state, segment, drafts: as in :func:`kda_core`, and so are the result and the errors.
    """
    record = required_record(segment, drafts)
    acc = accumulation_dtype(v, g)
    raw = k
    q, k = normalize_qk(q, k, acc)
    out = torch.zeros_like(v)
    for request, ((begin, end), slot) in enumerate(zip(segment.spans(), segment.slot_ids, strict=True)):
        if slot == NULL_SLOT:
            continue
        snapshots = segment.snapshots_of(request)
        s = state[slot].to(acc)
        for t in range(begin, end):
            s = s * torch.exp(g[t].to(acc)).unsqueeze(-2)
            read = (s @ k[t].unsqueeze(-1)).squeeze(-1)
            u = beta[t].to(acc).unsqueeze(-1) * (v[t].to(acc) - read)
            s = s + u.unsqueeze(-1) * k[t].unsqueeze(-2)
            out[t] = (s @ q[t].unsqueeze(-1)).squeeze(-1).to(v.dtype)
            if record is not None:
                record.k[slot, t - begin] = raw[t].to(record.k.dtype)
                record.g[slot, t - begin] = g[t].to(record.g.dtype)
                record.u[slot, t - begin] = u.to(record.u.dtype)
            if t - begin + 1 in snapshots:
                state[snapshots[t - begin + 1]] = s.to(state.dtype)
        if record is None:
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
        state: updated in place. Where the segment verifies drafts, only its record is: :func:`kda_commit` does the rest
            once it is known how many of them stay.

    Returns:
        ``[T, P]``, the input of ``o_proj``.

    Raises:
        ValueError: drafts without a record.
    """
    drafts = required_record(segment, state.drafts)
    inputs = None if drafts is None else drafts.x
    q, k, v = split_heads(short_conv(qkv, params.conv, state.conv, segment, inputs), params.num_heads)
    gate = (gate_raw, beta_logit, params.A_log, params.dt_bias, params.lower_bound)
    o = kda_core(q, k, v, *gate, state.recurrent, segment, drafts)
    return gated_norm(o, out_gate.unflatten(-1, (params.num_heads, -1)), params.o_norm, params.norm_eps).flatten(1)


def _core_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    tokens, requests = axes["T"], axes["B"]
    state = axes["H"] * axes["V"] * axes["K"]
    # q, k, v and the raw gate are read once and the result is written once; the float32 decay never leaves the chip.
    streams = tokens * axes["H"] * (3 * axes["K"] + 2 * axes["V"]) * itemsize
    gate = 6 * tokens * axes["H"] * axes["K"]
    return Cost(bytes=2 * requests * state * 4 + streams, flops=7 * tokens * state + gate)


def _block_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    tails = 2 * axes["B"] * (axes["W"] - 1) * 3 * axes["H"] * axes["K"] * itemsize
    # As above, and the gate of the output is read.
    streams = axes["T"] * axes["H"] * (5 * axes["K"] + axes["V"]) * itemsize
    return Cost(
        bytes=2 * axes["B"] * axes["H"] * axes["V"] * axes["K"] * 4 + streams + tails,
        flops=_core_cost(axes, itemsize).flops,
    )


KDA_CORE = Contract(
    op="kda_core",
    inputs={
        "q": "T H K",
        "k": "T H K",
        "v": "T H V",
        "gate_raw": "T P",
        "beta_logit": "T H",
        "A_log": "H",
        "dt_bias": "P",
        "lower_bound": "",
        "state": "S H V K",
        "segment": "",
        "drafts": "",
    },
    outputs={"o": "T H V"},
    mutates=("state", "drafts.k", "drafts.g", "drafts.u"),
    reference=kda_core,
    samples=samples.core_samples,
    cost=_core_cost,
    # A float32 kernel may keep the state in another order of sums; the recurrence amplifies that a little.
    tolerance={torch.float64: 2e-14, torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3},
    invariants=(
        Invariant("published values of the gate", checks.check_core_gate),
        Invariant("split equals whole", checks.check_core_split),
        Invariant("batch equals singles", checks.check_core_batch),
        Invariant("other slots untouched", checks.check_core_slots),
        Invariant("drafts and commit equal steps", checks.check_core_drafts),
        Invariant("a run from a snapshot equals the whole run", checks.check_core_snapshots),
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
    mutates=("state.conv", "state.recurrent", "state.drafts.x", "state.drafts.k", "state.drafts.g", "state.drafts.u"),
    reference=kda,
    samples=samples.block_samples,
    cost=_block_cost,
    tolerance={torch.float64: 2e-14, torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3},
    invariants=(
        Invariant("drafts and commit equal steps", checks.check_block_drafts),
        Invariant("rejected drafts leave no trace", checks.check_block_rejections),
        Invariant("a run from a snapshot equals the whole run", checks.check_block_snapshots),
    ),
)
