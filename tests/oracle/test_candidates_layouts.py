"""KDA states, expert weights and patches: what would run, and which kernels may share a state or a packed weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from targets import codes, detail, k3_plan, k3_queries, kernels, target, would

from k3port.backends.limits import expert_bytes
from k3port.errors import PlanError
from k3port.oracle.predicates import reject
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import KernelSpec, OpQuery, Requires

FUSED = "cuda.flashinfer_kda_decode"
MXFP8 = frozenset({"mxfp8"})


def test_six_kda_heads_have_no_fused_kernel_of_the_vendor() -> None:
    """TP16 leaves 6 heads: what runs instead, and how to get the faster one."""
    choice = would(k3_plan(target("b200"), tp=16), "kda", "decode")
    assert codes(choice)[FUSED] == "AXIS"
    assert "H = 6, fused decode is built for 8, 12, 16" in detail(choice, FUSED)
    assert detail(choice, FUSED).endswith("--tp 8 gives 12 heads per rank")
    assert choice.kernel == "portable.kda_decode_fused"
    assert would(k3_plan(target("b200"), tp=8), "kda", "decode").kernel == FUSED


def test_a_head_count_without_any_parallel_size_names_none() -> None:
    spec = next(k for k in kernels() if k.name == FUSED)
    query = OpQuery("kda", "decode", {"H": 5}, "bfloat16", tp=1)
    assert spec.check is not None
    reason = spec.check(query, target("b200"))
    assert reason is not None and "--tp" not in reason


@pytest.mark.parametrize(
    ("state", "decode", "tag"),
    [("float32", FUSED, "vk:float32"), ("bfloat16", f"{FUSED}_bf16", "vk:bfloat16")],
)
def test_a_state_has_one_dtype_in_both_phases(state: str, decode: str, tag: str) -> None:
    plan = k3_plan(target("b200"), state_dtype=state)
    assert would(plan, "kda", "decode").kernel == decode
    tags = {s.layouts["kda_state"] for s in plan.would_run if "kda_state" in s.layouts}
    assert tags == {tag}
    refused = codes(would(plan, "kda", "decode"))
    other = FUSED if state == "bfloat16" else f"{FUSED}_bf16"
    assert refused[other] == "DTYPE"


def test_aiter_keeps_float32_states_only() -> None:
    for state, expected in (("float32", "rocm.aiter_kda_decode"), ("bfloat16", "portable.kda_decode_fused_bf16")):
        plan = k3_plan(target("mi355x"), state_dtype=state)
        assert would(plan, "kda", "decode").kernel == expected
    assert codes(would(plan, "kda", "decode"))["rocm.aiter_kda_decode"] == "DTYPE"
    assert codes(would(k3_plan(target("mi300x")), "kda", "decode"))["rocm.aiter_kda_decode"] == "ARCH"


def test_a_fused_prefill_claims_its_parts_in_its_own_phase() -> None:
    plan = k3_plan(target("mi355x"))
    assert would(plan, "kda", "prefill").kernel == "rocm.aiter_kda_prefill"
    assert would(plan, "kda_core", "prefill").reason == "covered by rocm.aiter_kda_prefill"
    assert would(plan, "kda_core", "decode").reason == "covered by rocm.aiter_kda_decode"
    assert would(plan, "short_conv", "prefill").kernel == "portable.short_conv"


@pytest.mark.parametrize(
    ("drafts", "kernel"),
    [(0, FUSED), (1, "portable.kda_decode_fused"), (7, "portable.kda_decode_fused")],
)
def test_drafts_are_verified_by_a_kernel_that_records_them(drafts: int, kernel: str) -> None:
    """B75: without the record a rejected draft could not be taken back."""
    plan = k3_plan(target("b200"), query_tokens=1 + drafts)
    choice = would(plan, "kda", "decode")
    assert choice.kernel == kernel
    if drafts:
        assert "leaves no record of the drafts" in detail(choice, "cuda.flashinfer_kda_verify")
        assert would(plan, "kda_commit").kernel == "portable.kda_commit"
    else:
        assert "kda_commit" not in {s.op for s in plan.would_run}


def test_a_composite_that_verifies_is_made_of_parts_that_record() -> None:
    """AITER's recurrence keeps one state per token instead; its parts are asked too."""
    plan = k3_plan(target("mi355x"), query_tokens=8)
    assert "leaves no record of the drafts" in detail(would(plan, "kda_core", "decode"), "rocm.aiter_kda_verify")
    assert would(plan, "kda", "decode").kernel == "portable.kda_decode_fused"
    assert would(plan, "short_conv", "decode").reason == "covered by portable.kda_decode_fused"


def test_more_drafts_than_the_record_holds() -> None:
    choice = would(k3_plan(target("b200"), query_tokens=9), "kda", "decode")
    assert codes(choice)["cuda.flashinfer_kda_verify"] == codes(choice)[FUSED] == "AXIS"
    assert choice.kernel == ""
    assert "records 8 tokens per request, asked for 9" in detail(choice, "portable.kda_decode_fused")


def test_the_softplus_gate_is_refused_where_a_kernel_bounds_it() -> None:
    queries = [replace(q, axes={**q.axes, "bounded": 0}) if q.op in ("kda", "kda_core") else q for q in k3_queries(8)]
    plan = resolve(queries, kernels(), target("b200"), allow_gaps=True)
    choice = would(plan, "kda", "decode")
    assert "computes the bounded gate only" in detail(choice, FUSED)
    assert choice.kernel == "portable.kda_decode_fused"


@pytest.mark.parametrize("platform", ["b200", "h200", "mi355x", "mi300x"])
def test_fla_serves_both_vendors(platform: str) -> None:
    plan = k3_plan(target(platform))
    assert "portable.fla_kda_chunk" in would(plan, "kda_core", "prefill").accepted
    old = k3_plan(target(platform, fla="0.5.0"))
    assert codes(would(old, "kda_core", "prefill"))["portable.fla_kda_chunk"] == "PACKAGE_VERSION"


@pytest.mark.parametrize(("heads", "fits"), [(6, True), (12, True), (16, True), (20, False), (24, True), (96, True)])
def test_flashinfer_prefill_takes_few_heads_or_eights(heads: int, fits: bool) -> None:
    """With a float32 state; K3 has 6 heads per rank at TP16 and 12 at TP8."""
    for state in ("float32", "bfloat16"):
        query = next(q for q in k3_queries(8, state_dtype=state) if q.slot == "kda_core_prefill")
        query = replace(query, axes={**query.axes, "H": heads})
        name = "cuda.flashinfer_kda_prefill" + ("" if state == "float32" else "_bf16")
        spec = next(k for k in kernels() if k.name == name)
        rejection = reject(spec, query, target("b200"), built_only=False)
        assert (rejection is None) is (fits or state == "bfloat16")
        assert rejection is None or "at most 16 heads or a multiple of 8" in rejection.detail


def test_quantised_messages_can_be_asked_for() -> None:
    name = "rocm.aiter_quick_all_reduce_int8"
    assert codes(would(k3_plan(target("mi355x")), "all_reduce"))[name] == "NUMERICS"
    asked = k3_plan(target("mi355x"), rounds=frozenset({"int8_messages"}))
    assert would(asked, "all_reduce").kernel == name


def test_flash_kda_is_the_fast_prefill_of_hopper() -> None:
    plan = k3_plan(target("h200", **{"flash-kda": "1.0"}))
    assert would(plan, "kda", "prefill").kernel == "cuda.flash_kda_prefill"
    assert would(plan, "kda_core", "prefill").reason == "covered by cuda.flash_kda_prefill"
    absent = would(k3_plan(target("h200")), "kda", "prefill")
    assert codes(absent)["cuda.flash_kda_prefill"] == "PACKAGE_MISSING"


# Experts


@pytest.mark.parametrize(
    ("platform", "rounds", "kernel"),
    [
        ("b200", (), "cuda.flashinfer_trtllm_moe_bf16"),
        ("b200", ("mxfp8",), "cuda.flashinfer_trtllm_moe_mxfp8"),
        ("b300", (), "portable.moe_experts"),
        ("b300", ("mxfp8",), "cuda.flashinfer_trtllm_moe_mxfp8"),
        ("h200", (), "cuda.flashinfer_cutlass_moe_bf16"),
        ("rtx-pro-6000", (), "portable.moe_experts"),
        ("rtx-pro-6000", ("mxfp8",), "cuda.flashinfer_cutlass_moe_mxfp8"),
        ("mi355x", (), "rocm.aiter_moe_a16w4"),
        ("mi355x", ("mxfp8",), "rocm.aiter_moe_a8w4"),
        ("mi355x", ("mxfp4",), "rocm.aiter_moe_a16w4"),
        ("mi300x", ("mxfp8", "mxfp4"), "portable.moe_experts"),
        ("mi450", (), "portable.moe_experts"),
    ],
)
def test_experts(platform: str, rounds: tuple[str, ...], kernel: str) -> None:
    """A rounding is never taken unasked, and the coarsest one not even then before a finer one."""
    plan = k3_plan(target(platform), rounds=frozenset(rounds))
    assert would(plan, "moe_experts").kernel == kernel


def test_a_rounding_that_was_not_asked_for_names_its_switch() -> None:
    choice = would(k3_plan(target("b300")), "moe_experts")
    rejection = next(r for r in choice.rejected if r.kernel == "cuda.flashinfer_trtllm_moe_mxfp8")
    assert (rejection.code, rejection.hint) == ("NUMERICS", "--activations mxfp8")
    assert codes(choice)["cuda.flashinfer_trtllm_moe_bf16"] == "ARCH"


def test_the_order_of_gate_and_up_belongs_to_the_form() -> None:
    layouts = {k.name: k.layouts["experts"] for k in kernels() if k.name.startswith("rocm.aiter_moe_")}
    assert layouts == {
        "rocm.aiter_moe_a8w4": "aiter:interleaved",
        "rocm.aiter_moe_a16w4": "aiter:separated",
        "rocm.aiter_moe_a4w4": "aiter:separated",
    }
    # One weight, two windows: the a8w4 kernel cannot be joined by one that reads the other order.
    small = KernelSpec(
        "x.small", "moe_experts", "n:n", "", priority=300, tokens=(1, 8), layouts={"experts": "aiter:separated"}
    )
    queries = k3_queries(8, rounds=MXFP8)
    plan = resolve(queries, (*kernels(), small), target("mi355x"), allow_gaps=True)
    chosen = {would(plan, "moe_experts", tokens=n).kernel for n in (1, 8, 9, 4096)}
    assert chosen == {"x.small", "rocm.aiter_moe_a16w4"}
    assert codes(would(plan, "moe_experts", tokens=9))["rocm.aiter_moe_a8w4"] == "LAYOUT"


def test_mi300x_says_what_it_costs_to_have_no_native_mxfp4() -> None:
    choice = would(k3_plan(target("mi300x")), "moe_experts")
    axes = next(q for q in k3_queries(8) if q.op == "moe_experts").axes
    packed, plain = expert_bytes(axes), expert_bytes(axes, bits=16)
    assert packed == 896 * 3 * 384 * 3584 * 17 // 32
    for part in ("gfx942 has no native MXFP4", f"stay {packed} bytes", f"copy would take {plain}", "4.27 tokens/s"):
        assert part in choice.reason
    native = would(k3_plan(target("mi450")), "moe_experts")
    assert "no native" not in native.reason and f"stay {packed} bytes" in native.reason
    assert {codes(choice)[f"rocm.aiter_moe_{form}"] for form in ("a8w4", "a16w4", "a4w4")} == {"ARCH"}


def test_plain_experts_need_no_expansion() -> None:
    choice = would(k3_plan(target("mi355x"), weight_format="bfloat16"), "moe_experts")
    assert choice.kernel == "portable.moe_experts" and "expands" not in choice.reason
    assert codes(choice)["rocm.aiter_moe_a16w4"] == "WEIGHT_FORMAT"


def test_expert_parallel_ranks_hold_their_share() -> None:
    """Width 192 padded to 256 costs a third, of the experts that a rank holds."""
    spec = next(k for k in kernels() if k.name == "rocm.aiter_moe_a16w4")
    query = next(q for q in k3_queries(16) if q.op == "moe_experts")
    assert spec.padding is not None
    alone, shared = spec.padding(query), spec.padding(replace(query, ep=2))
    assert alone is not None and shared is not None
    assert alone.note.startswith("I 192 to 256: 33% more expert weights, 327548928 bytes")
    assert "163774464 bytes" in shared.note


# Patches


@pytest.mark.parametrize(
    ("platform", "others"),
    [
        ("b200", ["cuda.cudnn_vision_patch"]),
        ("mi355x", ["rocm.aiter_vision_patch", "rocm.miopen_vision_patch"]),
        ("cpu", []),
    ],
)
def test_patches_are_a_product_before_they_are_a_convolution(platform: str, others: list[str]) -> None:
    query = OpQuery("vision_patch", None, {"D": 1024}, "bfloat16")
    choice = would(resolve([query], kernels(), target(platform)), "vision_patch")
    product = [] if platform == "cpu" else ["portable.vision_patch"]
    assert list(choice.accepted) == [*product, *others, "reference.vision_patch"]


def test_a_pin_to_a_clashing_layout_names_both_sides() -> None:
    specs = [
        KernelSpec("s.moe", "moe_experts", "n:n", "", layouts={"experts": "aiter:interleaved"}, requires=Requires()),
        KernelSpec("s.loader", "moe", "n:n", "", layouts={"experts": "aiter:separated"}, parts=("moe_experts",)),
    ]
    asked = [OpQuery("moe", None, {}, "bfloat16"), OpQuery("moe_experts", None, {}, "bfloat16", direct=False)]
    with pytest.raises(PlanError) as caught:
        resolve(asked, specs, target("mi355x"))
    text = "\n".join(caught.value.reasons)
    assert "aiter:interleaved" in text and "aiter:separated" in text
