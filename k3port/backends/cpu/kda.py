"""The KDA recurrence on the CPU: WY chunks for prefill, one batched update for decode.

Derivation of the chunk form: with G the running sum of the log decays inside a chunk, each written row u_j reaches
token i decayed by exp(G_i - G_j). Collecting the rows gives a unit lower triangular system per chunk (Yang et al.,
arXiv 2406.06484, with the per-channel decay of arXiv 2510.26692).
"""

from __future__ import annotations

import itertools

import torch

from k3port.ops.contract import accumulation_dtype
from k3port.ops.kda import kda_core, kda_gate
from k3port.ops.kda_state import KdaDrafts, normalize_qk
from k3port.ops.segment import NULL_SLOT, Segment

CHUNK = 16
"""Tokens per chunk: pairwise decays cost CHUNK² K numbers, the sequential part one step per chunk."""
SLAB_CHUNKS = 64
"""Chunks whose pairwise decays are held at once, so that a long prompt needs no more memory than 1,024 tokens."""


def kda_core_chunk(
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
    """See :func:`k3port.ops.kda.kda_core`, for prefill."""
    del drafts
    acc = accumulation_dtype(v)
    g, beta = kda_gate(gate_raw, beta_logit, A_log, dt_bias, lower_bound)
    q, k = normalize_qk(q, k, acc)
    v32 = v.to(acc)
    out = torch.zeros_like(v) if segment.has_padding else torch.empty_like(v)
    for request, ((begin, end), slot) in enumerate(zip(segment.spans(), segment.slot_ids, strict=True)):
        if slot == NULL_SLOT or begin == end:
            continue
        snapshots = {begin + tokens: kept for tokens, kept in segment.snapshots_of(request).items()}
        s = state[slot].to(acc)
        cuts = sorted({*range(begin, end, CHUNK * SLAB_CHUNKS), *snapshots, end})
        for lo, hi in itertools.pairwise(cuts):
            rows = slice(lo, hi)
            o, s = _slab(q[rows], k[rows], v32[rows], g[rows], beta[rows], s)
            out[rows] = o.to(v.dtype)
            if hi in snapshots:
                state[snapshots[hi]] = s.to(state.dtype)
        state[slot] = s.to(state.dtype)
    return out


def _chunks(x: torch.Tensor, padding: int) -> torch.Tensor:
    """``[T, H, ...]`` to ``[N, H, CHUNK, ...]``, zeros behind the last token."""
    if padding:
        x = torch.cat((x, x.new_zeros(padding, *x.shape[1:])))
    return x.unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _slab(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Consecutive tokens ``[T, H, ...]`` of one request from state ``s`` ``[H, V, K]``: outputs and the next state.

    A token of padding has k = v = 0, beta = 0 and g = 0: it writes nothing and decays nothing.
    """
    tokens = q.shape[0]
    padding = -tokens % CHUNK
    q, k, v, g = (_chunks(x, padding) for x in (q, k, v, g))
    beta = _chunks(beta, padding).unsqueeze(-1)
    total = g.cumsum(dim=-2)
    # exp(G_i - G_j) for j <= i: every exponent is at most zero, whatever the gate.
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    pair = total.unsqueeze(-2) - total.unsqueeze(-3)
    pair = torch.exp_(pair.masked_fill_(~lower.unsqueeze(-1), -torch.inf))
    pair *= k.unsqueeze(-3)
    attn = (pair @ q.unsqueeze(-1)).squeeze(-1)
    mix = (pair @ k.unsqueeze(-1)).squeeze(-1) * beta
    decay = total.exp()
    k_in, q_in = k * decay, q * decay
    # (I + strictly lower mix) [W | U] = beta [k_in | v]; the diagonal is taken as one.
    solved = torch.linalg.solve_triangular(mix, beta * torch.cat((k_in, v), dim=-1), upper=False, unitriangular=True)
    w, u = solved.split((k.shape[-1], v.shape[-1]), dim=-1)
    last = total[..., -1:, :]
    k_out = k * torch.exp(last - total)
    chunk_decay = last.exp()
    out = torch.empty_like(v)
    for n in range(q.shape[0]):
        delta = torch.baddbmm(u[n], w[n], s.transpose(-1, -2), alpha=-1)
        torch.baddbmm(q_in[n] @ s.transpose(-1, -2), attn[n], delta, out=out[n])
        s = torch.baddbmm(s * chunk_decay[n], delta.transpose(-1, -2), k_out[n])
    return out.transpose(1, 2).flatten(0, 1)[:tokens], s


def kda_core_step(
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
    """See :func:`k3port.ops.kda.kda_core`: one token per request at once, drafts request by request."""
    if segment.has_padding or segment.draft:
        gate = (gate_raw, beta_logit, A_log, dt_bias, lower_bound)
        return kda_core(q, k, v, *gate, state, segment, drafts)
    acc = accumulation_dtype(v)
    g, beta = kda_gate(gate_raw, beta_logit, A_log, dt_bias, lower_bound)
    q, k = normalize_qk(q, k, acc)
    # One request works on its slot itself; several are gathered, updated together and written back.
    alone = len(segment.slot_ids) == 1 and state.dtype == acc
    s = state[segment.slot_ids[0]].unsqueeze(0) if alone else state[segment.slots].to(acc)
    s *= g.exp().unsqueeze(-2)
    u = v.to(acc) - (s @ k.unsqueeze(-1)).squeeze(-1)
    u *= beta.unsqueeze(-1)
    s.addcmul_(u.unsqueeze(-1), k.unsqueeze(-2))
    if not alone:
        state[segment.slots] = s.to(state.dtype)
    return (s @ q.unsqueeze(-1)).squeeze(-1).to(v.dtype)
