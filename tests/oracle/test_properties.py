"""Properties of every plan, over random platforms, sizes, settings and package sets."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from targets import PLATFORMS, k3_queries, kernels, target

from k3port.errors import PlanError
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import KernelSpec, OpQuery, Plan, Target

PACKAGES = {
    "flashinfer-python": ("0.6.16", "0.6.18", "0.7.4"),
    "amd-aiter": ("0.1.7", "0.1.20", "0.1.26"),
    "flydsl": ("0.2.0", "0.3.1"),
    "fla-core": ("0.5.0", "0.6.0"),
    "flash-kda": ("1.0",),
    "triton": ("3.2.0", "3.5.0", "3.7.0"),
    "torch": ("2.6.0", "2.14.0"),
}

package_sets = st.fixed_dictionaries({}, optional={name: st.sampled_from(v) for name, v in PACKAGES.items()})
workloads = st.fixed_dictionaries(
    {
        "tp": st.sampled_from((1, 2, 4, 8, 16)),
        "nodes": st.sampled_from((1, 2, 4)),
        "dtype": st.sampled_from(("bfloat16", "float32")),
        "weight_format": st.sampled_from(("mxfp4", "bfloat16")),
        "kv_dtype": st.sampled_from(("", "float8_e4m3fn", "float8_e4m3fnuz")),
        "state_dtype": st.sampled_from(("float32", "bfloat16")),
        "query_tokens": st.sampled_from((1, 2, 8, 9)),
        "graph": st.booleans(),
        "deterministic": st.booleans(),
        "rounds": st.frozensets(st.sampled_from(("mxfp8", "mxfp4", "fp8_query", "int8_messages"))),
    }
)
quick = settings(max_examples=40, deadline=None)


def where(platform: str, packages: Mapping[str, str]) -> Target:
    return replace(target(platform), packages=dict(packages))


def queries(work: Mapping[str, object]) -> list[OpQuery]:
    fields = dict(work)
    return k3_queries(fields.pop("tp"), **fields)  # type: ignore[arg-type]


def same(plan: Plan) -> str:
    return json.dumps(json.loads(plan.to_json()), sort_keys=True)


@quick
@given(st.sampled_from(PLATFORMS), package_sets, workloads)
def test_every_slot_has_a_kernel_or_a_reason_from_each(
    platform: str, packages: dict[str, str], work: dict[str, object]
) -> None:
    """Whatever is asked: one answer per candidate, windows without holes, one layout per shared object."""
    asked = queries(work)
    plan = resolve(asked, kernels(), where(platform, packages), allow_gaps=True)
    for selections in (plan.selections, plan.would_run):
        layouts: dict[str, str] = {}
        by_slot: dict[str, list[tuple[int, int | None]]] = {}
        for s in selections:
            by_slot.setdefault(s.slot, []).append(s.tokens)
            candidates = {k.name for k in kernels() if k.op == s.op}
            told = [r.kernel for r in s.rejected]
            assert len(told) == len(set(told))
            assert set(told) | {s.kernel or ""} >= candidates, s.slot
            assert all(r.detail and "check failed" not in r.detail for r in s.rejected)
            assert s.kernel == "" or s.kernel in s.accepted
            assert s.reason
            for key, tag in s.layouts.items():
                assert layouts.setdefault(key, tag) == tag, (s.slot, key)
        for query in asked:
            windows = by_slot[query.slot]
            assert windows[0][0] == 1 and windows[-1][1] is None
            assert all(a[1] is not None and a[1] + 1 == b[0] for a, b in zip(windows, windows[1:], strict=False))


@quick
@given(st.sampled_from(PLATFORMS), package_sets, workloads, st.sampled_from(sorted(PACKAGES)), st.data())
def test_adding_a_package_never_removes_a_kernel(
    platform: str, packages: dict[str, str], work: dict[str, object], added: str, data: st.DataObject
) -> None:
    before = {name: version for name, version in packages.items() if name != added}
    after = {**before, added: data.draw(st.sampled_from(PACKAGES[added]))}
    plans = [resolve(queries(work), kernels(), where(platform, p), allow_gaps=True) for p in (before, after)]
    for which in ("selections", "would_run"):
        had, has = (accepted(plan, which) for plan in plans)
        for tokens in (1, 9, 36, 37, 300, 5000, 20000):
            for slot, spans in had.items():
                old = {name for span, names in spans for name in names if inside(tokens, span)}
                new = {name for span, names in has[slot] for name in names if inside(tokens, span)}
                assert old <= new, (slot, tokens)


Spans = list[tuple[tuple[int, int | None], tuple[str, ...]]]


def accepted(plan: Plan, which: str) -> dict[str, Spans]:
    result: dict[str, Spans] = {}
    for s in getattr(plan, which):
        result.setdefault(s.slot, []).append((s.tokens, s.accepted))
    return result


def inside(tokens: int, span: tuple[int, int | None]) -> bool:
    return span[0] <= tokens and (span[1] is None or tokens <= span[1])


@quick
@given(st.sampled_from(PLATFORMS), package_sets, workloads, st.randoms(use_true_random=False))
def test_the_order_of_plugins_changes_nothing(
    platform: str, packages: dict[str, str], work: dict[str, object], dice: random.Random
) -> None:
    shuffled: list[KernelSpec] = list(kernels())
    dice.shuffle(shuffled)
    place = where(platform, packages)
    plans = [resolve(queries(work), specs, place, allow_gaps=True) for specs in (kernels(), shuffled)]
    assert same(plans[0]) == same(plans[1])


@quick
@given(st.sampled_from(PLATFORMS), package_sets, workloads, st.data())
def test_a_pin_is_kept_or_the_plan_fails(
    platform: str, packages: dict[str, str], work: dict[str, object], data: st.DataObject
) -> None:
    asked = queries(work)
    query = data.draw(st.sampled_from(asked))
    # Every kernel as if it were built: a pin to a declared one fails for that reason alone otherwise.
    built = [replace(k, load=k.load or "nowhere:nothing") for k in kernels()]
    pin = data.draw(st.sampled_from(sorted(k.name for k in built if k.op == query.op)))
    spec = next(k for k in built if k.name == pin)
    place = where(platform, packages)
    try:
        plan = resolve(asked, built, place, pins={query.slot: pin}, allow_gaps=True)
    except PlanError:
        return
    first, last = spec.window(query, place)
    for s in plan.would_run:
        if s.slot == query.slot and s.kernel:
            covered = s.tokens[0] >= first and (last is None or (s.tokens[1] is not None and s.tokens[1] <= last))
            assert s.kernel == pin or not covered, s


@quick
@given(st.sampled_from(PLATFORMS), package_sets, workloads)
def test_plans_survive_json(platform: str, packages: dict[str, str], work: dict[str, object]) -> None:
    plan = resolve(queries(work), kernels(), where(platform, packages), allow_gaps=True)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.diff(plan) == []
