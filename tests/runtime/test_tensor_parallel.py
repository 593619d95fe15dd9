"""Tensor parallelism on threads of one process: the same logits for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import thread_collectives
import torch
from builtin_kernels import CPU
from model_goldens import K3_LOGITS, LINEAR_LOGITS, PROMPT, check_logits
from one_thread import one_thread  # noqa: F401
from thread_collectives import Group, run_ranks

from k3port.errors import ConfigError, PlanError
from k3port.model.k3 import K3Model
from k3port.model.shapes import kda_in_proj_rows, legal_tp_sizes, rank_dims
from k3port.model.step import Step
from k3port.ops.contract import relative_rms
from k3port.ops.segment import make_segment
from k3port.oracle.resolve import resolve
from k3port.plugins import make_registry
from k3port.runtime.binding import bind_table, pack_function
from k3port.runtime.loader import load_weights
from k3port.runtime.planner import Workload, model_queries
from k3port.runtime.pools import Pools
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config, write_checkpoint

REGISTRY = make_registry([thread_collectives], entry_points=False)
KERNELS = {spec.name: spec for spec in REGISTRY.kernels}
DTYPES = {torch.float32: 1e-4, torch.float64: 1e-11}


def sixteen_heads() -> dict[str, Any]:
    """Sixteen heads of both kinds, and experts wide enough for eight ranks."""
    values = tiny_k3_config()
    text = values["text_config"]
    text |= {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 256,
        "intermediate_size": 128,
    }
    text["linear_attn_config"] = {**text["linear_attn_config"], "num_heads": 16, "head_dim": 16}
    return values


def logits_of(folder: Path, ranks: int, dtype: torch.dtype, ids: list[int], steps: list[int]) -> list[torch.Tensor]:
    """Logits of every position, as each rank has them: a prefill and single tokens."""
    checkpoint = check_checkpoint(folder)
    config, group = checkpoint.config, Group(ranks)
    name = str(dtype).removeprefix("torch.")
    weight_format = "mxfp4" if checkpoint.mxfp4 else config.dtype
    queries = model_queries(config, Workload(name, weight_format, tp=ranks))
    plan = resolve(queries, REGISTRY.kernels, CPU)
    assert plan.selection("all_reduce").kernel == "threads.all_reduce"

    def rank_logits(rank: int) -> torch.Tensor:
        pack = pack_function(plan, KERNELS)
        weights = load_weights(checkpoint, dtype=dtype, pack_experts=pack, tp_rank=rank, tp_size=ranks)
        model = K3Model(config, weights.params, bind_table(plan, KERNELS), rank, ranks)
        dims = rank_dims(config, rank, ranks, mxfp4=checkpoint.mxfp4)
        pools = Pools(config, dims, num_requests=1, num_tokens=64, dtype=dtype)
        slot, pages = pools.states.allocate(), pools.pages.allocate(1)
        parts, done = [], 0
        for length in steps:
            phase = "decode" if length == 1 and done else "prefill"
            segment = make_segment(phase, [length], [slot], [done], [pages])
            step = Step(torch.tensor(ids[done : done + length]), (segment,), torch.arange(length))
            parts.append(model.forward(step, pools.model_state))
            done += length
        return torch.cat(parts)

    results = run_ranks(group, rank_logits)
    # Per step: the embedding, one per attention, one per dense layer, two per MoE layer, and the logits.
    moe = sum(config.is_moe(layer) for layer in range(config.num_layers))
    assert group.calls == len(steps) * (2 + config.num_layers + (config.num_layers - moe) + 2 * moe)
    return results


CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "tiny-k3": tiny_k3_config,
    "tiny-kimi-linear": tiny_kimi_linear_config,
    "sixteen heads": sixteen_heads,
}
RANKS = [("tiny-k3", 2), ("tiny-kimi-linear", 2), ("tiny-kimi-linear", 4), *(("sixteen heads", n) for n in (2, 4, 8))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    return {name: write_checkpoint(root / name.replace(" ", "-"), values()) for name, values in CONFIGS.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "ranks"), RANKS, ids=[f"{name}-tp{ranks}" for name, ranks in RANKS])
def test_ranks_agree_with_one(folders: dict[str, Path], name: str, ranks: int, dtype: torch.dtype) -> None:
    ids, steps = [*PROMPT, 3, 99, 41], [6, 1, 1, 1]
    (alone,) = logits_of(folders[name], 1, dtype, ids, steps)
    together = logits_of(folders[name], ranks, dtype, ids, steps)
    assert alone.shape == (9, 128)
    for logits in together:
        assert torch.equal(logits, together[0]), "every rank has the same bits"
    assert float((together[0] - alone).abs().max()) < DTYPES[dtype]
    assert relative_rms(together[0], alone) < (1e-5 if dtype == torch.float32 else 1e-12)
    golden = {"tiny-k3": K3_LOGITS, "tiny-kimi-linear": LINEAR_LOGITS}.get(name)
    if golden is not None:
        check_logits(together[0][:6], golden, 1e-4)


def test_published_sizes_of_two_ranks(folders: dict[str, Path]) -> None:
    """Heads 2 + 2, dense 48 + 48, shared 64 + 64, experts 32 + 32, vocabulary 64 + 64, merged rows 290 padded to 304."""
    checkpoint = check_checkpoint(folders["tiny-k3"])
    whole, halves = (
        [
            load_weights(checkpoint, dtype=torch.float32, pack_experts=lambda s, d: s, tp_rank=r, tp_size=n).params
            for r in range(n)
        ]
        for n in (1, 2)
    )
    (full,) = whole
    for rank, params in enumerate(halves):
        own = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(params["layers.0.kda.A_log"], full["layers.0.kda.A_log"][own])
        assert params["layers.0.kda.in_proj"].shape == (304, 64)
        assert not params["layers.0.kda.in_proj"][290:].any()
        rows = kda_in_proj_rows(rank_dims(checkpoint.config, rank, 2))
        assert list(rows.values()) == [64, 64, 64, 64, 32, 2, 14]
        assert params["layers.0.mlp.gate_up"].shape == (96, 64)
        assert params["layers.1.moe.shared_gate_up"].shape == (128, 64)
        assert params["embed.weight"].shape == params["lm_head.weight"].shape == (64, 64)
        experts = params["layers.1.moe.experts"]
        assert experts.width == 32
        assert (experts.down[0].packed.shape, experts.down[0].scale.shape) == ((32, 16), (32, 1))


def test_four_ranks_of_the_tiny_model_are_refused() -> None:
    """An expert slice of 16 is half a scale group."""
    from k3port.model.config_file import parse_config

    config = parse_config(tiny_k3_config())
    assert legal_tp_sizes(config) == (1, 2)
    with pytest.raises(ConfigError, match="expert width 64 / 4 = 16 is not a multiple of 32"):
        model_queries(config, Workload("float32", "mxfp4", tp=4))


def test_without_collectives_two_ranks_have_no_plan() -> None:
    from k3port.model.config_file import parse_config

    queries = model_queries(parse_config(tiny_k3_config()), Workload("float32", "mxfp4", tp=2))
    with pytest.raises(PlanError, match="serves 1 ranks, asked for 2"):
        resolve(queries, make_registry(entry_points=False).kernels, CPU)


def test_a_missing_reduction_is_seen(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: ranks that keep their partial sums are far off."""

    def keeps_its_own(x: torch.Tensor) -> torch.Tensor:
        thread_collectives.all_gather(x)
        return x

    (alone,) = logits_of(folders["tiny-k3"], 1, torch.float32, list(PROMPT), [6])
    monkeypatch.setattr(thread_collectives, "all_reduce", keeps_its_own)
    broken = logits_of(folders["tiny-k3"], 2, torch.float32, list(PROMPT), [6])
    assert relative_rms(broken[0], alone) > 0.1


def test_a_rank_that_fails_does_not_hang_the_others() -> None:
    def fails_on_one(rank: int) -> torch.Tensor:
        if rank == 1:
            raise ValueError("rank 1 is gone")
        return thread_collectives.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 is gone"):
        run_ranks(Group(2), fails_on_one)
