"""Public failures of other runtimes that the oracle has to answer before a weight is read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from targets import codes, detail, k3_plan, k3_queries, kernels, target, would

from k3port.backends.limits import expert_bytes, fp8_dtype
from k3port.errors import PlanError
from k3port.oracle.predicates import reject
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import AxisRule, KernelSpec, OpQuery, Requires


def stub(name: str, op: str, priority: int = 300, **fields: object) -> KernelSpec:
    return KernelSpec(name=name, op=op, load="nowhere:nothing", doc="stub", priority=priority, **fields)  # type: ignore[arg-type]


def test_b01_weights_in_another_order_than_the_kernel_reads_are_an_error() -> None:
    """Both layouts are named, whoever asked for them, and nothing runs."""
    loader = stub("stub.loader", "moe", parts=("moe_route", "moe_experts"), layouts={"experts": "aiter:separated"})
    kernel = stub("stub.interleaved", "moe_experts", layouts={"experts": "aiter:interleaved"})
    pins = {"moe": "stub.loader", "moe_experts": "stub.interleaved"}
    with pytest.raises(PlanError) as caught:
        resolve(k3_queries(1), (*kernels(), loader, kernel), target("mi355x"), pins=pins)
    text = "\n".join(caught.value.reasons)
    assert "stub.loader" in text and "aiter:separated" in text
    assert "stub.interleaved" in text and "aiter:interleaved" in text


def test_b01_one_setting_drives_kernel_and_layout() -> None:
    for rounds, layout in (((), "aiter:separated"), (("mxfp8",), "aiter:interleaved")):
        choice = would(k3_plan(target("mi355x"), rounds=frozenset(rounds)), "moe_experts")
        assert choice.layouts == {"experts": layout}


def test_b02_a_shape_is_refused_before_weights_are_touched() -> None:
    """Width 96 is decided in the plan; the kernel that would have packed the weights is never loaded."""
    limits = Requires(axes=(AxisRule("I", multiple_of=128),))
    fast = stub("stub.fast", "moe_experts", requires=limits, layouts={"experts": "shuffled"}, pack="nowhere:pack")
    queries = [replace(q, axes={**q.axes, "I": 96}) if q.op == "moe_experts" else q for q in k3_queries(1)]
    plan = resolve(queries, (*kernels(), fast), target("cpu"))
    choice = plan.selection("moe_experts")
    assert (choice.kernel, choice.layouts) == ("reference.moe_experts", {"experts": "stored"})
    assert detail(choice, "stub.fast") == "I = 96, needs a multiple of 128"


@pytest.mark.parametrize("platform", ["gb200", "b300", "h200", "mi355x"])
def test_b03_a_refused_fused_decode_is_one_line_and_another_fused_kernel_runs(platform: str) -> None:
    """12 heads take the vendor's kernel where there is one; fewer are refused once per op, with the counts named."""
    queries = k3_queries(8)
    for heads in (12, 6, 3, 5):
        asked = [replace(q, axes={**q.axes, "H": heads}) if q.op.startswith("kda") else q for q in queries]
        choice = would(resolve(asked, kernels(), target(platform), allow_gaps=True), "kda", "decode")
        names = [r.kernel for r in choice.rejected]
        assert len(names) == len(set(names))
        if platform in ("gb200", "b300"):
            own = "cuda.flashinfer_kda_decode"
            assert choice.kernel == (own if heads == 12 else "portable.kda_decode_fused")
            assert heads == 12 or f"H = {heads}, fused decode is built for 8, 12" in detail(choice, own)
        else:
            assert choice.kernel == {"h200": "portable.kda_decode_fused", "mi355x": "rocm.aiter_kda_decode"}[platform]


def test_b10_a_plugin_is_asked_for_its_abilities_only() -> None:
    """No list of known names: what a foreign kernel declares is what counts."""
    plugin = stub("foreign.kda", "kda", 1, phases=("decode",), layouts={"kda_state": "vk:float32"})
    pins = {"kda@decode": "foreign.kda"}
    plan = resolve(k3_queries(1), (*kernels(), plugin), target("cpu"), pins=pins)
    assert plan.selection("kda", "decode").kernel == "foreign.kda"
    assert plan.selection("kda", "decode").reason == "pinned"


def test_b10_a_preference_gives_way_and_a_demand_does_not() -> None:
    where = replace(target("h200"), preferences={"mla_attend": ("cuda.flashinfer_mla_trtllm",)})
    choice = would(k3_plan(where), "mla_attend", "decode")
    assert choice.kernel == "cuda.flashinfer_mla_wrapper"
    assert codes(choice)["cuda.flashinfer_mla_trtllm"] == "ARCH"
    with pytest.raises(PlanError) as caught:
        k3_plan(target("h200"), pins={"mla_attend_decode": "cuda.flashinfer_mla_trtllm"})
    assert any("cuda.flashinfer_mla_trtllm: ARCH" in reason for reason in caught.value.reasons)


def test_b11_a_pin_reaches_its_own_op_and_leaves_the_others_alone() -> None:
    only_moe = stub("stub.moe", "moe_experts", layouts={"experts": "stored"})
    specs = (*kernels(), only_moe)
    free = resolve(k3_queries(1), kernels(), target("cpu"))
    pinned = resolve(k3_queries(1), specs, target("cpu"), pins={"moe_experts": "stub.moe"})
    changed = {a.slot for a, b in zip(free.selections, pinned.selections, strict=True) if a.kernel != b.kernel}
    assert changed == {"moe_experts"}


@pytest.mark.parametrize("platform", ["mi300x", "mi325x", "mi355x"])
@pytest.mark.parametrize("heads", [3, 6, 8, 12, 24, 96, 128])
def test_b30_every_head_count_has_a_kernel_with_its_cost(platform: str, heads: int) -> None:
    queries = [replace(q, axes={**q.axes, "H": heads}) if q.op.startswith("mla") else q for q in k3_queries(8)]
    choice = would(resolve(queries, kernels(), target(platform), allow_gaps=True), "mla_attend", "decode")
    assert choice.kernel == "rocm.aiter_mla_asm"
    assert bool(choice.padding) == bool(heads % 16)
    if heads % 16:
        assert f"{heads} heads padded to {-(-heads // 16) * 16}" in choice.padding
    assert {"portable.mla_attend_absorbed", "reference.mla_attend_absorbed"} <= set(choice.accepted)


GRID = [
    (platform, heads, query_fp8, cache_fp8, length)
    for platform in ("mi300x", "mi355x", "h200", "b200")
    for heads in (12, 16)
    for query_fp8 in (False, True)
    for cache_fp8 in (False, True)
    for length in (1, 8)
]


@pytest.mark.parametrize(("platform", "heads", "query_fp8", "cache_fp8", "length"), GRID)
def test_b31_the_whole_grid_is_decided_jointly(
    platform: str, heads: int, query_fp8: bool, cache_fp8: bool, length: int
) -> None:
    where = target(platform)
    kv = fp8_dtype(where.device.arch) if cache_fp8 else "bfloat16"
    rounds = frozenset({"fp8_query"}) if query_fp8 else frozenset()
    base = k3_queries(8, kv_dtype=kv, rounds=rounds, query_tokens=length)
    queries = [replace(q, axes={**q.axes, "H": heads}) if q.op.startswith("mla") else q for q in base]
    choice = would(resolve(queries, kernels(), where, allow_gaps=True), "mla_attend", "decode")
    vendor = {
        "mi300x": "rocm.aiter_mla_asm",
        "mi355x": "rocm.aiter_mla_asm",
        "h200": "cuda.flashinfer_mla_wrapper",
        "b200": "cuda.flashinfer_mla_trtllm",
    }[platform]
    if cache_fp8 and (platform == "h200" or not query_fp8):
        assert choice.kernel == "portable.mla_attend_absorbed"
        assert vendor in codes(choice)
    else:
        assert choice.kernel == vendor


@pytest.mark.parametrize("platform", ["mi325x", "mi355x", "b200", "h200"])
def test_b32_decode_and_verify_ask_one_predicate(platform: str) -> None:
    plans = [k3_plan(target(platform), query_tokens=length) for length in (1, 8)]
    decode, verify = (would(plan, "mla_attend", "decode") for plan in plans)
    assert decode.kernel == verify.kernel
    assert decode.phase == verify.phase == "decode"


def test_b33_no_native_experts_is_said_with_a_way_to_run() -> None:
    choice = would(k3_plan(target("mi325x")), "moe_experts")
    assert choice.kernel == "portable.moe_experts"
    assert "no native MXFP4" in choice.reason and "bytes per layer and rank" in choice.reason
    assert "needs gfx950, the device is gfx942" in detail(choice, "rocm.aiter_moe_a16w4")
    # What runs in this version is the reference, and the plan names it.
    assert k3_plan(target("mi325x")).selection("moe_experts").kernel == "reference.moe_experts"


def test_b34_an_fp8_cache_on_hopper_has_a_path_in_both_phases() -> None:
    plan = k3_plan(target("h200"), kv_dtype="float8_e4m3fn")
    prefill, decode = (would(plan, "mla_attend", phase) for phase in ("prefill", "decode"))
    assert prefill.kernel == "portable.mla_attend_expanded"
    assert decode.kernel == "portable.mla_attend_absorbed"
    wrapper = next(r for r in decode.rejected if r.kernel == "cuda.flashinfer_mla_wrapper")
    assert (wrapper.code, wrapper.hint) == ("KV_DTYPE", "--kv-dtype")
    assert "needs a bfloat16 or float16 cache" in wrapper.detail


def test_b36_padded_experts_shrink_with_the_ranks() -> None:
    """The portable kernel pads to one scale group at most; a vendor's tile costs what the plan says, never a floor."""
    by_name = {k.name: k for k in kernels()}
    sizes: dict[str, list[int]] = {}
    for name in ("portable.moe_experts", "rocm.aiter_moe_a16w4", "cuda.flashinfer_trtllm_moe_bf16"):
        padding = by_name[name].padding
        assert padding is not None
        for tp in (1, 2, 4, 8, 16):
            query = next(q for q in k3_queries(tp) if q.op == "moe_experts")
            pad = padding(query)
            sizes.setdefault(name, []).append(expert_bytes({**query.axes, **(pad.axes if pad else {})}))
            if name == "portable.moe_experts":
                assert pad is None
    for bytes_per_rank in sizes.values():
        assert bytes_per_rank[0] == 2 * bytes_per_rank[1] == 8 * bytes_per_rank[3]
        assert bytes_per_rank[4] < bytes_per_rank[3]
    odd = OpQuery("moe_experts", None, {"E": 8, "I": 100, "L": 64}, "bfloat16")
    padded = by_name["portable.moe_experts"].padding
    assert padded is not None
    found = padded(odd)
    assert found is not None and found.axes["I"] - 100 < 32


def test_b37_a_router_with_a_small_top_k_is_refused_with_its_limit() -> None:
    router = stub("stub.router", "moe_route", requires=Requires(axes=(AxisRule("X", maximum=8, why="fixed"),)))
    experts = stub("stub.few", "moe_route", requires=Requires(axes=(AxisRule("E", maximum=384),)))
    plan = resolve(k3_queries(1), (*kernels(), router, experts), target("cpu"))
    choice = plan.selection("moe_route")
    assert choice.kernel == "reference.moe_route"
    assert detail(choice, "stub.router") == "X = 16, needs at most 8 (fixed)"
    assert detail(choice, "stub.few") == "E = 896, needs at most 384"


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("gfx942", "float8_e4m3fnuz"),
        ("gfx950", "float8_e4m3fn"),
        ("gfx1250", "float8_e4m3fn"),
        ("sm_90", "float8_e4m3fn"),
        ("sm_80", ""),
        ("cpu", ""),
    ],
)
def test_b39_the_fp8_flavour_belongs_to_the_architecture(arch: str, dtype: str) -> None:
    assert fp8_dtype(arch) == dtype


def test_b39_a_cache_of_the_other_flavour_is_refused_by_every_kernel_that_would_misread_it() -> None:
    for platform, wrong in (("mi300x", "float8_e4m3fn"), ("mi355x", "float8_e4m3fnuz"), ("h200", "float8_e4m3fnuz")):
        where = target(platform)
        queries = k3_queries(8, kv_dtype=wrong, rounds=frozenset({"fp8_query"}))
        for query in (q for q in queries if q.op in ("mla_attend", "mla_append")):
            for spec in (k for k in kernels() if k.op == query.op and not k.is_reference):
                assert reject(spec, query, where, built_only=False) is not None, (platform, spec.name)
    choice = would(k3_plan(target("mi300x"), kv_dtype="float8_e4m3fn"), "mla_attend", "decode")
    assert "gfx942 computes with float8_e4m3fnuz, the cache is float8_e4m3fn" in detail(choice, "rocm.aiter_mla_asm")
