"""Checks of the KDA recurrence against ``../shared/parity/ops``; registered beside the others in ``op_parity``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from gate_probe import probed
from op_parity import Worst, bundle, parity

from k3port.ops.catalog import Phase
from k3port.ops.kda import kda_gate
from k3port.ops.kda_samples import CORE_INPUTS
from k3port.ops.segment import make_segment

Op = Callable[..., Any]
SLOT, SLOTS = 2, 4
LENGTHS = (1, 63, 64, 65, 130, 1000)


@cache
def inputs(name: str, dtype: torch.dtype, bound: float = -5.0, keys: str = "") -> dict[str, Any]:
    """Arguments of a call from a bundle, without state and segment."""
    data = bundle(name, dtype)
    heads = data["q"].shape[1]
    logit = data["corr_beta_logit"] if keys else data["beta_logit"]
    tokens = logit.shape[0]
    return {
        "q": data["q"][:tokens],
        "k": data[f"corr_k_{keys}"] if keys else data["k"],
        "v": data["v"][:tokens],
        "gate_raw": data["gate_raw"].flatten(1)[:tokens],
        "beta_logit": logit.to(dtype),
        "A_log": data["A_log"][:heads].to(dtype),
        "dt_bias": data["dt_bias"].to(dtype),
        "lower_bound": bound,
    }


def log_decays(args: dict[str, Any]) -> torch.Tensor:
    """The formula, which has a bundle of its own."""
    return kda_gate(*(args[name] for name in ("gate_raw", "beta_logit", "A_log", "dt_bias", "lower_bound")))[0]


def run(
    kda_core: Op,
    args: dict[str, Any],
    tokens: int,
    phase: Phase,
    start: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and the last state after ``tokens`` tokens, in one prefill or token by token."""
    heads = args["q"].shape[1]
    state = torch.zeros(SLOTS, heads, 128, 128, dtype=dtype)
    if start is not None:
        state[SLOT] = start
    pieces = [slice(0, tokens)] if phase == "prefill" else [slice(t, t + 1) for t in range(tokens)]
    outs = []
    for rows in pieces:
        part = args | {name: args[name][rows] for name in CORE_INPUTS}
        outs.append(kda_core(**part, state=state, segment=make_segment(phase, [part["q"].shape[0]], [SLOT])))
    assert not state[[0, 1, 3]].any(), "other slots stay as they were"
    return torch.cat(outs), state[SLOT]


def _recurrence(kda_core: Op, dtype: torch.dtype, phase: Phase) -> float:
    data, worst = bundle("kda_recurrence", dtype), Worst(dtype)
    start, args = data["state_init"].to(dtype), inputs("kda_recurrence", dtype)
    worst(log_decays(args)[:130], data["gate_log_130"], "log decay")
    index = data["o_index"].long()
    # Decode step by step is slow: one pass over 130 tokens shows what 1000 would.
    lengths = LENGTHS if phase == "prefill" else (1, 65, 130)
    for tokens in lengths:
        o, state = run(kda_core, args, tokens, phase, start, dtype)
        known = index[index < tokens]
        worst(o[known], data["o"][: len(known)], f"output of {tokens} tokens")
        worst(state, data[f"state_{tokens}"], f"state after {tokens} tokens")
    o, _ = run(kda_core, args, 65, phase, None, dtype)
    worst(o, data["o_zero_init_65"], "from a zero state")
    return worst.error


def _bounds(kda_core: Op, dtype: torch.dtype, phase: Phase) -> float:
    data, worst = bundle("kda_recurrence", dtype), Worst(dtype)
    start = data["state_init"].to(dtype)
    for name, bound in (("1", -1.0), ("0.1", -0.1), ("0.01", -0.01)):
        o, state = run(kda_core, inputs("kda_recurrence", dtype, bound), 130, phase, start, dtype)
        worst(o, data[f"o_L{name}"], f"output at bound {bound}")
        worst(state, data[f"state_L{name}_130"], f"state at bound {bound}")
    return worst.error


def _correlated(kda_core: Op, dtype: torch.dtype, phase: Phase) -> float:
    """Keys correlated with rho 0.9 and 1, beta near 0.98: what ill-conditioned triangular solves get wrong."""
    data, worst = bundle("kda_recurrence", dtype), Worst(dtype)
    start = data["state_init"].to(dtype)
    for rho in ("0.9", "1"):
        for name, bound in (("0.01", -0.01), ("5", -5.0)):
            args = inputs("kda_recurrence", dtype, bound, f"rho{rho}")
            o, state = run(kda_core, args, 130, phase, start, dtype)
            worst(o, data[f"corr_o_rho{rho}_L{name}"], f"output, rho {rho}, bound {bound}")
            worst(state, data[f"corr_state_rho{rho}_L{name}"], f"state, rho {rho}, bound {bound}")
    return worst.error


def _verify(kda_core: Op, dtype: torch.dtype, phase: Phase) -> float:
    """Eight tokens of a speculative verification: the state after each count is the state of a rejection there."""
    data, worst = bundle("kda_verify", dtype), Worst(dtype)
    start, args = data["state_init"].to(dtype), inputs("kda_verify", dtype)
    for tokens in range(1, 9):
        o, state = run(kda_core, args, tokens, phase, start, dtype)
        worst(o, data["o"][:tokens], f"output of {tokens} tokens")
        if f"state_{tokens}" in data:
            worst(state, data[f"state_{tokens}"], f"state after {tokens} tokens")
        # The records rebuild every state: S_a = S_0 e^(G_a) + sum of u_j (k_j e^(G_a - G_j))^T.
        total = log_decays(args)[:tokens].double().cumsum(0)
        k = args["k"][:tokens].double()
        k = k * torch.rsqrt(k.square().sum(dim=-1, keepdim=True) + 1e-6)
        replay = start.double() * total[-1].exp().unsqueeze(1)
        replay = replay + torch.einsum("thv,thk->hvk", data["u"][:tokens], k * torch.exp(total[-1] - total))
        worst(state, replay, f"replay of {tokens} tokens")
    return worst.error


def gate_bundle(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
    """The bundle, and of it raw gate, logit, ``A_log`` and ``dt_bias``."""
    data = bundle("kda_gate", dtype)
    assert not data["A_log"][3:].any()
    assert torch.equal(data["A_log"][:3], data["A_log_4d"].flatten())
    logit, a_log, dt_bias = (data[name].to(dtype) for name in ("beta_logit", "A_log", "dt_bias"))
    return data, (data["gate_raw"].flatten(1), logit, a_log[:3], dt_bias)


GATES = (("L5", -5.0), ("L1", -1.0), ("L0.1", -0.1), ("L0.01", -0.01), ("softplus", None))
"""Name in the bundle and lower bound."""


def _gate(kda_core: Op, dtype: torch.dtype, phase: Phase) -> float:
    """Decays as the recurrence uses them, both forms, extreme inputs too."""
    (data, given), worst = gate_bundle(dtype), Worst(dtype)
    for name, bound in GATES:
        decay, beta = probed(kda_core, phase, *given, bound)
        worst(decay, data[name if bound is None else f"bounded_{name}"].exp(), name)
        worst(beta, data["beta"], "beta")
    return worst.error


for _phase, _suffix in (("prefill", ""), ("decode", ", token by token")):
    for _name, _check in (
        ("kda_gate", _gate),
        ("kda_recurrence", _recurrence),
        ("kda_recurrence, bounds", _bounds),
        ("kda_recurrence, correlated keys", _correlated),
        ("kda_verify", _verify),
    ):
        parity(_name + _suffix, "kda_core", _phase)(  # type: ignore[arg-type]
            lambda op, dtype, check=_check, phase=_phase: check(op, dtype, phase)
        )
