"""Goldens of convolution, KDA and MLA; see ``golden_base``."""

from __future__ import annotations

import math
from typing import Any

import torch
from golden_base import Op, close, golden

from k3port.ops.catalog import Phase
from k3port.ops.kda import KdaParams, KdaState
from k3port.ops.kda_samples import CORE_INPUTS, undone_gate
from k3port.ops.mla import MlaParams
from k3port.ops.segment import make_segment


def _silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _check_conv(short_conv: Op, dtype: torch.dtype, phase: Phase) -> None:
    """Channel 0: tap 0 alone delays by three; channel 1: tap 3 alone is the identity; channel 2: 1, 10, 100, 1000."""
    taps = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0], [1.0, 10.0, 100.0, 1000.0]], dtype=dtype)
    x = torch.tensor(
        [[1.0, 1.0, 0.001], [2.0, 2.0, 0.002], [3.0, 3.0, 0.003], [-4.0, -4.0, 0.004], [5.0, 5.0, 0.005]], dtype=dtype
    )
    tail = torch.zeros(3, 3, 3, dtype=dtype)
    tail[2, 2] = torch.tensor([7.0, 7.0, 0.009])
    if phase == "prefill":
        y = short_conv(x, taps, tail, make_segment("prefill", [5], [2]))
    else:
        y = torch.cat([short_conv(x[t : t + 1], taps, tail, make_segment("decode", [1], [2])) for t in range(5)])
    rows = [[0, 1, 1.9], [0, 2, 2.19], [7, 3, 3.219], [1, -4, 4.321], [2, 5, 5.432]]
    close(y, [[_silu(value) for value in row] for row in rows], dtype, scale=3)
    assert torch.equal(tail[2], x[2:]), "the tail holds the last raw inputs, oldest first"
    assert not tail[:2].any()


@golden("convolution taps, prefill", "short_conv", "prefill")
def check_conv_prefill(short_conv: Op, dtype: torch.dtype) -> None:
    _check_conv(short_conv, dtype, "prefill")


@golden("convolution taps, decode", "short_conv", "decode")
def check_conv_decode(short_conv: Op, dtype: torch.dtype) -> None:
    _check_conv(short_conv, dtype, "decode")


def _gate_of(g: torch.Tensor, beta: torch.Tensor, bound: float | None, dtype: torch.dtype) -> dict[str, Any]:
    """Raw numbers that become these decays ``[T, H, K]`` and strengths ``[T, H]``."""
    a_log = torch.zeros(g.shape[1], dtype=torch.float64)
    return {
        "gate_raw": undone_gate(g, a_log, bound).flatten(1).to(dtype),
        "beta_logit": torch.logit(beta.double()).clamp(max=60).to(dtype),
        "A_log": a_log.to(dtype),
        "dt_bias": torch.zeros(g.shape[1] * g.shape[2], dtype=dtype),
        "lower_bound": bound,
    }


def _kda_example(dtype: torch.dtype, bound: float | None) -> dict[str, Any]:
    rows = {
        "q": [[1.0, 1.0], [0.0, 2.0]],
        "k": [[3.0, 4.0], [1.0, 0.0]],
        "v": [[1.0, 2.0], [-1.0, 0.5]],
    }
    g, beta = torch.tensor([[[-1.0, -2.0]], [[-0.5, -0.25]]]), torch.tensor([[0.5], [0.25]])
    tensors = {name: torch.tensor(values, dtype=dtype).unsqueeze(1) for name, values in rows.items()}
    return {**tensors, **_gate_of(g, beta, bound, dtype)}


KDA_OUTPUTS = [[[0.34999991, 0.69999981]], [[0.22027809, 0.44055619]]]
KDA_STATES = [
    [[0.299999994, 0.399999992], [0.599999988, 0.799999984]],
    [[-0.11353043, 0.31152031], [0.39793882, 0.62304061]],
]


def _check_kda_steps(kda_core: Op, dtype: torch.dtype, phase: Phase) -> None:
    for bound in (-5.0, None):
        args, state = _kda_example(dtype, bound), torch.zeros(3, 1, 2, 2, dtype=dtype)
        for t in range(2):
            row = {name: args[name][t : t + 1] for name in CORE_INPUTS}
            o = kda_core(**{**args, **row}, state=state, segment=make_segment(phase, [1], [2]))
            close(o, [KDA_OUTPUTS[t]], dtype, scale=3, what=f"output {t}, bound {bound}")
            close(state[2, 0], KDA_STATES[t], dtype, scale=3, what=f"state {t}, bound {bound}")
        # u = beta (v - S k) of the second token, from the states: the key is [1, 0], so column 0 took all of it.
        u = state[2, 0, :, 0].double() - torch.tensor(KDA_STATES[0]).double()[:, 0] * math.exp(-0.5)
        close(u, [-0.29548978, 0.03402045], dtype, scale=30)


@golden("KDA example, step by step", "kda_core", "prefill")
def check_kda_steps(kda_core: Op, dtype: torch.dtype) -> None:
    _check_kda_steps(kda_core, dtype, "prefill")


@golden("KDA example, decode", "kda_core", "decode")
def check_kda_decode(kda_core: Op, dtype: torch.dtype) -> None:
    _check_kda_steps(kda_core, dtype, "decode")


@golden("KDA example, in one call", "kda_core", "prefill")
def check_kda_call(kda_core: Op, dtype: torch.dtype) -> None:
    for bound in (-5.0, None):
        state = torch.zeros(3, 1, 2, 2, dtype=dtype)
        o = kda_core(**_kda_example(dtype, bound), state=state, segment=make_segment("prefill", [2], [1]))
        close(o, KDA_OUTPUTS, dtype, scale=3)
        close(state[1, 0], KDA_STATES[1], dtype, scale=3)


def _check_l2norm(kda_core: Op, dtype: torch.dtype, phase: Phase) -> None:
    """q = k = [1e-3, 0]: the sum of squares equals the epsilon, so each is divided by sqrt(2e-6), not by 1e-3."""
    faint = torch.tensor([[[1e-3, 0.0]]], dtype=dtype)
    args = {
        "q": faint,
        "k": faint,
        "v": torch.tensor([[[1.0, -2.0]]], dtype=dtype),
        **_gate_of(torch.zeros(1, 1, 2), torch.ones(1, 1), -5.0, dtype),
    }
    state = torch.zeros(2, 1, 2, 2, dtype=dtype)
    o = kda_core(**args, state=state, segment=make_segment(phase, [1], [1]))
    close(o, [[[2**-1.5, -(2**-0.5)]]], dtype, what="output")
    close(state[1, 0], [[2**-0.5, 0.0], [-(2**0.5), 0.0]], dtype, what="state")


@golden("l2norm adds its epsilon to the sum, prefill", "kda_core", "prefill")
def check_l2norm_prefill(kda_core: Op, dtype: torch.dtype) -> None:
    _check_l2norm(kda_core, dtype, "prefill")


@golden("l2norm adds its epsilon to the sum, decode", "kda_core", "decode")
def check_l2norm_decode(kda_core: Op, dtype: torch.dtype) -> None:
    _check_l2norm(kda_core, dtype, "decode")


def mla_example(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, MlaParams]:
    """One head, N = 2, R = 1, V = 2, C = 2; keys are the latent, values its double with the channels crossed."""
    kv_b = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 2.0], [2.0, 0.0]]], dtype=dtype)
    params = MlaParams(torch.ones(2, dtype=dtype), kv_b, nope_dim=2, latent_dim=2, scale=3**-0.5, norm_eps=1e-6)
    q = torch.tensor([[[1.0, 0.0, 2.0]], [[0.0, -1.0, 1.0]]], dtype=dtype)
    # The second latent has a mean square of 1e-6, as large as the epsilon; the shared key (last) is not normalised.
    kv = torch.tensor([[3.0, 4.0, 0.5], [1e-3, -1e-3, -2.0]], dtype=dtype)
    return q, kv, params


def _check_mla(mla: Op, dtype: torch.dtype, phase: Phase) -> None:
    q, kv, params = mla_example(dtype)
    gate = torch.tensor([[math.log(3), -math.log(3)], [0.0, 40.0]], dtype=dtype)
    cache = torch.full((3, 1, 3), 1e4, dtype=dtype)
    if phase == "prefill":
        o = mla(q, kv, gate, params, cache, make_segment("prefill", [2], [1], [0], [[2, 0]], 1))
    else:
        steps = [make_segment("decode", [1], [1], [t], [[2, 0]], 1) for t in range(2)]
        o = torch.cat([mla(q[t : t + 1], kv[t : t + 1], gate[t : t + 1], params, cache, steps[t]) for t in range(2)])
    norm = (12.5 + 1e-6) ** -0.5
    c0, c1 = (3 * norm, 4 * norm), (2**-0.5, -(2**-0.5))
    close(cache[2, 0], [*c0, 0.5], dtype, what="cache row 0")
    close(cache[0, 0], [*c1, -2.0], dtype, what="cache row 1")
    # Token 0 sees itself; token 1 both, at scores (q_n k_n + q_r k_r) / sqrt(2 + 1).
    scores = [(-c0[1] + 0.5) * 3**-0.5, (-c1[1] - 2.0) * 3**-0.5]
    top = 1 / (1 + math.exp(scores[1] - scores[0]))
    mixed = [2 * (top * c0[1] + (1 - top) * c1[1]), 2 * (top * c0[0] + (1 - top) * c1[0])]
    expected = [[2 * c0[1] * 0.75, 2 * c0[0] * 0.25], [mixed[0] / 2, mixed[1]]]
    close(o, expected, dtype, scale=2, what="output")


@golden("MLA example, prefill", "mla", "prefill")
def check_mla_prefill(mla: Op, dtype: torch.dtype) -> None:
    _check_mla(mla, dtype, "prefill")


@golden("MLA example, decode", "mla", "decode")
def check_mla_decode(mla: Op, dtype: torch.dtype) -> None:
    _check_mla(mla, dtype, "decode")


def kda_block(dtype: torch.dtype) -> tuple[KdaParams, KdaState]:
    """One head, K = V = 2, identity convolution: what is left is the order of the parts."""
    conv = torch.zeros(6, 4, dtype=dtype)
    conv[:, 3] = 1
    params = KdaParams(
        conv=conv,
        A_log=torch.zeros(1, dtype=dtype),
        dt_bias=torch.tensor([0.5, -0.5], dtype=dtype),
        o_norm=torch.tensor([2.0, 1.0], dtype=dtype),
        num_heads=1,
        head_dim=2,
        lower_bound=-5.0,
        norm_eps=1e-5,
    )
    return params, KdaState(torch.zeros(2, 3, 6, dtype=dtype), torch.zeros(2, 1, 2, 2, dtype=dtype))


def _check_kda_block(kda: Op, dtype: torch.dtype, phase: Phase) -> None:
    params, state = kda_block(dtype)
    qkv = torch.tensor([[1.0, 2.0, 3.0, -1.0, 0.5, -2.0]], dtype=dtype)
    y = kda(
        qkv,
        torch.tensor([[0.1, 0.2]], dtype=dtype),
        torch.tensor([[0.3]], dtype=dtype),
        torch.tensor([[math.log(3), 0.0]], dtype=dtype),
        params,
        state,
        make_segment(phase, [1], [1]),
    )
    q, k, v = ([_silu(x) for x in part] for part in ([1.0, 2.0], [3.0, -1.0], [0.5, -2.0]))
    q = [x / math.sqrt(sum(a * a for a in q) + 1e-6) / math.sqrt(2) for x in q]
    k = [x / math.sqrt(sum(a * a for a in k) + 1e-6) for x in k]
    beta = 1 / (1 + math.exp(-0.3))
    s = [[beta * vi * kj for kj in k] for vi in v]
    o = [sum(sij * qj for sij, qj in zip(row, q, strict=True)) for row in s]
    size = (sum(x * x for x in o) / 2 + 1e-5) ** -0.5
    close(state.recurrent[1, 0], s, dtype, scale=3, what="state")
    close(y, [[o[0] * size * 2 * 0.75, o[1] * size * 0.5]], dtype, scale=5, what="output")


@golden("KDA block, prefill", "kda", "prefill")
def check_kda_block_prefill(kda: Op, dtype: torch.dtype) -> None:
    _check_kda_block(kda, dtype, "prefill")


@golden("KDA block, decode", "kda", "decode")
def check_kda_block_decode(kda: Op, dtype: torch.dtype) -> None:
    _check_kda_block(kda, dtype, "decode")
