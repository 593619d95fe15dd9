"""Every code and every branch of the predicate: what is refused, in which words, and in which order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from k3port.oracle.predicates import reject, satisfies
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import (
    AxisRule,
    Device,
    KernelSpec,
    OpQuery,
    Rejection,
    RejectionCode,
    Requires,
    Target,
)
from k3port.plugins import make_registry

TARGET = Target(
    "test-gpu",
    Device("nvidia", "sm_100", "test", "fake", lds_bytes=64 << 10),
    packages={"flashinfer-python": "0.7.4", "odd": "not a version"},
    packages_source="test",
    runtime={"cuda": "12.8"},
    features=frozenset({"nvlink"}),
)
QUERY = OpQuery(
    "mla_attend",
    "decode",
    {"H": 12, "C": 512},
    "bfloat16",
    weight_format="mxfp4",
    kv_dtype="bfloat16",
    state_dtype="float32",
    tp=8,
    ep=1,
)


def spec(requires: Requires | None = None, **fields: Any) -> KernelSpec:
    return KernelSpec("a.kernel", "mla_attend", "nowhere:nothing", "", requires=requires or Requires(), **fields)


def ask(kernel: KernelSpec, query: OpQuery = QUERY, target: Target = TARGET, **more: Any) -> Rejection:
    found = reject(kernel, query, target, **more)
    assert found is not None
    return found


LIMITS: list[tuple[Requires, str, str]] = [
    (Requires(vendors=("amd",)), "VENDOR", "needs amd, the device is nvidia"),
    (Requires(archs=("sm_90", "sm_103")), "ARCH", "needs sm_90 or sm_103, the device is sm_100"),
    (Requires(min_lds_bytes=160 << 10), "LDS", "needs 163840 bytes of shared memory per block, there are 65536"),
    (Requires(dtypes=("float16",)), "DTYPE", "needs float16 activations, asked for bfloat16"),
    (Requires(weight_formats=("bfloat16",)), "WEIGHT_FORMAT", "reads bfloat16 weights, the checkpoint has mxfp4"),
    (Requires(kv_dtypes=("float8_e4m3fn",)), "KV_DTYPE", "needs a float8_e4m3fn cache, asked for bfloat16"),
    (Requires(state_dtypes=("bfloat16",)), "DTYPE", "needs a bfloat16 state, asked for float32"),
    (Requires(axes=(AxisRule("H", allowed=(128,), why="built so"),)), "AXIS", "H = 12, needs one of 128 (built so)"),
    (Requires(axes=(AxisRule("H", minimum=16),)), "AXIS", "H = 12, needs at least 16"),
    (Requires(axes=(AxisRule("H", maximum=8),)), "AXIS", "H = 12, needs at most 8"),
    (Requires(axes=(AxisRule("H", multiple_of=8),)), "AXIS", "H = 12, needs a multiple of 8"),
    (Requires(tp=(2, 4)), "AXIS", "serves 2 or 4 ranks, asked for 8"),
    (Requires(ep=(2,)), "AXIS", "serves expert-parallel size 2, asked for 1"),
    (Requires(packages=("amd-aiter",)), "PACKAGE_MISSING", "amd-aiter is not installed (test)"),
    (
        Requires(packages=("flashinfer_python>=0.8",)),
        "PACKAGE_VERSION",
        "needs flashinfer_python>=0.8, test has 0.7.4",
    ),
    (Requires(packages=("odd>=1",)), "PACKAGE_VERSION", "needs odd>=1, test has not a version"),
    (Requires(runtime=("cuda>=12.9",)), "RUNTIME", "needs cuda>=12.9, the target has cuda 12.8"),
    (Requires(features=("mnnvl",)), "FEATURE", "needs mnnvl, which test-gpu does not have"),
]


@pytest.mark.parametrize(("requires", "code", "detail"), LIMITS, ids=[f"{c} {d[:30]}" for _, c, d in LIMITS])
def test_each_limit(requires: Requires, code: str, detail: str) -> None:
    found = ask(spec(requires))
    assert (found.kernel, found.code, found.detail) == ("a.kernel", code, detail)


def test_a_limit_on_something_that_is_unknown_or_absent_refuses_nothing() -> None:
    nothing = OpQuery("mla_attend", None, {}, "bfloat16")
    limits = Requires(
        weight_formats=("mxfp4",),
        kv_dtypes=("bfloat16",),
        state_dtypes=("float32",),
        axes=(AxisRule("page", allowed=(64,)),),
        min_lds_bytes=1 << 20,
        runtime=("driver>=580",),
        query_tokens=1,
        symbols=("flashinfer:there",),
    )
    unknown = replace(TARGET, device=replace(TARGET.device, lds_bytes=0))
    assert reject(spec(limits), nothing, unknown) is None


def test_phase_comes_first_and_an_op_without_phases_passes() -> None:
    kernel = spec(Requires(vendors=("amd",)), phases=("prefill",))
    assert (ask(kernel).code, ask(kernel).detail) == ("PHASE", "serves prefill, not decode")
    assert ask(kernel, replace(QUERY, phase=None)).code == "VENDOR"


def test_nodes() -> None:
    found = ask(spec(Requires(max_nodes=1)), replace(QUERY, nodes=2))
    assert (found.code, found.detail) == ("FEATURE", "serves 1 node, asked for 2")
    assert reject(spec(Requires(max_nodes=1)), QUERY, TARGET) is None


def test_query_length_is_asked_in_decode_only() -> None:
    kernel, drafts = spec(Requires(query_tokens=4)), replace(QUERY, query_tokens=8)
    assert (ask(kernel, drafts).code, ask(kernel, drafts).detail) == (
        "AXIS",
        "serves 4 new tokens per request, asked for 8",
    )
    assert reject(kernel, replace(drafts, phase="prefill"), TARGET) is None
    assert reject(kernel, replace(QUERY, query_tokens=4), TARGET) is None


def test_check_gives_its_reason() -> None:
    assert ask(spec(check=lambda query, target: f"no {query.axes['H']} on {target.platform}")).detail == (
        "no 12 on test-gpu"
    )
    assert reject(spec(check=lambda query, target: None), QUERY, TARGET) is None


def test_rounding_has_to_be_allowed() -> None:
    kernel = spec(rounds="mxfp8")
    found = ask(kernel)
    assert (found.code, found.hint) == ("NUMERICS", "--activations mxfp8")
    assert found.detail == "its rounding mxfp8 was not asked for"
    assert ask(spec(rounds="fp8_query")).hint == "--fp8-queries"
    assert ask(spec(rounds="someone's own")).hint == ""
    assert reject(kernel, replace(QUERY, rounds=frozenset({"mxfp8"})), TARGET) is None


def test_graphs_capture_decode_only() -> None:
    kernel, captured = spec(graph_safe=False), replace(QUERY, graph=True)
    assert ask(kernel, captured).code == "GRAPH"
    assert ask(kernel, replace(captured, phase=None)).code == "GRAPH"
    assert reject(kernel, replace(captured, phase="prefill"), TARGET) is None
    assert reject(kernel, QUERY, TARGET) is None


def test_determinism() -> None:
    kernel = spec(deterministic=False)
    assert ask(kernel, replace(QUERY, deterministic=True)).code == "DETERMINISM"
    assert reject(kernel, QUERY, TARGET) is None


@pytest.mark.parametrize("tokens", [(1, 7), (1, None), (4, 9), (9, 12)])
def test_a_step_outside_the_window(tokens: tuple[int, int | None]) -> None:
    found = ask(spec(tokens=(4, 8)), replace(QUERY, tokens=tokens))
    assert (found.code, found.detail) == ("TOKENS", "serves steps of 4 to 8 tokens")


def test_windows_without_an_end_and_from_the_target() -> None:
    assert ask(spec(tokens=(4, None))).detail == "serves steps of 4 to any tokens"
    kernel = spec(tokens=lambda query, target: (1, 8 if target.device.arch == "sm_100" else None))
    assert ask(kernel).code == "TOKENS"
    elsewhere = replace(TARGET, device=replace(TARGET.device, arch="sm_103"))
    assert reject(kernel, QUERY, elsewhere) is None


def test_switched_off_probed_missing_unbuilt() -> None:
    kernel = spec(Requires(symbols=("flashinfer.mla:gone",)))
    assert ask(kernel, target=replace(TARGET, disabled={"a.kernel": "K3PORT_DISABLE"})).detail == "K3PORT_DISABLE"
    assert ask(kernel, target=replace(TARGET, disabled={"a.kernel": "x"})).code == "DISABLED"
    probed = ask(kernel, target=replace(TARGET, failed_probes={"a.kernel": "wrong sums"}))
    assert (probed.code, probed.detail) == ("PROBE_FAILED", "wrong sums")
    missing = ask(kernel, target=replace(TARGET, missing_symbols=frozenset({"flashinfer.mla:gone"})))
    assert (missing.code, missing.detail) == (
        "SYMBOL_MISSING",
        "flashinfer.mla:gone is not in the installed package",
    )
    unbuilt = replace(kernel, load="")
    assert ask(unbuilt).code == "NOT_BUILT"
    assert reject(unbuilt, QUERY, TARGET, built_only=False) is None


def test_the_reason_that_no_setting_can_change_is_the_one_reported() -> None:
    """Device before types, types before sizes, sizes before packages, packages before NOT_BUILT."""
    limits = Requires(
        archs=("sm_90",), dtypes=("float16",), axes=(AxisRule("H", minimum=64),), packages=("absent",), features=("x",)
    )
    found = []
    kernel = replace(spec(limits), load="")
    for relaxed in ("archs", "dtypes", "axes", "packages", "features", None):
        found.append(ask(kernel).code)
        if relaxed:
            kernel = replace(kernel, requires=replace(kernel.requires, **{relaxed: ()}))
    assert found == ["ARCH", "DTYPE", "AXIS", "PACKAGE_MISSING", "FEATURE", "NOT_BUILT"]


@pytest.mark.parametrize(
    ("version", "requirement", "answer"),
    [
        ("0.6.17", "flashinfer-python>=0.6.17", True),
        ("0.6.16", "flashinfer-python>=0.6.17", False),
        ("0.7.2.post1", "flashinfer-python>=0.7.2", True),
        ("2.14.0a0+git1", "torch>=2.7", True),
        ("unknown", "torch>=2.7", False),
        ("3.7.0", "triton>=3.7,<3.8", True),
    ],
)
def test_versions(version: str, requirement: str, answer: bool) -> None:
    assert satisfies(version, requirement) is answer


def test_memory_of_a_block_that_is_just_enough() -> None:
    assert reject(spec(Requires(min_lds_bytes=64 << 10)), QUERY, TARGET) is None
    assert ask(spec(Requires(min_lds_bytes=(64 << 10) + 1))).code == "LDS"


def plan_codes(specs: list[KernelSpec], **more: Any) -> set[str]:
    query = OpQuery("kda", "decode", {}, "bfloat16")
    fine = OpQuery("kda_core", "decode", {}, "bfloat16", direct=False)
    append = [OpQuery("mla_append", None, {}, "bfloat16")] * any(spec.op == "mla_append" for spec in specs)
    plan = resolve([query, fine, *append], specs, TARGET, **more)
    return {r.code for s in plan.selections for r in s.rejected}


def test_codes_of_the_resolver() -> None:
    """NOT_PINNED, OUTRANKED, COVERED and LAYOUT belong to a plan, not to one kernel."""
    first = KernelSpec("a.first", "kda", "n:n", "", priority=2, layouts={"kda_state": "vk"}, covers=("kda_core",))
    other = KernelSpec("b.other", "kda", "n:n", "", priority=1, layouts={"kda_state": "kv"})
    same = KernelSpec("c.same", "kda", "n:n", "")
    core = KernelSpec("d.core", "kda_core", "n:n", "")
    layer = KernelSpec("e.layer", "mla_append", "n:n", "", layouts={"kda_state": "vk"})
    assert plan_codes([first, other, same, core, layer]) == {"LAYOUT", "OUTRANKED", "COVERED"}
    assert plan_codes([first, same, core], pins={"kda": "a.first"}) == {"NOT_PINNED", "COVERED"}


def test_references_need_leave_on_an_accelerator() -> None:
    strict = replace(TARGET, allow_reference=False)
    slow = KernelSpec("reference.x", "linear", "n:n", "", fallback=True)
    refusal = ask(slow, target=strict)
    assert (refusal.code, refusal.hint) == ("REFERENCE", "--allow-reference")
    assert reject(slow, QUERY, TARGET) is None
    assert reject(replace(slow, fallback=False), QUERY, strict) is None
    on_cpu = replace(strict, device=Device("cpu", "cpu", "cpu", "fake"))
    assert reject(slow, QUERY, on_cpu) is None
    query = OpQuery("linear", None, {}, "bfloat16")
    assert resolve([query], [slow], strict, allow_gaps=True).gaps()
    (chosen,) = resolve([query], [slow], TARGET).selections
    assert (chosen.kernel, chosen.reason) == (
        "reference.x",
        "the only kernel that fits; a reference, allowed on this GPU",
    )
    (pinned,) = resolve([query], [slow], strict, pins={"linear": "reference.x"}).selections
    assert (pinned.kernel, pinned.reason.partition(";")[0]) == ("reference.x", "pinned")


def test_composites_and_what_does_nothing_are_no_fallbacks() -> None:
    slow = {spec.name for spec in make_registry(entry_points=False).kernels if spec.fallback}
    assert {name.partition(".")[0] for name in slow} == {"reference"}
    assert {"reference.linear", "reference.mla_attend_absorbed", "reference.moe_experts"} <= slow
    assert not slow & {f"reference.{op}" for op in ("kda", "moe", "dense_mlp", "all_reduce", "all_gather")}


def test_every_code_has_a_test() -> None:
    here = {code for _, code, _ in LIMITS}
    here |= {"PHASE", "TOKENS", "SYMBOL_MISSING", "GRAPH", "DETERMINISM", "DISABLED", "PROBE_FAILED", "NOT_BUILT"}
    here |= {"NUMERICS", "LAYOUT", "OUTRANKED", "COVERED", "NOT_PINNED", "REFERENCE"}
    assert here == set(get_args(RejectionCode))
