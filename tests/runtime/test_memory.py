"""Memory of a rank against numbers that were worked out by hand, against the loader, and against itself."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from k3port.errors import ConfigError, K3Error
from k3port.model.config_file import parse_config
from k3port.model.shapes import rank_dims
from k3port.model.weights import layer_params, runtime_bytes
from k3port.ops.moe_weights import keep_stored
from k3port.oracle.profile import get_profile
from k3port.oracle.spec import KernelSpec, MemoryPlan, OpQuery, Padding
from k3port.runtime.groups import Group, candidate_groups, choose_group, group_faults, split_layers
from k3port.runtime.loader import load_weights
from k3port.runtime.memory import plan_memory
from k3port.runtime.pools import Pools
from k3port.runtime.preflight import check_checkpoint
from k3port.runtime.terms import (
    Serving,
    Storage,
    cache_bytes_per_token,
    expert_layer_bytes,
    gib,
    item_bytes,
    state_bytes_per_request,
    vision_bytes,
)
from k3port.testing.published import published_k3_config

K3 = parse_config(published_k3_config())
BF16 = Storage("bfloat16", "mxfp4", "bfloat16")
TP8 = Group(8)
EIGHT = Serving(context_tokens=32768, concurrency=8)
WEIGHTS = ("dense weights", "float32 weights", "routed experts")


def memory(group: Group = TP8, serving: Serving = EIGHT, gb: int = 288, **more: object) -> MemoryPlan:
    return plan_memory(K3, group, serving, BF16, device_bytes=gb * 10**9, usable_share=0.9, gpus_per_node=8, **more)  # type: ignore[arg-type]


def size(plan: MemoryPlan, kind: str) -> int:
    return next((item.bytes for item in plan.items if item.kind == kind), 0)


def text(plan: MemoryPlan, kind: str) -> str:
    return next(item.arithmetic for item in plan.items if item.kind == kind)


def rounding(width: int) -> tuple[KernelSpec, OpQuery]:
    """An expert kernel that rounds the width of a slice up."""

    def padding(query: OpQuery) -> Padding | None:
        wide = -(-query.axes["I"] // width) * width
        return None if wide == query.axes["I"] else Padding({"I": wide}, "wide")

    spec = KernelSpec("vendor.moe", "moe_experts", "", "", padding=padding)
    return spec, OpQuery("moe_experts", None, {"I": 0, "L": 0}, "bfloat16")


def test_b62_the_cache_is_counted_for_mla_layers_and_the_state_for_kda_layers():
    assert cache_bytes_per_token(K3, "bfloat16") == 24 * 576 * 2 == 27_648
    assert cache_bytes_per_token(K3, "float8_e4m3fn") == 24 * 576
    assert state_bytes_per_request(K3, 1) == 69 * 96 * 128 * 128 * 4 == 434_110_464
    assert state_bytes_per_request(K3, 8) == 434_110_464 // 8
    plan = memory(Group(), Serving(context_tokens=1024, concurrency=1))
    assert size(plan, "latent cache") == 1024 * 27_648
    # One request and the null slot.
    assert size(plan, "KDA state") == 2 * 434_110_464
    assert size(plan, "convolution tails") == 2 * 69 * 3 * 3 * 12288 * 2 == 2 * 15_261_696
    # Layer 0 is dense: 92 layers with experts, and the published sum of expert bytes.
    assert size(plan, "routed experts") == 92 * 896 * 17_547_264 == 1_446_456_066_048
    assert text(plan, "routed experts").startswith("92 layers x 896 experts x 3 x 3072 x 3584")
    assert text(plan, "latent cache").startswith("24 MLA layers x 576 x 2 B")


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_weights_are_those_of_the_parameter_table(tp: int):
    expected = runtime_bytes(K3, tp, 2)
    plan = memory(Group(tp))
    assert [size(plan, kind) for kind in WEIGHTS] == [expected["model"], expected["float32"], expected["experts"]]


@pytest.mark.parametrize("tp", [1, 2])
def test_b36_the_plan_is_what_loader_and_pools_allocate(tiny_k3_folder: Path, tp: int):
    checkpoint = check_checkpoint(tiny_k3_folder)
    config = checkpoint.config
    weights = load_weights(checkpoint, dtype=torch.bfloat16, pack_experts=keep_stored, tp_size=tp)
    serving = Serving(context_tokens=128, concurrency=3)
    plan = plan_memory(config, Group(tp), serving, BF16, device_bytes=10**9)
    kinds = ("model", "float32", "experts")
    assert [size(plan, kind) for kind in WEIGHTS] == [weights.bytes_by_kind[kind] for kind in kinds]
    dims = rank_dims(config, 0, tp)
    pools = Pools(config, dims, num_requests=3, num_tokens=3 * 128, dtype=torch.bfloat16)
    assert size(plan, "latent cache") == sum(pages.nbytes for pages in pools.pages.layers.values())
    states = pools.states.layers.values()
    assert size(plan, "KDA state") == sum(state.recurrent.nbytes for state in states)
    assert size(plan, "convolution tails") == sum(state.conv.nbytes for state in states)


def test_b36_expert_bytes_fall_with_the_ranks_and_padding_is_counted():
    one = expert_layer_bytes(K3, Group(), "mxfp4")
    for size_ in (8, 16, 32):
        assert expert_layer_bytes(K3, Group(tp=size_), "mxfp4") == one // size_
        assert expert_layer_bytes(K3, Group(tp=8, ep=size_), "mxfp4") == one // size_
    # 3072 / 16 = 192 and 3072 / 32 = 96 are whole groups of 32: a kernel that rounds to groups adds nothing.
    for tp in (8, 16, 32):
        assert expert_layer_bytes(K3, Group(tp=tp), "mxfp4", [rounding(32)]) == one // tp
    assert expert_layer_bytes(K3, Group(tp=16), "mxfp4", [rounding(256)]) == one // 16 * 256 // 192
    assert expert_layer_bytes(K3, Group(tp=16, ep=16), "mxfp4", [rounding(256)]) == one // 16
    plan = memory(Group(16), chosen=[rounding(256)])
    assert size(plan, "routed experts") == 92 * (one // 16 * 256 // 192)
    assert "vendor.moe rounds 192 x 3584 up to 256 x 3584, +33%" in text(plan, "routed experts")


def test_b35_a_node_of_h200_is_refused_before_any_download_and_two_nodes_have_a_table():
    plan = memory(gb=141, vision=894_717_952)
    assert not plan.fits
    assert (plan.max_context_tokens, plan.max_concurrency) == (0, 0)
    assert "8 x 192.9 GiB = 1,543.3 GiB > 8 x 118.2 GiB = 945.5 GiB" in plan.advice
    assert "smallest group that fits: 16 devices on 2 nodes: tp 16 (" in plan.advice
    assert re.findall(r"(tp [^(]*) \(", plan.advice) == ["tp 16", "tp 8 x pp 2", "tp 8 x ep 16"]
    two = memory(Group(8, 1, 2), gb=141)
    four = memory(Group(8, 1, 4), gb=141)
    assert two.fits
    assert four.fits
    assert two.total_bytes > four.total_bytes
    # No context-parallel size can be left unset: every rank of a stage has the whole cache of its layers.
    assert "stage" in text(two, "dense weights")
    assert size(four, "latent cache") < size(two, "latent cache") < size(memory(), "latent cache")


def test_b99_speculation_shows_its_states_and_what_replay_saves():
    plain = memory(serving=replace(EIGHT, concurrency=64))
    snapshots = memory(serving=replace(EIGHT, concurrency=64, query_tokens=8, snapshots=True))
    replay = memory(serving=replace(EIGHT, concurrency=64, query_tokens=8))
    one = 434_110_464 // 8
    assert size(plain, "KDA state") == 65 * one
    assert size(snapshots, "KDA state") == 65 * 8 * one
    # 8 records of k, g and u per head and layer.
    assert size(replay, "KDA state") == 65 * (one + 69 * 8 * 12 * 3 * 128 * 4)
    assert "8 copies for 7 drafts (replay would keep 1)" in text(snapshots, "KDA state")
    assert "snapshots would keep 8 copies, 0.4 GiB per request" in text(replay, "KDA state")
    assert size(replay, "convolution tails") == 65 * 69 * 10 * 3 * 1536 * 2


def test_b99_a_cache_smaller_than_the_asked_context_does_not_fit():
    serving = Serving(context_tokens=131072, concurrency=64, query_tokens=8, snapshots=True)
    plan = memory(serving=serving)
    assert not plan.fits
    assert f"64 requests of {plan.max_context_tokens} tokens fit here" in plan.advice
    assert f"{plan.max_concurrency} requests of 131072 tokens fit here" in plan.advice
    assert 0 < plan.max_context_tokens < 131072
    assert memory(serving=replace(serving, context_tokens=plan.max_context_tokens)).fits
    assert memory(serving=replace(serving, concurrency=plan.max_concurrency)).fits


def test_what_a_step_holds():
    plan = memory(serving=replace(EIGHT, prefill_chunk_tokens=8192, query_tokens=2))
    assert size(plan, "AttnRes bank") == (8192 + 16) * 8 * 7168 * 2
    assert size(plan, "logits") == 8 * 2 * (163840 + 20480) * 4
    assert size(memory(Group()), "logits") == 8 * 163840 * 4
    assert size(plan, "graphs") == 0
    assert size(memory(serving=replace(EIGHT, graphs=True)), "graphs") == 1 << 30
    query = OpQuery("mla_attend", "decode", {}, "bfloat16")
    specs = [KernelSpec(f"a.{n}", "mla_attend", "", "", workspace_bytes=lambda q, n=n: n << 20) for n in (3, 7, 5)]
    workspaces = memory(chosen=[(spec, query) for spec in specs])
    assert size(workspaces, "workspaces") == 7 << 20
    assert "a.7" in text(workspaces, "workspaces")


def test_workspaces_are_for_the_steps_of_this_load():
    """8 requests and 1024 prompt tokens per step; a window that no such step reaches needs nothing."""
    spec = KernelSpec("a.rows", "mla_attend", "", "", workspace_bytes=lambda q: (q.tokens[1] or 10**9) << 10)
    ask = OpQuery("mla_attend", "decode", {}, "bfloat16")
    for query, serving, tokens in (
        (ask, EIGHT, 8),
        (ask, replace(EIGHT, query_tokens=4), 32),
        (replace(ask, phase="prefill"), EIGHT, 1024),
        (replace(ask, phase=None), EIGHT, 1032),
        (replace(ask, tokens=(1, 3)), EIGHT, 3),
        (replace(ask, tokens=(9, None)), EIGHT, 0),
    ):
        plan = memory(serving=serving, chosen=[(spec, query)])
        assert size(plan, "workspaces") == tokens << 10
        if tokens:
            assert f"of a.rows in a step of {tokens} tokens" in text(plan, "workspaces")


def test_vision_is_held_by_the_first_stage():
    vision = vision_bytes(published_k3_config()["vision_config"], 7168)
    assert vision == 447_358_976 * 2
    assert size(memory(vision=vision), "vision") == vision
    with_it, without = (memory(Group(8, 1, 2), vision=v) for v in (vision * 100, 0))
    assert "stage 1 of 2" in text(with_it, "dense weights")
    assert size(with_it, "vision") == vision * 100
    assert size(without, "vision") == 0


@pytest.mark.parametrize("serving", [EIGHT, Serving(1_000_000, 64), Serving(64, 4000)], ids=["", "cache", "states"])
@pytest.mark.parametrize("vision", [0, 1 << 30, 2 << 30, 3 << 30, 200 << 30])
def test_a_pipeline_is_cut_where_its_fullest_stage_is_smallest(serving: Serving, vision: int):
    """Every cut of 93 layers in two, from the parameter table and the sizes of cache and state."""
    dims = rank_dims(K3, 0, 8)
    requests = serving.concurrency
    experts = 92 * 896 * 17_547_264 // 8 // 92
    layers = []
    for layer in range(93):
        size_ = sum(p.num_elements * (2 if p.kind == "model" else 4) for p in layer_params(K3, layer, dims))
        size_ += experts if layer else 0
        if K3.is_kda(layer):
            size_ += (requests + 1) * 12 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
        else:
            size_ += requests * serving.context_tokens * 576 * 2
        layers.append(size_)
    embedding = 2 * 163840 // 8 * 7168
    head = embedding + 2 * 3 * 7168
    best = min(max(sum(layers[:cut]) + embedding + vision, sum(layers[cut:]) + head) for cut in range(1, 93))
    plan = memory(Group(8, 1, 2), serving, vision=vision)
    held = [*WEIGHTS, "vision", "latent cache", "KDA state", "convolution tails"]
    assert sum(size(plan, kind) for kind in held) == best


@pytest.mark.parametrize("group", [Group(8), Group(16), Group(8, 16), Group(8, 2)], ids=str)
@pytest.mark.parametrize("query_tokens", [1, 4])
def test_the_limits_are_the_last_that_fit(group: Group, query_tokens: int):
    serving = replace(EIGHT, concurrency=16, query_tokens=query_tokens, context_tokens=100_000)
    gb = 288 if group.gpus == 8 else 160
    plan = memory(group, serving, gb)
    assert 0 < plan.max_context_tokens < K3.max_context_tokens
    assert plan.max_context_tokens % 64 == 0
    for context, fits in ((plan.max_context_tokens, True), (plan.max_context_tokens + 1, False)):
        assert memory(group, replace(serving, context_tokens=context), gb).fits is fits
    for concurrency, fits in ((plan.max_concurrency, True), (plan.max_concurrency + group.attention_groups, False)):
        assert memory(group, replace(serving, concurrency=concurrency), gb).fits is fits


def test_attention_groups_share_the_requests():
    alone, shared = memory(Group(8, 8)), memory(Group(8, 32))
    assert size(shared, "latent cache") == size(alone, "latent cache") // 4
    assert size(shared, "KDA state") == 3 * 434_110_464 // 8


def test_a_context_is_counted_in_whole_pages_and_limited_by_the_model():
    assert size(memory(serving=Serving(65, 1)), "latent cache") == 128 * 27_648
    assert memory(serving=Serving(64, 1)).max_context_tokens == 1_048_576


def test_unknown_memory_compares_nothing():
    plan = memory(gb=0)
    assert plan.fits
    assert (plan.capacity_bytes, plan.max_concurrency) == (0, 8)
    assert "not known" in plan.advice


def test_the_advice_names_the_smallest_group():
    plan = memory(gb=80)
    assert "smallest group that fits: 24 devices on 3 nodes" in plan.advice
    for group in candidate_groups(K3, 8, 23, mxfp4=True):
        assert not memory(group, gb=80).fits, group
    assert any(memory(group, gb=80).fits for group in candidate_groups(K3, 8, 24, mxfp4=True) if group.gpus == 24)
    assert "no group of up to 128 devices holds it" in memory(gb=4).advice
    # Without padding tp 16 would do; what rounds 192 up to 256 leaves whole experts or fewer columns.
    assert "tp 16 (" not in memory(gb=141, chosen=[rounding(256)]).advice


@pytest.mark.parametrize(("platform", "fits"), [
    ("b300", True), ("mi355x", True), ("mi325x", True), ("h200", False), ("b200", False), ("mi300x", False),
])  # fmt: skip
def test_which_platforms_hold_the_model_on_eight_devices(platform: str, fits: bool):
    profile = get_profile(platform)
    plan = plan_memory(
        K3,
        Group(8),
        EIGHT,
        BF16,
        device_bytes=profile.memory_bytes,
        usable_share=profile.usable_share,
        gpus_per_node=profile.gpus_per_node,
    )
    assert plan.fits is fits
    assert ("smallest group that fits: 16 devices on 2 nodes" in plan.advice) is not fits
    assert ("> 8 x " in plan.advice) is not fits


def test_groups_that_are_not_legal():
    assert group_faults(K3, Group(8, 16, 2)) == []
    assert "896 experts do not divide by ep = 6" in group_faults(K3, Group(2, 6))[0]
    assert "tp = 3 is not one of 1, 2, 4, 8, 16" in group_faults(K3, Group(3))[0]
    assert "one must divide the other" in group_faults(K3, Group(8, 28))[0]
    assert "the model has 93 layers" in group_faults(K3, Group(1, 1, 94))[0]
    with pytest.raises(ConfigError, match="tp = 32"):
        memory(Group(32))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"gpus": 8}, Group(8)),
        ({"gpus": 16}, Group(8, 1, 2)),
        ({"gpus": 16, "tp": 16}, Group(16)),
        ({"gpus": 16, "tp": 8}, Group(8, 1, 2)),
        ({"gpus": 16, "tp": 8, "pp": 2}, Group(8, 1, 2)),
        ({"gpus": 16, "ep": 16}, Group(8, 16)),
        ({"gpus": 32}, Group(8, 1, 4)),
        ({"gpus": 24, "pp": 3}, Group(8, 1, 3)),
        ({"gpus": 6}, Group(2, 1, 3)),
    ],
)
def test_sizes_that_were_not_given_are_filled_in(asked: dict[str, int], expected: Group):
    given = {"tp": None, "ep": None, "pp": None, **asked}
    assert choose_group(K3, mxfp4=True, gpus_per_node=8, **given) == expected  # type: ignore[arg-type]


def test_sizes_that_contradict_each_other():
    with pytest.raises(ConfigError, match="tp 8 x pp 2 is 16 devices, asked for 32"):
        choose_group(K3, tp=8, ep=None, pp=2, gpus=32, mxfp4=True, gpus_per_node=8)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_stages_are_the_best_cut(costs: list[int], data: st.DataObject):
    stages = data.draw(st.integers(1, len(costs)))
    cut = split_layers(costs, stages)
    assert len(cut) == stages
    assert [layer for stage in cut for layer in stage] == list(range(len(costs)))
    best = min(
        max(sum(costs[a:b]) for a, b in zip((0, *inner), (*inner, len(costs)), strict=True))
        for inner in combinations(range(1, len(costs)), stages - 1)
    )
    assert max(sum(costs[i] for i in stage) for stage in cut) == best


def test_sizes_of_numbers_and_how_they_are_written():
    assert [item_bytes(name) for name in ("float32", "bfloat16", "float8_e4m3fnuz", "fp8")] == [4, 2, 1, 1]
    with pytest.raises(K3Error, match="unknown dtype 'int7'"):
        item_bytes("int7")
    assert [gib(n) for n in (5 << 30, 200 << 20, 3 << 20, 900, 12)] == [
        "5.0 GiB", "0.2 GiB", "3.0 MiB", "0.9 KiB", "12 B",
    ]  # fmt: skip
