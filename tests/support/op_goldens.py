"""Goldens of the ops without a state, and with them all others; see ``golden_base``."""

from __future__ import annotations

import math

import attention_goldens  # noqa: F401 - registers its checks
import torch
from gate_probe import probed
from golden_base import CHECKS, Op, close, golden

from k3port.ops.catalog import Phase
from k3port.ops.moe import RouterParams
from k3port.ops.sample import SamplingTensors

__all__ = ["CHECKS"]

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


def _check_gates(kda_core: Op, dtype: torch.dtype, phase: Phase) -> None:
    """One head per row of the table, so that ``A_log`` is read per head; z is split between the input and the bias."""
    heads, channels = len(GATES), 3
    a_log = torch.tensor([a for a, *_ in GATES], dtype=dtype)
    z = torch.tensor([[z] * channels for _, z, *_ in GATES], dtype=dtype)
    bias = torch.tensor([0.25, -0.5, 0.75], dtype=dtype).repeat(heads)
    logits = torch.tensor([[0.0, 2.0, -3.0, 0.5, 40.0, -40.0]], dtype=dtype)
    decays = [0.0820849986, 0.0150919958, 0.446458315, 0.02048147, 0.998640122, 0.006737947]
    for bound, column in ((-5.0, 2), (None, 3)):
        decay, beta = probed(kda_core, phase, (z.flatten() - bias).unsqueeze(0), logits, a_log, bias, bound)
        log_decays = torch.tensor([[[row[column]] * channels for row in GATES]]).double()
        if dtype == torch.float64:
            # A float32 state next to one tells little of a weak decay.
            close(decay.log(), log_decays, dtype, scale=5, what=f"bound {bound}")
        close(decay, log_decays.exp(), dtype, scale=40, what=f"bound {bound}")
        close(beta, [[1 / (1 + math.exp(-x)) for x in logits[0].tolist()]], dtype)
        if bound is not None:
            close(decay[0, :, 0], decays, dtype, scale=10)


@golden("KDA gates, prefill", "kda_core", "prefill")
def check_gates_prefill(kda_core: Op, dtype: torch.dtype) -> None:
    _check_gates(kda_core, dtype, "prefill")


@golden("KDA gates, decode", "kda_core", "decode")
def check_gates_decode(kda_core: Op, dtype: torch.dtype) -> None:
    _check_gates(kda_core, dtype, "decode")


@golden("AttnRes example", "attn_res")
def check_attn_res(attn_res: Op, dtype: torch.dtype) -> None:
    """The published mixture; then as three uses of the op: sum in place, block written, norm behind it."""
    blocks = torch.tensor([[[1.0, 2, 3, 4]], [[0.0, -1, 1, 0]], [[7.0, 7, 7, 7]]], dtype=dtype)
    total = torch.tensor([[2.0, 0, -2, 1]], dtype=dtype)
    gamma, w = torch.tensor([1.0, 1, 2, 1], dtype=dtype), torch.tensor([0.5, -0.25, 0.1, 0], dtype=dtype)
    mix = [0.91401045, 0.12974146, 0.57081505, 1.39883595]
    close(attn_res(total.clone(), None, blocks.clone(), 2, False, gamma, w, None, 1e-5), [mix], dtype, scale=2)
    # Unit rows out of reach of each other show the weights themselves.
    weights = [0.26909449, 0.40844753, 0.32245798]
    scores = [0.21908888, 0.63638974, 0.39999911]
    sum_of_exp = sum(math.exp(s) for s in scores)
    assert all(abs(math.exp(s) / sum_of_exp - a) < 1e-8 for s, a in zip(scores, weights, strict=True))
    # 0.5 is exact in every dtype.
    partial, pending = total - 0.5, torch.full_like(total, 0.5)
    norm_weight = torch.tensor([1.0, 2, 0.5, -1], dtype=dtype)
    rms = math.sqrt(sum(x * x for x in mix) / 4 + 1e-5)
    normed = [x / rms * n for x, n in zip(mix, norm_weight.tolist(), strict=True)]
    for write in (False, True):
        p, bank = partial.clone(), blocks.clone()
        close(attn_res(p, pending, bank, 2, write, gamma, w, norm_weight, 1e-5), [normed], dtype, scale=2)
        assert torch.equal(p, partial if write else total)
        assert torch.equal(bank, torch.cat((blocks[:2], total.unsqueeze(0))) if write else blocks)


@golden("AttnRes of equal sources is the source", "attn_res")
def check_attn_res_equal(attn_res: Op, dtype: torch.dtype) -> None:
    source = torch.tensor([[3.0, -1.0, 0.5, 2.0]], dtype=dtype)
    blocks = source.repeat(3, 1, 1)
    ones = torch.ones(4, dtype=dtype)
    close(attn_res(source, None, blocks, 3, False, ones, 2 * ones, None, 1e-5), source.tolist(), dtype)
    close(attn_res(source, None, blocks, 0, False, ones, ones, None, 1e-5), source.tolist(), dtype, what="no blocks")


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


def _sampling(rows: int, **settings: float) -> SamplingTensors:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    tensors = {name: torch.full((rows,), value, dtype=torch.float64) for name, value in values.items()}
    return SamplingTensors(**{**tensors, "top_k": tensors["top_k"].long()})


@golden("sampling", "sample")
def check_sampling(sample: Op, dtype: torch.dtype) -> None:
    """Probabilities .1 .4 .2 .05 .25: which ids each setting keeps, and where each begins in id order."""
    probs = [0.1, 0.4, 0.2, 0.05, 0.25]
    logits = torch.tensor([[math.log(p) for p in probs]], dtype=dtype)

    def starts(**settings: float) -> dict[int, float]:
        """Each kept id with its share of a thousand even draws."""
        uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
        ids = sample(logits.expand(1000, -1), _sampling(1000, **settings), uniform)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, ids.sort().values), "the draw goes through the ids in order"
        return {int(i): int((ids == i).sum()) / 1000 for i in ids.unique()}

    def kept(*ids: int) -> dict[int, float]:
        total = sum(probs[i] for i in ids)
        return {i: probs[i] / total for i in ids}

    for settings, ids in (
        ({}, (0, 1, 2, 3, 4)),
        ({"top_k": 1}, (1,)),
        ({"top_k": 3}, (1, 2, 4)),
        ({"top_k": 99}, (0, 1, 2, 3, 4)),
        # .4 and .4 + .25 = .65 do not reach .66, with .2 it does.
        ({"top_p": 0.66}, (1, 2, 4)),
        ({"top_p": 0.64}, (1, 4)),
        ({"top_p": 1e-9}, (1,)),
        # Among the three best, .4 is .47 and .65 is .76.
        ({"top_k": 3, "top_p": 0.75}, (1, 4)),
        ({"min_p": 0.45}, (1, 2, 4)),
        ({"min_p": 0.3}, (1, 2, 4)),
        ({"min_p": 0.2}, (0, 1, 2, 4)),
        ({"min_p": 1.0}, (1,)),
    ):
        found, wanted = starts(**settings), kept(*ids)
        assert found.keys() == wanted.keys(), (settings, found)
        assert all(abs(found[i] - wanted[i]) < 2e-3 for i in wanted), (settings, found)
    # A temperature of 1/2 squares the probabilities.
    total = sum(p * p for p in probs)
    assert all(abs(share - probs[i] ** 2 / total) < 2e-3 for i, share in starts(temperature=0.5).items())
    assert starts(temperature=0.0) == {1: 1.0}
    ties = torch.tensor([[0.0, 2.0, 1.0, 2.0]], dtype=dtype)
    assert sample(ties, _sampling(1, temperature=0.0), torch.tensor([0.99], dtype=torch.float64)).tolist() == [1]
    assert sample(ties, _sampling(1, top_k=1), torch.tensor([0.99], dtype=torch.float64)).tolist() == [1]
