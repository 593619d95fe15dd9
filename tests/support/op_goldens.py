"""Operator goldens: published numbers and numbers worked out by hand, each as a check that any kernel of the op can take.

``CHECKS`` maps a name to the op, its phase and the check; a check raises AssertionError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.kda import KdaParams, KdaState
from k3port.ops.mla import MlaParams
from k3port.ops.moe import RouterParams
from k3port.ops.segment import make_segment

Op = Callable[..., Any]
Check = Callable[[Op, torch.dtype], None]
CHECKS: dict[str, tuple[str, Phase | None, Check]] = {}

# Published numbers have nine digits; float32 kernels get a few units in the last place.
CLOSE = {torch.float64: 3e-8, torch.float32: 1e-6}


def golden(name: str, op: str, phase: Phase | None = None) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[name] = (op, phase, check)
        return check

    return register


def close(actual: torch.Tensor, expected: Any, dtype: torch.dtype, scale: float = 1.0, what: str = "") -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape)
    bound = CLOSE[dtype] * scale
    wrong = (actual.double() - wanted).abs() > bound * wanted.abs().clamp(min=1e-6) + bound * 1e-3
    wrong |= ~torch.isfinite(actual)
    assert not wrong.any(), f"{what} {actual.tolist()} instead of {wanted.tolist()}"


SITU = [
    (0, 1, 0.0), (1, 1, 0.715817828), (-1, 1, -0.263334663), (2, -3, -4.86106655), (8, 10, 36.6158446),
    (-8, 10, -0.0122832475), (100, 100, 99.93293), (-20, 50, -1.98682852e-7), (0.5, -40, -7.13414653),
]  # fmt: skip


@golden("SiTU", "situ_mul")
def check_situ(situ_mul: Op, dtype: torch.dtype) -> None:
    rows = torch.tensor([[a, b] for a, b, _ in SITU], dtype=dtype)
    close(situ_mul(rows, 4.0, 25.0), [[y] for *_, y in SITU], dtype, scale=2)


@golden("SiTU caps", "situ_mul")
def check_situ_caps(situ_mul: Op, dtype: torch.dtype) -> None:
    """Far beyond both caps only they are left: 4 x 25; without a linear cap the linear branch passes; silu has no cap."""
    far = torch.tensor([[1000.0, 1000.0], [1000.0, -1000.0]], dtype=dtype)
    close(situ_mul(far, 4.0, 25.0), [[100.0], [-100.0]], dtype)
    close(situ_mul(far, 4.0, None), [[4000.0], [-4000.0]], dtype)
    close(situ_mul(far, None, None), [[1e6], [-1e6]], dtype)
    # b of 2 is well inside the cap of 25, which still takes 2 - 25 tanh(2/25) = 0.00426 from it.
    near = torch.tensor([[3.0, 2.0]], dtype=dtype)
    gate = 4 * math.tanh(0.75) / (1 + math.exp(-3))
    close(situ_mul(near, 4.0, 25.0), [[gate * 25 * math.tanh(0.08)]], dtype)
    close(situ_mul(near, 4.0, None), [[gate * 2]], dtype)
    close(situ_mul(near, None, None), [[6 / (1 + math.exp(-3))]], dtype)


@golden("SiTU sigmoid on the uncapped gate", "situ_mul")
def check_situ_sigmoid(situ_mul: Op, dtype: torch.dtype) -> None:
    """At a = -6 the two readings differ by a factor: sigmoid(-6) is 0.00247, sigmoid(4 tanh(-1.5)) is 0.0263."""
    capped = 4 * math.tanh(-1.5)
    y = capped / (1 + math.exp(6)) * 25 * math.tanh(0.04)
    assert abs(y / (capped / (1 + math.exp(-capped)) * 25 * math.tanh(0.04)) - 0.0941) < 1e-3
    close(situ_mul(torch.tensor([[-6.0, 1.0]], dtype=dtype), 4.0, 25.0), [[y]], dtype, scale=2)


GATES = [
    (0.0, 0.0, -2.5, -0.693147181), (0.5, 1.0, -4.19359076, -2.16520248), (0.5, -1.0, -0.806409242, -0.516481208),
    (-0.4684, 2.0, -3.88823471, -1.33146347), (1.0066, -3.0, -0.00136080376, -0.132948687),
    (2.0, 5.0, -5.0, -36.9949),
]  # fmt: skip


@golden("KDA gates", "kda_gate")
def check_gates(kda_gate: Op, dtype: torch.dtype) -> None:
    """One head per row of the table, so that ``A_log`` is read per head; z is split between the input and the bias."""
    heads, channels = len(GATES), 3
    a_log = torch.tensor([a for a, *_ in GATES], dtype=dtype)
    z = torch.tensor([[z] * channels for _, z, *_ in GATES], dtype=dtype)
    bias = torch.tensor([0.25, -0.5, 0.75], dtype=dtype).repeat(heads)
    logits = torch.tensor([[0.0, 2.0, -3.0, 0.5, 40.0, -40.0]], dtype=dtype)
    for bound, column in ((-5.0, 2), (None, 3)):
        g, beta = kda_gate((z.flatten() - bias).unsqueeze(0), logits, a_log, bias, bound)
        close(g, [[[row[column]] * channels for row in GATES]], dtype, scale=5, what=f"bound {bound}")
        close(beta, [[1 / (1 + math.exp(-x)) for x in logits[0].tolist()]], dtype)
    g, _ = kda_gate((z.flatten() - bias).unsqueeze(0), logits, a_log, bias, -5.0)
    decay = [0.0820849986, 0.0150919958, 0.446458315, 0.02048147, 0.998640122, 0.006737947]
    close(torch.exp(g[0, :, 0]), decay, dtype, scale=10)


def _kda_example(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    rows = {
        "q": [[1.0, 1.0], [0.0, 2.0]],
        "k": [[3.0, 4.0], [1.0, 0.0]],
        "v": [[1.0, 2.0], [-1.0, 0.5]],
        "g": [[-1.0, -2.0], [-0.5, -0.25]],
    }
    tensors = {name: torch.tensor(values, dtype=dtype).unsqueeze(1) for name, values in rows.items()}
    return {**tensors, "beta": torch.tensor([[0.5], [0.25]], dtype=dtype)}


KDA_OUTPUTS = [[[0.34999991, 0.69999981]], [[0.22027809, 0.44055619]]]
KDA_STATES = [
    [[0.299999994, 0.399999992], [0.599999988, 0.799999984]],
    [[-0.11353043, 0.31152031], [0.39793882, 0.62304061]],
]


def _check_kda_steps(kda_core: Op, dtype: torch.dtype, phase: Phase) -> None:
    args, state = _kda_example(dtype), torch.zeros(3, 1, 2, 2, dtype=dtype)
    for t in range(2):
        row = {name: value[t : t + 1] for name, value in args.items()}
        o = kda_core(**row, state=state, segment=make_segment(phase, [1], [2]))
        close(o, [KDA_OUTPUTS[t]], dtype, scale=3, what=f"output {t}")
        close(state[2, 0], KDA_STATES[t], dtype, scale=3, what=f"state {t}")
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
    state = torch.zeros(3, 1, 2, 2, dtype=dtype)
    o = kda_core(**_kda_example(dtype), state=state, segment=make_segment("prefill", [2], [1]))
    close(o, KDA_OUTPUTS, dtype, scale=3)
    close(state[1, 0], KDA_STATES[1], dtype, scale=3)


def _check_l2norm(kda_core: Op, dtype: torch.dtype, phase: Phase) -> None:
    """q = k = [1e-3, 0]: the sum of squares equals the epsilon, so each is divided by sqrt(2e-6), not by 1e-3."""
    faint = torch.tensor([[[1e-3, 0.0]]], dtype=dtype)
    args = {
        "q": faint,
        "k": faint,
        "v": torch.tensor([[[1.0, -2.0]]], dtype=dtype),
        "g": torch.zeros(1, 1, 2, dtype=dtype),
    }
    state = torch.zeros(2, 1, 2, 2, dtype=dtype)
    o = kda_core(**args, beta=torch.ones(1, 1, dtype=dtype), state=state, segment=make_segment(phase, [1], [1]))
    close(o, [[[2**-1.5, -(2**-0.5)]]], dtype, what="output")
    close(state[1, 0], [[2**-0.5, 0.0], [-(2**0.5), 0.0]], dtype, what="state")


@golden("l2norm adds its epsilon to the sum, prefill", "kda_core", "prefill")
def check_l2norm_prefill(kda_core: Op, dtype: torch.dtype) -> None:
    _check_l2norm(kda_core, dtype, "prefill")


@golden("l2norm adds its epsilon to the sum, decode", "kda_core", "decode")
def check_l2norm_decode(kda_core: Op, dtype: torch.dtype) -> None:
    _check_l2norm(kda_core, dtype, "decode")


@golden("AttnRes example", "attn_res")
def check_attn_res(attn_res: Op, dtype: torch.dtype) -> None:
    blocks = torch.tensor([[[1.0, 2, 3, 4]], [[0.0, -1, 1, 0]]], dtype=dtype)
    partial = torch.tensor([[2.0, 0, -2, 1]], dtype=dtype)
    gamma, w = torch.tensor([1.0, 1, 2, 1], dtype=dtype), torch.tensor([0.5, -0.25, 0.1, 0], dtype=dtype)
    close(attn_res(blocks, partial, gamma, w, 1e-5), [[0.91401045, 0.12974146, 0.57081505, 1.39883595]], dtype, scale=2)
    # Unit rows out of reach of each other show the weights themselves.
    weights = [0.26909449, 0.40844753, 0.32245798]
    scores = [0.21908888, 0.63638974, 0.39999911]
    total = sum(math.exp(s) for s in scores)
    assert all(abs(math.exp(s) / total - a) < 1e-8 for s, a in zip(scores, weights, strict=True))


@golden("AttnRes of equal sources is the source", "attn_res")
def check_attn_res_equal(attn_res: Op, dtype: torch.dtype) -> None:
    source = torch.tensor([[3.0, -1.0, 0.5, 2.0]], dtype=dtype)
    blocks = source.expand(3, 1, 4)
    ones = torch.ones(4, dtype=dtype)
    close(attn_res(blocks, source, ones, 2 * ones, 1e-5), source.tolist(), dtype)
    close(attn_res(blocks[:0], source, ones, ones, 1e-5), source.tolist(), dtype, what="no blocks")


@golden("router example", "moe_route")
def check_router(moe_route: Op, dtype: torch.dtype) -> None:
    h = torch.tensor([[0.2, -0.1, 1.0, 0.9]], dtype=dtype)
    bias = torch.tensor([0.3, 0.0, -0.5, 0.0], dtype=dtype)
    router = RouterParams(torch.eye(4, dtype=dtype), bias, 2, False, True, 1.0)
    ids, weights = moe_route(h, router)
    assert ids.tolist() == [[0, 3]]
    close(weights, [[0.43610501, 0.56389499]], dtype)


@golden("router weights", "moe_route")
def check_router_weights(moe_route: Op, dtype: torch.dtype) -> None:
    """Scaling, renormalisation, top 1 (never renormalised) and softmax scores, at logits 0 and ln 3."""
    h = torch.tensor([[0.0, math.log(3), -20.0, -20.0]], dtype=dtype)
    weight = torch.eye(4, dtype=dtype)

    def route(top_k: int, softmax: bool, renormalize: bool, scale: float) -> list[list[float]]:
        ids, weights = moe_route(h, RouterParams(weight, None, top_k, softmax, renormalize, scale))
        assert ids.tolist() == [[1, 0][:top_k]]
        return weights

    close(route(2, False, True, 1.0), [[0.6, 0.4]], dtype)
    close(route(2, False, True, 2.446), [[1.4676, 0.9784]], dtype)
    close(route(2, False, False, 1.0), [[0.75, 0.5]], dtype)
    close(route(2, False, False, 2.0), [[1.5, 1.0]], dtype)
    close(route(1, False, True, 2.0), [[1.5]], dtype)
    rest = 2 * math.exp(-20)
    close(route(2, True, False, 1.0), [[3 / (4 + rest), 1 / (4 + rest)]], dtype)


@golden("router groups", "moe_route")
def check_router_groups(moe_route: Op, dtype: torch.dtype) -> None:
    """Group scores are sums of the two best: [.9 + .0], [.6 + .5], [.55 + .56] keep the last two; the best expert is out."""
    scores = [0.9, 0.001, 0.6, 0.5, 0.55, 0.56]
    h = torch.tensor([[math.log(s / (1 - s)) for s in scores]], dtype=dtype)
    router = RouterParams(torch.eye(6, dtype=dtype), None, 3, False, False, 1.0, num_groups=3, top_k_groups=2)
    ids, weights = moe_route(h, router)
    assert ids.tolist() == [[2, 5, 4]]
    close(weights, [[0.6, 0.56, 0.55]], dtype)


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


@golden("norm epsilons", "rms_norm")
def check_rms_norm(rms_norm: Op, dtype: torch.dtype) -> None:
    """A row whose mean square is 1e-6: eps 1e-6 halves its power, eps 1e-5 leaves an eleventh. The weight is as it is."""
    x = torch.tensor([[1e-3, -1e-3], [0.0, 0.0], [3.0, 4.0]], dtype=dtype)
    weight = torch.tensor([2.0, -0.5], dtype=dtype)
    for eps, size in ((1e-6, 2**-0.5), (1e-5, 11**-0.5)):
        large = (12.5 + eps) ** -0.5
        close(rms_norm(x, weight, eps), [[2 * size, 0.5 * size], [0, 0], [6 * large, -2 * large]], dtype)


@golden("gated norm", "gated_norm")
def check_gated_norm(gated_norm: Op, dtype: torch.dtype) -> None:
    """Per head, eps on the mean, sigmoid and not SiLU: a gate of -ln 3 leaves a quarter."""
    x = torch.tensor([[[3.0, 4.0], [3e-3, 4e-3]]], dtype=dtype)
    gate = torch.tensor([[[-math.log(3), 0.0], [math.log(3), 30.0]]], dtype=dtype)
    weight = torch.tensor([2.0, 1.0], dtype=dtype)
    one, two = (12.5 + 1e-5) ** -0.5, (12.5e-6 + 1e-5) ** -0.5
    expected = [[[6 * one / 4, 4 * one / 2], [6e-3 * two * 0.75, 4e-3 * two / (1 + math.exp(-30))]]]
    close(gated_norm(x, gate, weight, 1e-5), expected, dtype)


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
