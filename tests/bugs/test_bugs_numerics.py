"""Numerics faults that other implementations had, by their number in the project's list: all kernels that run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from builtin_kernels import CPU, KERNELS, functions, runnable
from gate_probe import probed

from k3port.errors import PlanError
from k3port.model.config_file import parse_config
from k3port.model.k3 import K3Model, Layer
from k3port.model.step import ModelState, Step
from k3port.model.weights import runtime_params
from k3port.ops.catalog import PHASES, Phase
from k3port.ops.contract import relative_rms
from k3port.ops.kda import kda_gate
from k3port.ops.kda_samples import CORE_INPUTS, core_inputs, undone_gate
from k3port.ops.moe import RouterParams
from k3port.ops.segment import make_segment
from k3port.ops.table import SLOTS, OpTable
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import KernelSpec, OpQuery, Target
from k3port.testing.harness import build_kernel
from k3port.testing.synthetic import tiny_k3_config

Op = Callable[..., Any]
F32, BF16 = torch.float32, torch.bfloat16


def each_kernel(op: str, phase: Phase | None = None) -> pytest.MarkDecorator:
    specs = runnable(op, phase)
    assert any(s.is_reference for s in specs)
    return pytest.mark.parametrize(
        "kernel", [build_kernel(s, KERNELS, phase) for s in specs], ids=[s.name for s in specs]
    )


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@each_kernel("moe_route")
@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_b37_router_of_896_experts_top_16(kernel: Op, tokens: int) -> None:
    weight, bias = torch.randn(896, 32, generator=gen()) * 32**-0.5, torch.randn(896, generator=gen(1)) * 0.1
    h = torch.randn(tokens, 32, generator=gen(2))
    ids, weights = kernel(h, RouterParams(weight, bias, 16, False, True, 2.5))
    scores = torch.sigmoid(h @ weight.T)
    wanted = torch.topk(scores + bias, 16, dim=-1)
    # Random scores hardly tie, so topk has one answer; where it is close, either order is right.
    assert torch.equal((scores + bias).gather(-1, ids), wanted.values)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 896
    assert all(len(set(row)) == 16 for row in ids.tolist())
    unbiased = scores.gather(-1, ids)
    assert torch.allclose(weights, unbiased / unbiased.sum(dim=-1, keepdim=True) * 2.5, rtol=1e-5)
    assert torch.allclose(weights.sum(dim=-1), torch.full((tokens,), 2.5), rtol=1e-6)


@each_kernel("moe_route")
@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_b37_equal_scores_take_the_lowest_experts(kernel: Op, tokens: int) -> None:
    router = RouterParams(torch.zeros(896, 8), torch.zeros(896), 16, False, True, 1.0)
    ids, weights = kernel(torch.randn(tokens, 8, generator=gen()), router)
    assert torch.equal(ids, torch.arange(16).expand(tokens, 16))
    assert torch.allclose(weights, torch.full((tokens, 16), 1 / 16), rtol=1e-6)


def test_b37_a_kernel_with_a_smaller_limit_is_refused_by_name() -> None:
    def at_most_8(query: OpQuery, target: Target) -> str | None:
        return f"chooses at most 8 experts, the model has {query.axes['X']}" if query.axes["X"] > 8 else None

    stub = KernelSpec("stub.route", "moe_route", "stub:route", "top 8 only", check=at_most_8, priority=999)
    for top_k, kernel in ((8, "stub.route"), (16, "reference.moe_route")):
        query = OpQuery("moe_route", None, {"E": 896, "X": top_k}, "float32")
        plan = resolve([query], [*KERNELS, stub], CPU)
        assert plan.selection("moe_route").kernel == kernel
    with pytest.raises(PlanError, match="chooses at most 8 experts, the model has 16"):
        resolve([query], [stub], CPU)


@pytest.mark.parametrize("phase", PHASES)
def test_b40_bounded_gate_is_a_sigmoid_not_a_clamped_softplus(phase: Phase) -> None:
    kernels = functions("kda_core", phase)
    assert kernels
    for kernel in kernels:
        raw, logit = torch.zeros(1, 4), torch.zeros(1, 2)
        bounded, _ = probed(kernel, phase, raw, logit, torch.zeros(2), torch.zeros(4), -5.0)
        assert torch.allclose(bounded, torch.tensor(math.exp(-2.5)))
        softplus, _ = probed(kernel, phase, raw, logit, torch.zeros(2), torch.zeros(4), None)
        assert torch.allclose(softplus, torch.tensor(0.5))
        a_log, bias = torch.tensor([0.5, -1.0]), torch.tensor([1.0, -2.0, 3.0, 0.5])
        softplus, _ = probed(kernel, phase, raw, logit, a_log, bias, None)
        by_hand = [-math.exp(a_log[i // 2]) * math.log1p(math.exp(bias[i])) for i in range(4)]
        assert torch.allclose(softplus.flatten().log(), torch.tensor(by_hand), rtol=2e-6)
        far, _ = probed(kernel, phase, raw + 1e4, logit, a_log, bias, None)
        assert torch.equal(far, torch.zeros_like(far)), "softplus must not overflow"


@contextmanager
def exponents_never_positive() -> Iterator[list[int]]:
    """Every exponential taken from Python: its largest argument must be at most zero."""
    seen: list[int] = []

    def watched(exp: Op) -> Op:
        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(x.numel())
            assert not (x > 0).any(), f"an exponent of {float(x.max())} reached exp"
            return exp(x, *args, **kwargs)

        return run

    with ExitStack() as stack:
        for owner in (torch, torch.Tensor):
            for name in ("exp", "exp_"):
                stack.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name))))
        yield seen


def step_by_step(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of the formula in float64, one request in slot 1."""
    q, k, v = (args[name].double() for name in ("q", "k", "v"))
    given = (args[name].double() for name in ("gate_raw", "beta_logit", "A_log", "dt_bias"))
    g, beta = kda_gate(*given, args["lower_bound"])
    q = q / (q.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt() * q.shape[-1] ** -0.5
    k = k / (k.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
    s, out = args["state"][1].double(), []
    for t in range(q.shape[0]):
        s = s * g[t].exp().unsqueeze(1)
        u = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
        s = s + torch.einsum("hv,hk->hvk", u, k[t])
        out.append(torch.einsum("hvk,hk->hv", s, q[t]))
    return torch.stack(out), s


@each_kernel("kda_core", "prefill")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [64, 130])
@pytest.mark.parametrize("gate", [-0.1, -2.5, -3.0, -5.0, "mixed"])
def test_b41_no_overflow_at_any_decay(kernel: Op, dtype: torch.dtype, tokens: int, gate: float | str) -> None:
    args = core_inputs(dtype, gen(), [tokens], [1])
    choices = torch.tensor([-0.1, -2.5, -3.0, -5.0] if gate == "mixed" else [gate])
    g = choices[torch.randint(0, len(choices), args["k"].shape, generator=gen(1))]
    # exp(A_log) goes through the watched exponentials too.
    args |= {"A_log": torch.zeros(2), "dt_bias": torch.zeros(256)}
    args["gate_raw"] = undone_gate(g, args["A_log"], args["lower_bound"]).flatten(1).to(dtype)
    wanted, last = step_by_step(args)
    with exponents_never_positive() as seen:
        out = kernel(**args)
    assert sum(seen) >= tokens * 2 * 128, "the decays went through the watched exponentials"
    assert torch.isfinite(out).all()
    assert relative_rms(out, wanted) < (2e-6 if dtype == F32 else 3e-3)
    assert relative_rms(args["state"][1], last) < 2e-6


@each_kernel("kda_core", "prefill")
@pytest.mark.parametrize("gate", [0.0, -1e-4, -1e-2])
def test_b42_repeated_keys_keep_their_conditioning(kernel: Op, gate: float) -> None:
    """One key 64 times with beta 0.99: the strictly lower matrix is near ones, which repeated squaring cannot invert."""
    args = core_inputs(F32, gen(), [64], [1], gate=gate)
    args["k"] = args["k"][:1].expand(64, -1, -1).contiguous()
    args["beta_logit"] = torch.full((64, 2), math.log(0.99 / 0.01))
    k = args["k"].double() / args["k"].double().norm(dim=-1, keepdim=True)
    mix = 0.99 * torch.einsum("thk,shk->hts", k, k).tril(-1)
    assert float(mix[:, 1:, 0].min()) > 0.98, "the matrix is near ones"
    wanted, last = step_by_step(args)
    out = kernel(**args)
    assert relative_rms(out, wanted) < 5e-6
    assert relative_rms(args["state"][1], last) < 5e-6


LENGTHS = [1, 1, 64, 65]


@each_kernel("kda_core", "prefill")
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [LENGTHS, [1, 0, 1, 64, 0, 65], [0], [1]], ids=str)
def test_b43_sequences_of_length_one_and_zero_in_a_prefill(kernel: Op, dtype: torch.dtype, lengths: list[int]) -> None:
    slots = list(range(1, len(lengths) + 1))[::-1]
    args = core_inputs(dtype, gen(), lengths, slots)
    before = args["state"].clone()
    if lengths == LENGTHS:
        assert args["segment"].cu_seqlens.tolist() == [0, 1, 2, 66, 131]
    together = kernel(**args)
    assert together.shape[0] == sum(lengths)
    assert torch.isfinite(together).all()
    for (begin, end), slot, length in zip(args["segment"].spans(), slots, lengths, strict=True):
        state = before.clone()
        part = args | {name: args[name][begin:end] for name in CORE_INPUTS}
        alone = kernel(**part | {"state": state, "segment": make_segment("prefill", [length], [slot])})
        if length:
            assert relative_rms(together[begin:end], alone) < (1e-6 if dtype == F32 else 2e-3)
            assert relative_rms(args["state"][slot], state[slot]) < 1e-6
        else:
            assert torch.equal(args["state"][slot], before[slot])


def plain_conv(x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """A loop over tokens and taps in float64."""
    window = torch.cat((tail, x)).double()
    rows = [sum(window[t + j] * weight[:, j].double() for j in range(4)) for t in range(x.shape[0])]
    y = torch.stack(rows)
    return y / (1 + torch.exp(-y))


@pytest.mark.parametrize(
    "prefill", functions("short_conv", "prefill"), ids=[s.name for s in runnable("short_conv", "prefill")]
)
@pytest.mark.parametrize(
    "decode", functions("short_conv", "decode"), ids=[s.name for s in runnable("short_conv", "decode")]
)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("width", [512, 768, 12288])
def test_b47_decode_after_prefill_is_one_long_prefill(prefill: Op, decode: Op, batch: int, width: int) -> None:
    tokens, steps = (3, 2) if batch == 64 else (6, 3)
    weight = torch.randn(width, 4, generator=gen()) * 0.5
    x = torch.randn(batch, tokens + steps, width, generator=gen(1))
    slots = torch.randperm(batch, generator=gen(2)).add(1).tolist()
    start = torch.randn(batch + 2, 3, width, generator=gen(3))
    whole_tail, tail = start.clone(), start.clone()
    whole = prefill(x.flatten(0, 1), weight, whole_tail, make_segment("prefill", [tokens + steps] * batch, slots))
    first = prefill(x[:, :tokens].flatten(0, 1), weight, tail, make_segment("prefill", [tokens] * batch, slots))
    parts = [first.view(batch, tokens, width)]
    for t in range(tokens, tokens + steps):
        parts.append(decode(x[:, t], weight, tail, make_segment("decode", [1] * batch, slots)).unsqueeze(1))
    assert relative_rms(torch.cat(parts, dim=1), whole.view(batch, -1, width)) < 5e-7
    assert torch.equal(tail, whole_tail)
    for row in (0, batch - 1):
        expected = plain_conv(x[row], weight, start[slots[row]])
        assert relative_rms(whole.view(batch, -1, width)[row], expected) < 5e-7
        assert torch.equal(tail[slots[row]], x[row, -3:])
    assert torch.equal(tail[0], start[0])
    assert torch.equal(tail[batch + 1], start[batch + 1])


def test_b47_the_layout_of_the_tail_is_declared() -> None:
    """Prefill and decode kernels agree on it by tag, so a kernel with another one cannot be mixed in silently."""
    specs = [s for s in KERNELS if s.op == "short_conv"]
    assert len(specs) >= 3
    assert {s.layouts.get("conv_state") for s in specs} == {"wp"}
    queries = [OpQuery("short_conv", phase, {}, "float32") for phase in ("prefill", "decode")]
    step = replace(
        next(s for s in specs if s.phases == ("decode",)), name="test.step", layouts={"conv_state": "pw"}, priority=900
    )
    plan = resolve(queries, [*KERNELS, step], CPU)
    chosen = {s.kernel for s in plan.selections}
    assert "test.step" not in chosen, "its layout has no prefill kernel"
    prefill = next(s for s in specs if s.phases == ("prefill",))
    with pytest.raises(PlanError, match="agrees on layouts"):
        resolve(queries, [prefill, step], CPU)


@pytest.mark.parametrize("kernel", functions("attn_res"), ids=[s.name for s in runnable("attn_res")])
def test_b52_blocks_are_counted_in_layers_and_the_final_mix_comes_before_the_norm(
    kernel: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """93 layers in blocks of 12: boundaries at 0, 12, ..., 84, and nine sources at the end."""
    values = tiny_k3_config()
    kda = {"kda_layers": list(range(1, 94)), "full_attn_layers": []}
    linear = values["text_config"]["linear_attn_config"]
    values["text_config"] |= {
        "num_hidden_layers": 93,
        "attn_res_block_size": 12,
        "linear_attn_config": {**linear, **kda},
    }
    config = parse_config(values)
    assert config.num_blocks == 8
    params: dict[str, Any] = {p.name: torch.zeros(p.shape) for p in runtime_params(config)}
    params |= {f"layers.{i}.moe.experts": None for i in range(93) if config.is_moe(i)}
    # All norms keep what they get, up to its size.
    params |= {name: torch.ones(64) for name in params if name == "norm.weight" or name.endswith("_norm")}
    seen: list[torch.Tensor] = []
    last: list[torch.Tensor] = []

    def attn_res(
        partial: torch.Tensor, pending: torch.Tensor | None, blocks: torch.Tensor, num_blocks: int, *args: Any
    ) -> torch.Tensor:
        *between, norm_weight, eps = args
        total = partial if pending is None else partial + pending
        seen.append(torch.cat((blocks[:num_blocks], total.unsqueeze(0))).mean(dim=(1, 2)))
        if norm_weight is model.norm:
            last.append(kernel(partial.clone(), pending, blocks, num_blocks, *between, None, eps))
        return kernel(partial, pending, blocks, num_blocks, *args)

    ops: dict[str, Op] = dict.fromkeys(SLOTS, lambda *_: pytest.fail("an op that this test replaces was called"))
    ops |= {
        "embed": lambda ids, weight, first: torch.full((2, 64), 1000.0),
        "all_reduce": lambda x: x,
        "all_gather": lambda x: x,
        "logits": lambda x, weight: x,
        "attn_res": attn_res,
    }
    attention = {i: float(i + 1) for i in range(93)}
    mlp = {i: 0.25 * (i + 1) for i in range(93)}
    order: list[tuple[str, int]] = []

    def sublayer(name: str, outputs: dict[int, float]) -> Op:
        def run(self: K3Model, layer: Layer, x: torch.Tensor, *args: Any) -> torch.Tensor:
            order.append((name, len(seen)))
            return torch.full_like(x, outputs[layer.index])

        return run

    monkeypatch.setattr(K3Model, "_attention", sublayer("attention", attention))
    monkeypatch.setattr(K3Model, "_mlp", sublayer("mlp", mlp))
    model = K3Model(config, params, OpTable(ops))
    logits = model.forward(Step(torch.tensor([1, 2]), (), torch.arange(2)), ModelState({}, {}))

    both = {i: attention[i] + mlp[i] for i in range(93)}
    blocks = [1000.0, *(sum(both[i] for i in range(12 * (k - 1), 12 * k)) for k in range(1, 8))]
    # Sources of every mixture: step 1 of each layer, step 6 of each layer, then the last.
    wanted: list[list[float]] = []
    for i in range(93):
        started, begin = -(-i // 12), i - i % 12
        running = 1000.0 if i == 0 else sum(both[j] for j in range(begin if i % 12 else begin - 12, i))
        wanted.append([*blocks[:started], running])
        running = attention[i] + (running if i % 12 else 0)
        wanted.append([*blocks[: i // 12 + 1], running])
    wanted.append([*blocks, sum(both[i] for i in range(84, 93))])
    assert len(seen) == len(wanted) == 187
    for sources, expected in zip(seen, wanted, strict=True):
        assert sources.tolist() == pytest.approx(expected, rel=1e-6)
    assert len(wanted[-1]) == 9
    # Zero scores mix evenly; the last norm sees that mixture, and nothing mixes after it.
    assert len(last) == 1
    assert torch.allclose(last[0], torch.full((2, 64), sum(wanted[-1]) / 9))
    assert torch.allclose(logits, torch.ones(2, 64))
    assert [name for name, _ in order] == ["attention", "mlp"] * 93
    assert order[-1][1] == 186, "the last mixture comes after the last layer"
