"""The two tiny models against the published tables: logits, depth, states, cache, routing; all plans, any split of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_goldens import (
    K3_BETA,
    K3_CHECKS,
    K3_EXPERTS,
    K3_LOG_DECAY,
    K3_LOGITS,
    LINEAR_LOGITS,
    PROMPT,
    check_k3_conv_tail,
    check_k3_logits,
    check_k3_states,
    check_linear_logits,
    check_logits,
    near,
)
from model_runs import DEFAULT, REFERENCE, Run, cached_runtime, run

from k3port.model.kda import KdaAttention
from k3port.model.step import Step
from k3port.ops.contract import relative_rms
from k3port.ops.kda import kda_gate
from k3port.ops.segment import make_segment

SETTINGS = [(dtype, plan) for dtype in ("float64", "float32") for plan in (REFERENCE, DEFAULT)]
each_setting = pytest.mark.parametrize(("dtype", "plan"), SETTINGS)
# One step per token, uneven prefill chunks, and prefill then decode.
SPLITS = [[1] * 6, [2, 1, 3], [5, 1], [3, 1, 1, 1]]


@pytest.fixture(scope="module")
def k3_runs(tiny_k3_folder: Path) -> dict[tuple[str, str], Run]:
    return {setting: run(cached_runtime(tiny_k3_folder, *setting), PROMPT) for setting in SETTINGS}


@each_setting
@pytest.mark.parametrize("name", K3_CHECKS)
def test_tiny_k3(k3_runs: dict[tuple[str, str], Run], dtype: str, plan: str, name: str) -> None:
    K3_CHECKS[name](k3_runs[dtype, plan])


@each_setting
def test_tiny_kimi_linear(tiny_linear_folder: Path, dtype: str, plan: str) -> None:
    check_linear_logits(run(cached_runtime(tiny_linear_folder, dtype, plan), PROMPT))


@each_setting
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_any_split_gives_the_same_numbers(
    tiny_k3_folder: Path,
    tiny_linear_folder: Path,
    k3_runs: dict[tuple[str, str], Run],
    dtype: str,
    plan: str,
    split: list[int],
) -> None:
    """Prefill in chunks and token by token: logits, states, tails and cache, against the tables and against one step."""
    parts, whole = run(cached_runtime(tiny_k3_folder, dtype, plan), PROMPT, split), k3_runs[dtype, plan]
    check_k3_logits(parts)
    check_k3_states(parts)
    check_k3_conv_tail(parts)
    bound = 1e-12 if dtype == "float64" else 5e-6
    for layer in range(3):
        assert relative_rms(parts.recurrent[layer], whole.recurrent[layer]) < bound
        assert relative_rms(parts.conv[layer], whole.conv[layer]) < bound
    assert relative_rms(parts.cache[3], whole.cache[3]) < bound
    check_linear_logits(run(cached_runtime(tiny_linear_folder, dtype, plan), PROMPT, split))


@each_setting
def test_gate_of_the_first_token(tiny_k3_folder: Path, dtype: str, plan: str) -> None:
    """Write strengths and log decays of layer 0, from the model's own weights: A_log per head, dt_bias inside."""
    runtime = cached_runtime(tiny_k3_folder, dtype, plan)
    layer, table = runtime.model.layers[0], runtime.table
    assert isinstance(layer.attention, KdaAttention)
    kda = layer.attention
    x = table.embed(torch.tensor([PROMPT[0]]), runtime.model.embed, 0)
    h = table.rms_norm(x, layer.input_norm, runtime.config.norm_eps)
    _, _, f_a, logit, _ = table.linear(h, kda.in_proj).split(kda.splits, dim=-1)
    params = kda.params
    g, beta = kda_gate(table.linear(f_a, kda.f_b), logit, params.A_log, params.dt_bias, params.lower_bound)
    near(beta[0], K3_BETA, 2e-6, "beta")
    near(g[0, 0, :3], K3_LOG_DECAY, 5e-6, "log decay of head 0")


def test_bfloat16_keeps_the_choices(tiny_k3_folder: Path, tiny_linear_folder: Path) -> None:
    """Rounded activations move a logit by 0.067 in the official code; experts and best tokens stay."""
    k3 = run(cached_runtime(tiny_k3_folder, "bfloat16", DEFAULT), PROMPT)
    assert k3.logits.dtype == torch.float32
    difference = check_logits(k3.logits, K3_LOGITS, 0.15)
    assert difference > 1e-3, "bfloat16 was really used"
    # Pairs of nearly equal scores may change places.
    for (ids, _), experts in zip(k3.routing, K3_EXPERTS, strict=True):
        assert [sorted(row) for row in ids.tolist()] == [sorted(row) for row in experts]
    decoded = run(cached_runtime(tiny_k3_folder, "bfloat16", DEFAULT), PROMPT, [2, 1, 1, 1, 1])
    check_logits(decoded.logits, K3_LOGITS, 0.15)
    check_logits(run(cached_runtime(tiny_linear_folder, "bfloat16", DEFAULT), PROMPT).logits, LINEAR_LOGITS, 0.15)


@each_setting
def test_requests_of_both_phases_share_a_step(
    tiny_k3_folder: Path, k3_runs: dict[tuple[str, str], Run], dtype: str, plan: str
) -> None:
    """Two requests decode while a third is prefilled: each row as if its request were alone."""
    runtime = cached_runtime(tiny_k3_folder, dtype, plan)
    pools, prompts = runtime.pools, [list(PROMPT), [8, 8, 90], [33] * 5]
    slots, pages = [pools.states.allocate() for _ in prompts], [pools.pages.allocate(1) for _ in prompts]
    try:
        for i, length in ((0, 5), (1, 2)):
            segment = make_segment("prefill", [length], [slots[i]], [0], [pages[i]])
            first = Step(torch.tensor(prompts[i][:length]), (segment,), torch.tensor([0]))
            runtime.model.forward(first, pools.model_state)
        segments = (
            make_segment("decode", [1, 1], slots[:2], [5, 2], pages[:2]),
            make_segment("prefill", [5], slots[2:], [0], pages[2:], start=2),
        )
        step = Step(torch.tensor([PROMPT[5], 90, *prompts[2]]), segments, torch.arange(7))
        logits = runtime.model.forward(step, pools.model_state)
    finally:
        for slot, taken in zip(slots, pages, strict=True):
            pools.states.release(slot)
            pools.pages.release(taken)
    bound = 1e-12 if dtype == "float64" else 5e-6
    assert relative_rms(logits[0], k3_runs[dtype, plan].logits[5]) < bound
    assert relative_rms(logits[1], runtime.logits(prompts[1])[2]) < bound
    assert relative_rms(logits[2:], runtime.logits(prompts[2])) < bound


def test_plans_differ(tiny_k3_folder: Path) -> None:
    """The two plans compared here are two: all references, and the CPU kernels where there are any."""
    reference, cpu = (cached_runtime(tiny_k3_folder, "float32", plan).plan for plan in (REFERENCE, DEFAULT))
    kernels = {s.slot: s.kernel for s in reference.selections}
    assert all(name.startswith("reference.") for name in kernels.values())
    chosen = {s.kernel for s in cpu.selections}
    assert {"cpu.kda_core_chunk", "cpu.kda_core_step", "cpu.mla_attend_sdpa", "cpu.moe_experts_dense"} <= chosen


def test_batch_of_prompts_equals_each_alone(tiny_k3_folder: Path) -> None:
    """Greedy continuations do not depend on company; float64 leaves no room for near ties."""
    from k3port.runtime.request import SamplingParams

    runtime = cached_runtime(tiny_k3_folder, "float64", DEFAULT)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [list(PROMPT), [7], list(range(40, 100)), [3, 3, 3]]
    together = runtime.generate(prompts, greedy)
    for prompt, generation in zip(prompts, together, strict=True):
        assert runtime.generate([prompt], greedy)[0].token_ids == generation.token_ids
        logits = runtime.logits([*prompt, *generation.token_ids[:-1]])
        assert tuple(logits[len(prompt) - 1 :].argmax(dim=-1).tolist()) == generation.token_ids
