"""Data of KDA calls, and the recurrence in float64 by chunks: the contract's reference takes one step per token.

Drafts are few tokens: for them the contract's reference is fast enough, and it writes the record too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from k3port.ops.catalog import Phase
from k3port.ops.contract import map_tensors, upcast
from k3port.ops.kda import KDA, KDA_CORE, kda_gate, split_heads
from k3port.ops.kda_state import KdaDrafts, KdaParams, KdaState, empty_drafts, normalize_qk
from k3port.ops.norm import gated_norm
from k3port.ops.segment import Segment, make_segment
from k3port.testing.bench.workload import Answer, Args, contract_answer
from k3port.testing.bench.workloads.short_conv import convolve

HEAD_DIM = 128
LOWER_BOUND = -5.0
TAPS = 4
CHUNK = 32
"""Decays of at least -5 reach exp(160) over a chunk, far inside float64."""
HEADS_AT_ONCE = 12
"""Heads are independent: float64 copies of fewer of them need less memory."""


def gate_params(heads: int, device: torch.device, gen: torch.Generator, dim: int = HEAD_DIM) -> dict[str, Any]:
    """``A_log`` and ``dt_bias`` that give decays all over (-5, 0), weak ones often."""
    return {
        "A_log": torch.randn(heads, device=device, generator=gen) * 0.5,
        "dt_bias": torch.randn(heads * dim, device=device, generator=gen) - 2,
        "lower_bound": LOWER_BOUND,
    }


def equal_segment(phase: Phase, requests: int, tokens: int, device: torch.device) -> Segment:
    """``tokens`` of all requests together, equally long. More than one per request in decode are drafts to verify."""
    lengths, slots = [tokens // requests] * requests, list(range(1, requests + 1))
    return make_segment(phase, lengths, slots, device=device, draft=verifies(phase, requests, tokens))


def verifies(phase: Phase, requests: int, tokens: int) -> bool:
    """Whether so many tokens are drafts."""
    return phase == "decode" and tokens > requests


def case_name(phase: Phase, requests: int, tokens: int, heads: int) -> str:
    """Such as ``H96 8x1024`` for prompts, ``H96 B32`` for one token per request, ``H96 B32 x4`` for drafts."""
    each = tokens // requests
    if phase == "prefill":
        return f"H{heads} {requests}x{each}"
    return f"H{heads} B{requests}" + (f" x{each}" if verifies(phase, requests, tokens) else "")


def draft_bytes(axes: Mapping[str, int], itemsize: int) -> int:
    """What drafts move more than plain tokens: k, g and u of the record are written, and the state is not."""
    record = axes["T"] * axes["H"] * (axes["K"] * (itemsize + 4) + axes["V"] * 4)
    return record - axes["B"] * axes["H"] * axes["V"] * axes["K"] * 4


def record_of(state: KdaState) -> KdaDrafts:
    """A record of ones: what stays of them is seen."""
    return map_tensors(empty_drafts(state), torch.ones_like)


def core_args(
    phase: Phase,
    requests: int,
    tokens: int,
    heads: int,
    device: torch.device,
    gen: torch.Generator,
    dim: int = HEAD_DIM,
) -> dict[str, Any]:
    """Arguments of the op ``kda_core``, for an :func:`equal_segment`; with a record where it verifies drafts."""

    def stream() -> torch.Tensor:
        return torch.randn(tokens, heads, dim, device=device, generator=gen).bfloat16()

    args = {
        "q": stream(),
        "k": stream(),
        "v": stream(),
        "gate_raw": torch.randn(tokens, heads * dim, device=device, generator=gen).bfloat16(),
        "beta_logit": torch.randn(tokens, heads, device=device, generator=gen).bfloat16(),
        **gate_params(heads, device, gen, dim),
        "state": torch.randn(requests + 1, heads, dim, dim, device=device, generator=gen) * 0.1,
        "segment": equal_segment(phase, requests, tokens, device),
        "drafts": None,
    }
    if verifies(phase, requests, tokens):
        tails = torch.empty(requests + 1, 0, 3 * heads * dim, dtype=torch.bfloat16, device=device)
        args["drafts"] = record_of(KdaState(tails, args["state"]))
    return args


def block_args(
    phase: Phase, requests: int, tokens: int, heads: int, device: torch.device, gen: torch.Generator
) -> dict[str, Any]:
    """Arguments of the op ``kda``, for an :func:`equal_segment`; with a record where it verifies drafts."""
    width = heads * HEAD_DIM
    gate = gate_params(heads, device, gen)

    def rows(columns: int) -> torch.Tensor:
        return torch.randn(tokens, columns, device=device, generator=gen).bfloat16()

    params = KdaParams(
        conv=torch.randn(3 * width, TAPS, device=device, generator=gen) * 0.5,
        A_log=gate["A_log"],
        dt_bias=gate["dt_bias"],
        o_norm=1 + 0.2 * torch.randn(HEAD_DIM, device=device, generator=gen),
        num_heads=heads,
        head_dim=HEAD_DIM,
        lower_bound=LOWER_BOUND,
        norm_eps=1e-5,
    )
    state = KdaState(
        conv=torch.randn(requests + 1, TAPS - 1, 3 * width, device=device, generator=gen).bfloat16(),
        recurrent=torch.randn(requests + 1, heads, HEAD_DIM, HEAD_DIM, device=device, generator=gen) * 0.1,
        arrivals=torch.zeros(requests + 1, heads, dtype=torch.int32, device=device),
    )
    if verifies(phase, requests, tokens):
        state = dataclasses.replace(state, drafts=record_of(state))
    return {
        "qkv": rows(3 * width),
        "gate_raw": rows(width),
        "beta_logit": rows(heads),
        "out_gate": rows(width),
        "params": params,
        "state": state,
        "segment": equal_segment(phase, requests, tokens, device),
    }


def core_answer(args: Args) -> Answer:
    """Outputs and states of ``kda_core`` in float64, for drafts the record too."""
    if args["segment"].draft:
        return contract_answer(KDA_CORE, args)
    heads = args["q"].shape[1]
    outs, states = [], []
    for first in range(0, heads, HEADS_AT_ONCE):
        some = slice(first, min(first + HEADS_AT_ONCE, heads))
        g, beta = _decays(args, some)
        q, k = normalize_qk(args["q"][:, some], args["k"][:, some], torch.float64)
        out, state = recurrence(q, k, args["v"][:, some].double(), g, beta, args["state"][:, some].double(), args)
        outs.append(out)
        states.append(state)
    return Answer((torch.cat(outs, dim=1),), {"state": torch.cat(states, dim=1)})


def _decays(args: Args, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
    dim = args["k"].shape[2]
    columns = slice(heads.start * dim, heads.stop * dim)
    return kda_gate(
        args["gate_raw"][:, columns].double(),
        args["beta_logit"][:, heads].double(),
        args["A_log"][heads].double(),
        args["dt_bias"][columns].double(),
        args["lower_bound"],
    )


def block_answer(args: Args) -> Answer:
    """Outputs and states of the op ``kda`` in float64, for drafts the record too."""
    if args["segment"].draft:
        return contract_answer(KDA, args)
    params, state, segment = args["params"], args["state"], args["segment"]
    conv = convolve({"x": args["qkv"], "weight": params.conv, "tail": state.conv, "segment": segment})
    q, k, v = split_heads(conv.outputs[0], params.num_heads)
    core = {
        "q": q,
        "k": k,
        "v": v,
        "state": state.recurrent,
        "segment": segment,
        "gate_raw": args["gate_raw"],
        "beta_logit": args["beta_logit"],
        **{name: getattr(params, name) for name in ("A_log", "dt_bias", "lower_bound")},
    }
    found = core_answer(core)
    wide = upcast(dataclasses.asdict(params))
    gate = args["out_gate"].double().unflatten(-1, (params.num_heads, -1))
    y = gated_norm(found.outputs[0], gate, wide["o_norm"], params.norm_eps).flatten(1)
    return Answer((y,), {"state.conv": conv.updated["tail"], "state.recurrent": found.updated["state"]})


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    args: Args,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over the requests of ``args["segment"]``; q and k are normalised, all is float64.

    The chunk form of Yang et al. (arXiv 2406.06484), with decays split as exp(G_i) exp(-G_j): float64 has the range for
    it, and none of our kernels does it so.
    """
    out, state = torch.zeros_like(v), state.clone()
    segment = args["segment"]
    for (begin, end), slot in zip(segment.spans(), segment.slot_ids, strict=True):
        rows = slice(begin, end)
        out[rows], state[slot] = _one_request(q[rows], k[rows], v[rows], g[rows], beta[rows], state[slot])
    return out, state


def _one_request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = q.shape[0]
    size = min(CHUNK, tokens)

    def chunks(x: torch.Tensor) -> torch.Tensor:
        # Padding has k = v = 0, beta = 0 and g = 0: it writes nothing and decays nothing.
        return F.pad(x.movedim(0, -1), (0, -tokens % size)).movedim(-1, 0).unflatten(0, (-1, size)).transpose(1, 2)

    q, k, v, g, beta = chunks(q), chunks(k), chunks(v), chunks(g), chunks(beta.unsqueeze(-1))
    total = g.cumsum(dim=-2)
    rise, fall = total.exp(), torch.exp(-total)
    grown = k * fall
    mix = beta * ((k * rise) @ grown.mT).tril(-1)
    seen = ((q * rise) @ grown.mT).tril()
    right = beta * torch.cat((k * rise, v), dim=-1)
    solved = torch.linalg.solve_triangular(mix, right, upper=False, unitriangular=True)
    w, u = solved.split((k.shape[-1], v.shape[-1]), dim=-1)
    last = total[..., -1:, :]
    left = k * torch.exp(last - total)
    out = torch.empty_like(v)
    for n in range(q.shape[0]):
        written = u[n] - w[n] @ s.mT
        out[n] = (q[n] * rise[n]) @ s.mT + seen[n] @ written
        s = s * last[n].exp() + written.mT @ left[n]
    return out.transpose(1, 2).flatten(0, 1)[:tokens], s
