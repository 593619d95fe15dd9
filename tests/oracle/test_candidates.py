"""Which MLA kernel would run where: head rules with their versions, padding with its cost, joint constraints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from targets import codes, detail, k3_plan, k3_queries, kernels, target, would

from k3port.backends.limits import ITEM_BYTES, MIB, fp8_dtype
from k3port.errors import PlanError
from k3port.oracle.predicates import reject
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import OpQuery

ROOT = Path(__file__).parents[2]
TRTLLM, CUTE = "cuda.flashinfer_mla_trtllm", "cuda.flashinfer_mla_cute_dsl"


def decode_query(heads: int, **fields: object) -> OpQuery:
    base = next(q for q in k3_queries(8, **fields) if q.slot == "mla_attend_decode")
    return OpQuery(**{**base.__dict__, "axes": {**base.axes, "H": heads}})


@pytest.mark.parametrize(
    ("version", "tp", "heads", "kernel"),
    [
        ("0.7.4", 1, 96, CUTE),
        ("0.7.4", 2, 48, TRTLLM),
        ("0.7.4", 4, 24, TRTLLM),
        ("0.7.4", 8, 12, TRTLLM),
        ("0.7.4", 16, 6, TRTLLM),
        ("0.6.17", 4, 24, TRTLLM),
        ("0.6.16", 1, 96, CUTE),
        ("0.6.16", 2, 48, TRTLLM),
        ("0.6.16", 4, 24, CUTE),
        ("0.6.16", 8, 12, TRTLLM),
        ("0.6.16", 16, 6, TRTLLM),
    ],
)
def test_b200_head_rule(version: str, tp: int, heads: int, kernel: str) -> None:
    """The plan names the rule that fired, whichever way it went."""
    choice = would(k3_plan(target("b200", flashinfer=version), tp), "mla_attend", "decode")
    assert choice.kernel == kernel
    assert choice.version == f"flashinfer-python {version}"
    rule = "tile rule of FlashInfer < 0.6.17" if version == "0.6.16" else "packed low-head rule of FlashInfer >= 0.6.17"
    said = choice.reason if kernel == TRTLLM else detail(choice, TRTLLM)
    assert rule in said and str(heads) in said


def test_h200_has_no_blackwell_kernel() -> None:
    choice = would(k3_plan(target("h200")), "mla_attend", "decode")
    found = codes(choice)
    assert found[TRTLLM] == found[CUTE] == found["cuda.flashinfer_mla_cake"] == "ARCH"
    assert choice.kernel == "cuda.flashinfer_mla_wrapper"
    without = would(k3_plan(target("h200", flashinfer="")), "mla_attend", "decode")
    assert without.kernel == "portable.mla_attend_absorbed"
    assert codes(without)["cuda.flashinfer_mla_wrapper"] == "PACKAGE_MISSING"


def test_rtx_pro_6000_xqa_is_for_128_heads() -> None:
    for tp in (1, 2, 4, 8, 16):
        choice = would(k3_plan(target("rtx-pro-6000"), tp), "mla_attend", "decode")
        assert codes(choice)["cuda.flashinfer_mla_xqa"] == "AXIS"
        assert f"H = {96 // tp}, needs one of 128" in detail(choice, "cuda.flashinfer_mla_xqa")
        assert codes(choice)[TRTLLM] == codes(choice)[CUTE] == "ARCH"


def test_mi355x_pads_heads_and_says_what_it_costs() -> None:
    choice = would(k3_plan(target("mi355x")), "mla_attend", "decode")
    assert choice.kernel == "rocm.aiter_mla_asm"
    # (16 - 12) heads x (576 + 512) numbers x 2 bytes.
    assert "12 heads padded to 16: 33% more attention work, 8704 bytes more per token" in choice.padding
    none = would(k3_plan(target("mi355x"), tp=2), "mla_attend", "decode")
    assert (none.kernel, none.padding) == ("rocm.aiter_mla_asm", "")
    without = would(k3_plan(target("mi355x", aiter="")), "mla_attend", "decode")
    assert without.kernel == "portable.mla_attend_absorbed"


@pytest.mark.parametrize("platform", ["mi300x", "mi355x"])
def test_bf16_query_with_fp8_cache_is_a_hole_that_names_both_ways_out(platform: str) -> None:
    """Each single limit holds; only the pair does not. The plan says so, with the settings that work, and goes on."""
    where = target(platform)
    kv = fp8_dtype(where.device.arch)
    choice = would(k3_plan(where, kv_dtype=kv), "mla_attend", "decode")
    said = detail(choice, "rocm.aiter_mla_asm")
    assert f"a bfloat16 query with a {kv} cache has no kernel at 12 heads on {where.device.arch}" in said
    assert "--kv-dtype bfloat16 (heads padded to 16)" in said and "--fp8-queries (heads padded to 16)" in said
    assert choice.kernel == "portable.mla_attend_absorbed"
    # Both named settings lead to the kernel.
    for fields in ({"kv_dtype": "bfloat16"}, {"kv_dtype": kv, "rounds": frozenset({"fp8_query"})}):
        assert would(k3_plan(where, **fields), "mla_attend", "decode").kernel == "rocm.aiter_mla_asm"
    with pytest.raises(PlanError) as caught:
        k3_plan(where, kv_dtype=kv, pins={"mla_attend_decode": "rocm.aiter_mla_asm"})
    assert any("nearest settings that work" in reason for reason in caught.value.reasons)


def test_b200_fp8_cache_needs_fp8_queries_as_well() -> None:
    choice = would(k3_plan(target("b200"), kv_dtype="float8_e4m3fn"), "mla_attend", "decode")
    assert "--kv-dtype bfloat16" in detail(choice, TRTLLM) and "--fp8-queries" in detail(choice, TRTLLM)
    assert choice.kernel == "portable.mla_attend_absorbed"
    fields = {"kv_dtype": "float8_e4m3fn", "rounds": frozenset({"fp8_query"})}
    choice = would(k3_plan(target("b200"), **fields), "mla_attend", "decode")
    assert choice.kernel == TRTLLM
    # The K3 kernel of FlashInfer is offered, and never before the others.
    assert choice.accepted.index("cuda.flashinfer_mla_cake") > choice.accepted.index(CUTE)


def test_a_cache_of_another_type_than_the_query_is_refused() -> None:
    choice = would(k3_plan(target("b200"), kv_dtype="float16"), "mla_attend", "decode")
    assert "a bfloat16 query with a float16 cache" in detail(choice, TRTLLM)


def test_cute_dsl_limits() -> None:
    old, new = target("b200", flashinfer="0.6.14"), target("b200")
    spec = next(k for k in kernels() if k.name == CUTE)
    drafts = decode_query(12, query_tokens=5)
    rejection = reject(spec, drafts, old, built_only=False)
    assert rejection is not None and "5 new tokens per request need FlashInfer >= 0.6.15" in rejection.detail
    assert reject(spec, drafts, new, built_only=False) is None
    for heads, fits in ((1, True), (128, True), (129, False)):
        assert (reject(spec, decode_query(heads), new, built_only=False) is None) is fits


@pytest.mark.parametrize("platform", ["b200", "mi355x"])
def test_gluon_and_pages(platform: str) -> None:
    where = target(platform)
    query = decode_query(12)
    odd = OpQuery(**{**query.__dict__, "axes": {**query.axes, "page": 48}})
    found = {s.name: reject(s, odd, where, built_only=False) for s in kernels() if s.op == "mla_attend"}
    paged = {"b200": (TRTLLM, CUTE), "mi355x": ("rocm.aiter_mla_triton",)}[platform]
    for name in paged:
        rejection = found[name]
        assert rejection is not None and rejection.detail.startswith("page = 48, needs one of")
    assert found["portable.mla_attend_absorbed"] is None


def test_gfx942_triton_runs_out_of_lds() -> None:
    where = target("mi300x")
    spec = next(k for k in kernels() if k.name == "rocm.aiter_mla_triton")
    query = decode_query(96, kv_dtype="float8_e4m3fnuz", rounds=frozenset({"fp8_query"}))
    rejection = reject(spec, query, where, built_only=False)
    assert rejection is not None and "64 KiB of LDS" in rejection.detail
    small = decode_query(64, kv_dtype="float8_e4m3fnuz", rounds=frozenset({"fp8_query"}))
    assert reject(spec, small, where, built_only=False) is None


def test_above_128_heads_the_assembly_needs_whole_tiles() -> None:
    spec = next(k for k in kernels() if k.name == "rocm.aiter_mla_asm")
    found = {h: reject(spec, decode_query(h), target("mi355x"), built_only=False) for h in (130, 144)}
    assert found[144] is None and found[130] is not None and "multiple of 16" in found[130].detail


def test_fp8_prefill_of_amd_is_asked_for_by_name() -> None:
    where, kernel = target("mi355x"), "rocm.aiter_mla_prefill_fp8"
    assert codes(would(k3_plan(where), "mla_attend", "prefill"))[kernel] == "NUMERICS"
    allowed = would(k3_plan(where, rounds=frozenset({"fp8_query"})), "mla_attend", "prefill")
    assert allowed.kernel == kernel and "12 heads padded to 16" in allowed.padding


def test_workspaces() -> None:
    sizes = {s.name: s.workspace_bytes for s in kernels() if s.workspace_bytes}
    query = OpQuery(**{**decode_query(12).__dict__, "tokens": (1, 8192)})
    trtllm = sizes[TRTLLM]
    assert trtllm is not None and trtllm(query) == 128 * MIB + 393216
    cute = sizes[CUTE]
    one = OpQuery(**{**query.__dict__, "tokens": (1, 1)})
    assert cute is not None and cute(one) == 128 * 2 * 513 * 4
    assert all(size is None or size(query) > 0 for size in sizes.values())


def test_the_reference_serves_one_rank_only() -> None:
    """More ranks on a CPU need gloo, which is declared and not built: the plan says so instead of summing nothing."""
    plan = k3_plan(target("cpu"), tp=2, dtype="float32")
    for op in ("all_reduce", "all_gather"):
        assert would(plan, op).kernel == f"portable.gloo_{op}"
        now = plan.selection(op)
        assert now.kernel == ""
        assert codes(now)[f"reference.{op}"] == "AXIS" and codes(now)[f"portable.gloo_{op}"] == "NOT_BUILT"
    with pytest.raises(PlanError):
        resolve(k3_queries(2), kernels(), target("cpu"))
    alone = k3_plan(target("cpu"), tp=1)
    assert would(alone, "all_reduce").kernel == "reference.all_reduce"


def test_declared_kernels_say_what_they_are() -> None:
    for spec in kernels():
        assert spec.doc and (spec.is_built or spec.source), spec.name
        if not spec.is_built:
            assert spec.requires.vendors or spec.name.startswith("portable.gloo"), spec.name
        assert set(spec.requires.kv_dtypes) | set(spec.requires.state_dtypes) <= set(ITEM_BYTES), spec.name


def test_collecting_kernels_imports_no_kernel_package() -> None:
    code = (
        "import sys; from k3port.plugins import make_registry; r = make_registry(entry_points=False);"
        "assert len(r.kernels) > 100, len(r.kernels);"
        "print(*{n.partition('.')[0] for n in sys.modules} & "
        "{'torch', 'triton', 'flashinfer', 'aiter', 'fla', 'numpy'})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
