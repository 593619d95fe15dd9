"""From a config to a plan: the queries, what a plan carries beside its kernels, and saved plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3port.errors import ConfigError, PlanError
from k3port.model.config_file import parse_config
from k3port.oracle.detect import Detection
from k3port.oracle.profile import get_profile
from k3port.oracle.resolve import resolve
from k3port.oracle.sources import Gpu
from k3port.oracle.spec import GAP, Device, KernelSpec, Plan, Target
from k3port.plugins import make_registry
from k3port.runtime.planner import Workload, make_plan, model_digest, model_queries, require_same, saved_pins
from k3port.testing.published import published_k3_config
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config

K3 = parse_config(published_k3_config())
TINY = parse_config(tiny_k3_config())
KERNELS = make_registry(entry_points=False).kernels
CPU = Target("cpu", Device("cpu", "cpu", "test", "fake"))
WORK = Workload("float32", "mxfp4")


def on(platform: str, tp: int = 8, **more: object) -> Plan:
    profile = get_profile(platform)
    work = Workload("bfloat16", "mxfp4", tp=tp, graph=True, **more)  # type: ignore[arg-type]
    return make_plan(
        K3,
        work,
        profile.target(),
        KERNELS,
        usable_share=profile.usable_share,
        gpus_per_node=profile.gpus_per_node,
        allow_gaps=True,
    )


def machine(visible: int, because: str = "") -> Detection:
    """Eight H200 of which some are visible."""
    gpus = tuple(Gpu(Device("nvidia", "sm_90", "NVIDIA H200", "detected", uuid=f"GPU-{i}"), i) for i in range(8))
    return Detection(gpus, {"nvidia": gpus[:visible]}, {"nvidia": because} if because else {})


def test_queries_have_the_sizes_of_one_rank():
    axes = {q.slot: dict(q.axes) for q in model_queries(K3, Workload("bfloat16", "mxfp4", tp=8))}
    assert axes["kda_decode"] == {"H": 12, "K": 128, "V": 128, "W": 4, "bounded": 1}
    assert axes["mla_prefill"] == {"H": 12, "C": 512, "N": 128, "R": 64, "V": 128, "page": 64}
    assert axes["moe"] == {"D": 7168, "E": 896, "X": 16, "I": 384, "L": 3584}
    assert axes["all_reduce"] == {"D": 7168, "ranks": 8}
    whole = {q.slot: dict(q.axes) for q in model_queries(K3, Workload("bfloat16", "mxfp4", tp=8, ep=8))}
    assert whole["moe"]["I"] == 3072
    assert whole["kda_decode"] == axes["kda_decode"]


def test_queries_repeat_what_was_asked_for():
    work = Workload("bfloat16", "mxfp4", tp=16, ep=32, nodes=2, query_tokens=4, graph=True, deterministic=True)
    asked = {(q.tp, q.ep, q.nodes, q.query_tokens, q.graph, q.deterministic) for q in model_queries(K3, work)}
    assert asked == {(16, 32, 2, 4, True, True)}
    ops = {q.op for q in model_queries(K3, work)}
    assert "vision_patch" not in ops
    vision = {q.op: dict(q.axes) for q in model_queries(K3, replace(work, vision=(1024, 14)))}
    assert vision["vision_patch"] == {"D": 1024, "C": 3, "Y": 14, "X": 14}


def test_an_unbounded_gate_is_an_axis():
    linear = parse_config(tiny_kimi_linear_config())
    axes = {q.slot: q.axes for q in model_queries(linear, Workload("float32"))}
    assert axes["kda_decode"]["bounded"] == 0
    assert axes["attn_res"] == {"D": linear.hidden_size, "R": 0}, "add and norm: no blocks"


def test_only_kernels_of_experts_attention_and_sums_may_round():
    work = Workload("bfloat16", "mxfp4", rounds=frozenset({"mxfp8", "fp8_query"}))
    rounding = {q.op for q in model_queries(K3, work) if q.rounds}
    assert rounding == {"moe", "moe_experts", "mla", "mla_append", "mla_attend", "all_reduce"}


def test_a_plan_carries_memory_digests_and_sizes():
    plan = make_plan(TINY, WORK, CPU, KERNELS, context_tokens=100, concurrency=2)
    assert plan.memory is not None
    kinds = [item.kind for item in plan.memory.items]
    assert kinds[:3] == ["dense weights", "float32 weights", "routed experts"]
    assert set(plan.digests) == {"k3port", "model"}
    assert (plan.tp, plan.ep, plan.pp) == (1, 1, 1)
    assert plan.warnings == ()
    assert Plan.from_json(plan.to_json()) == plan


def test_digests_tell_models_apart():
    other = parse_config({**published_k3_config(), "eos_token_id": 7})
    assert model_digest(K3) == model_digest(parse_config(published_k3_config()))
    assert len({model_digest(K3), model_digest(TINY), model_digest(other)}) == 3


def test_sizes_that_are_not_legal_are_named():
    with pytest.raises(ConfigError, match="ep = 3") as caught:
        make_plan(K3, Workload("bfloat16", "mxfp4", tp=2, ep=3), CPU, KERNELS)
    assert any("896 experts do not divide by ep = 3" in reason for reason in caught.value.reasons)


def test_padding_counts_whether_a_kernel_is_built_or_not():
    wide = on("b200", 16).memory
    whole = on("b200", 16, ep=16).memory
    assert wide is not None
    assert whole is not None
    experts = [next(i for i in m.items if i.kind == "routed experts") for m in (wide, whole)]
    assert experts[0].bytes * 3 == experts[1].bytes * 4
    assert "192 x 3584 up to 256 x 3584" in experts[0].arithmetic


def test_gaps_are_warnings_for_questions_and_errors_for_runs():
    nothing = [spec for spec in KERNELS if spec.op != "sample"]
    declared = KernelSpec("vendor.sample", "sample", "", "declared only")
    with pytest.raises(PlanError, match="no kernel fits"):
        make_plan(TINY, WORK, CPU, nothing)
    plan = make_plan(TINY, WORK, CPU, nothing, allow_gaps=True)
    assert [s.slot for s in plan.gaps(would=True)] == ["sample"]
    assert plan.selection("sample").reason == GAP
    assert plan.warnings == ("no kernel fits, built or declared: sample",)
    plan = make_plan(TINY, WORK, CPU, [*nothing, declared], allow_gaps=True)
    assert (plan.gaps(would=True), [s.slot for s in plan.gaps()]) == ((), ["sample"])
    assert plan.selection("sample", would=True).kernel == "vendor.sample"
    assert plan.warnings == ("no kernel that fits is built in this version: sample",)
    asked = make_plan(TINY, WORK, CPU, [*KERNELS, declared], pins={"sample": "vendor.sample"}, allow_gaps=True)
    assert (asked.selection("sample").reason, asked.selection("sample", would=True).reason) == (GAP, "pinned")
    with pytest.raises(PlanError, match=r"vendor\.sample: NOT_BUILT"):
        make_plan(TINY, WORK, CPU, [*KERNELS, declared], pins={"sample": "vendor.sample"})


def test_a_missing_part_of_a_composite_is_a_gap_of_its_phase():
    specs = [spec for spec in KERNELS if spec.op != "kda_core" or spec.phases == ("prefill",)]
    plan = make_plan(TINY, WORK, CPU, specs, allow_gaps=True)
    assert [(s.op, s.phase) for s in plan.gaps()] == [("kda_core", "decode")]


def test_what_a_fused_kernel_covers_is_no_gap_though_the_other_phase_has_a_composite():
    cores = [spec for spec in KERNELS if spec.op == "kda_core" and spec.phases == ("prefill",)]
    others = [spec for spec in KERNELS if spec.op not in ("kda", "kda_core")]
    composite = next(spec for spec in KERNELS if spec.name == "reference.kda")
    fused = KernelSpec("vendor.kda", "kda", "x:y", "", phases=("decode",), covers=composite.parts)
    specs = [*others, *cores, replace(composite, phases=("prefill",)), fused]
    plan = make_plan(TINY, WORK, CPU, specs, allow_gaps=True)
    assert plan.selection("kda_core", "decode").reason == "covered by vendor.kda"
    assert plan.gaps() == ()


def test_wide_groups_are_a_warning():
    assert "tp 16 reaches over nodes of 8: every layer waits for the network twice" in on("h200", 16).warnings
    assert not any("reaches over" in warning for warning in on("h200", 8).warnings)


def test_b22_a_mask_that_hides_devices_is_named_before_any_load():
    work = Workload("bfloat16", "mxfp4", tp=8)
    target = get_profile("h200").target()
    because = "CUDA_VISIBLE_DEVICES=GPU-0"
    with pytest.raises(PlanError) as caught:
        make_plan(K3, work, target, KERNELS, allow_gaps=True, detection=machine(1, because))
    assert caught.value.message == f"TP8 asked, 1 device visible because {because}"
    assert caught.value.hint == "unset CUDA_VISIBLE_DEVICES"
    assert make_plan(K3, work, target, KERNELS, allow_gaps=True, detection=machine(8)).tp == 8


@pytest.mark.parametrize("heads", [8, 12, 6, 3, 24, 96, 128])
def test_b30_every_head_count_has_a_kernel_for_mla_decode_and_says_what_padding_costs(heads: int):
    work = Workload("bfloat16", "mxfp4", tp=8)
    (query,) = [q for q in model_queries(K3, work) if q.slot == "mla_attend_decode"]
    query = replace(query, axes={**query.axes, "H": heads}, direct=True)
    plan = resolve([query], KERNELS, get_profile("mi355").target())
    now, would = (plan.selection("mla_attend", "decode", would=would) for would in (False, True))
    assert now.kernel == "reference.mla_attend_absorbed"
    assert would.kernel
    if would.kernel == "rocm.aiter_mla_asm" and heads % 16:
        assert f"{heads} heads padded to" in would.padding
    assert all(r.detail for r in would.rejected)


def test_b33_experts_without_native_mxfp4_run_with_their_cost_named():
    plan = on("mi325x")
    chosen = plan.selection("moe_experts", would=True)
    assert chosen.kernel.startswith("portable.")
    assert "on the fly" in chosen.reason
    native = {r.kernel: r for r in chosen.rejected if r.kernel.startswith("rocm.aiter_moe")}
    assert any(r.code == "ARCH" and "gfx950" in r.detail for r in native.values())
    assert plan.memory is not None
    assert plan.memory.fits


def test_a_saved_plan_pins_its_kernels():
    plan = make_plan(TINY, WORK, CPU, KERNELS, pins={"linear": "reference.linear"})
    fresh = make_plan(TINY, WORK, CPU, KERNELS)
    pins = saved_pins(Plan.from_json(plan.to_json()), fresh)
    assert pins["linear"] == "reference.linear"
    assert pins["kda_core_decode"] == "cpu.kda_core_step"
    again = make_plan(TINY, WORK, CPU, KERNELS, pins=pins)
    require_same(plan, again)
    with pytest.raises(PlanError, match="cannot be kept here") as caught:
        require_same(plan, fresh)
    assert caught.value.reasons == ("linear: reference.linear -> cpu.linear",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "b200"}, "platform: the plan has b200, this is cpu"),
        ({"device": Device("nvidia", "sm_100", "", "profile")}, "architecture: the plan has sm_100, this is cpu"),
        ({"dtype": "bfloat16"}, "activations: the plan has bfloat16, this is float32"),
        ({"tp": 8}, "ranks: the plan has (8, 1, 1), this is (1, 1, 1)"),
        ({"digests": {"k3port": "0.0.1", "model": ""}}, "digest of k3port: the plan has 0.0.1, this is "),
        ({"digests": {}}, "digest of model: the plan has absent, this is "),
    ],
)
def test_a_saved_plan_for_something_else_is_refused(change: dict[str, object], reason: str):
    plan = make_plan(TINY, WORK, CPU, KERNELS)
    with pytest.raises(PlanError, match="for something else") as caught:
        saved_pins(replace(plan, **change), plan)  # type: ignore[arg-type]
    assert any(line.startswith(reason) for line in caught.value.reasons), caught.value.reasons


def test_slots_with_several_windows_are_compared_instead_of_pinned():
    windows = [
        KernelSpec("vendor.small", "linear", "x:y", "", tokens=(1, 32), priority=300),
        KernelSpec("vendor.large", "linear", "x:y", "", tokens=(33, None), priority=300),
    ]
    plan = make_plan(TINY, WORK, CPU, [*KERNELS, *windows])
    assert [s.kernel for s in plan.selections if s.op == "linear"] == ["vendor.small", "vendor.large"]
    assert "linear" not in saved_pins(plan, plan)
    require_same(plan, plan)
    without = make_plan(TINY, WORK, CPU, [*KERNELS, windows[0]])
    with pytest.raises(PlanError) as caught:
        require_same(plan, without)
    assert caught.value.reasons == ("linear[33..]: vendor.large -> cpu.linear",)
