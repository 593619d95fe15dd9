"""Records of plugins that are wrong in every field: each costs its own kernel, and no plan, list or check of others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from k3port.hookspecs import hookimpl
from k3port.model.config_file import parse_config
from k3port.oracle import admit
from k3port.oracle.admit import spec_doubts, spec_faults
from k3port.oracle.predicates import ask_record, is_own_fault, reject
from k3port.oracle.resolve import resolve
from k3port.oracle.schema import FIELDS, Table
from k3port.oracle.spec import AxisRule, Device, KernelSpec, OpQuery, Padding, Requires, Target
from k3port.plugins import Registry, make_registry
from k3port.runtime.planner import Workload, model_queries
from k3port.runtime.prepare import DTYPES
from k3port.testing.published import published_k3_config

RIGHT = KernelSpec(
    "mine.norm",
    "gated_norm",
    "json:dumps",
    "a kernel",
    requires=Requires(
        vendors=("cpu",),
        archs=("cpu",),
        dtypes=("float32",),
        axes=(AxisRule("V", allowed=(8, 16), minimum=8, maximum=16, multiple_of=8, why="tiles"),),
        tp=(1,),
        packages=("torch>=2",),
        symbols=("torch.nn:Module",),
        runtime=("cuda>=12.8",),
        features=("xgmi",),
    ),
    layouts={"experts": "stored"},
    tokens=(1, 64),
)
CPU = Target("cpu", Device("cpu", "cpu", "CPU", "fake"), packages={"torch": "2.9"})
QUERY = OpQuery("linear", None, {"D": 8}, "float32")


class Unfit:
    """An object that cannot be shown, compared or used for anything."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        raise RuntimeError("no words\nfor it")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison")


WRONG = (None, True, 3, -1, 1.5, "", "tëxt", "two\nlines", b"bytes", ["list"], {"a": 1}, {1}, (None,), (1, "a"), ((),))


def with_(**fields: Any) -> KernelSpec:
    """The right record with fields of its requirements or of its rule replaced."""
    rule = {name: fields.pop(name) for name in [f.name for f in dataclasses.fields(AxisRule)] if name in fields}
    if rule:
        fields["axes"] = (replace(RIGHT.requires.axes[0], **rule),)
    return replace(RIGHT, requires=replace(RIGHT.requires, **fields))


def registry_of(*specs: KernelSpec) -> Registry:
    plugin = type("Mine", (), {"k3port_kernels": hookimpl(lambda self: list(specs))})()
    return make_registry([plugin], entry_points=False)


def fields_of(record: type) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def test_a_right_record_has_neither_faults_nor_doubts() -> None:
    assert spec_faults(RIGHT) == []
    assert spec_doubts(RIGHT, {"cpu"}) == []


@pytest.mark.parametrize(
    ("record", "field"),
    [(r, f) for r in (KernelSpec, Requires, AxisRule) for f in fields_of(r)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("value", [*WRONG, Unfit(), (Unfit(),)], ids=lambda value: "unfit" if callable(value) else None)
def test_no_value_of_any_field_stops_a_plan(record: type, field: str, value: Any) -> None:
    """Either the kernel is left out with one line, or its record is one that a plan can be made with."""
    spec = replace(RIGHT, **{field: value}) if record is KernelSpec else with_(**{field: value})
    registry = registry_of(spec, replace(RIGHT, name="mine.other"))
    assert registry.kernel("mine.other")
    left_out = [p for p in registry.problems if "was left out" in p]
    assert all(p.isprintable() for p in registry.problems)
    assert len(left_out) == (len([s for s in registry.kernels if s.name.startswith("mine.")]) == 1)
    query = OpQuery("gated_norm", None, {"V": 8}, "float32")
    assert resolve([query, QUERY], registry.kernels, CPU).selection("linear").kernel == "cpu.linear"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (replace(RIGHT, tokens=("a", None)), "tokens = ('a', None): expected (first, last)"),
        (replace(RIGHT, tokens=(50, 3)), "tokens = (50, 3): expected (first, last) with 1 <= first <= last"),
        (replace(RIGHT, tokens=(0, 3)), "tokens = (0, 3): expected"),
        (replace(RIGHT, tokens=(True, 3)), "tokens = (True, 3): expected"),
        (with_(maximum="big"), "requires.axes[0].maximum = 'big': expected a whole number or None"),
        (with_(multiple_of=0), "requires.axes[0].multiple_of = 0: expected a whole number of at least 1"),
        (with_(allowed=("8",)), "requires.axes[0].allowed has '8' in it: expected whole numbers"),
        (with_(allowed=8), "requires.axes[0].allowed = 8: expected a tuple of whole numbers; a comma is missing: (8,)"),
        (with_(minimum=9, maximum=8), "requires.axes[0].minimum = 9 is above maximum = 8"),
        (with_(vendors="amd"), "requires.vendors = 'amd': expected a tuple of text; a comma is missing: ('amd',)"),
        (with_(dtypes="bfloat16"), "requires.dtypes = 'bfloat16': expected a tuple of text; a comma is missing"),
        (with_(axes=AxisRule("V")), "expected a tuple of AxisRule; a comma is missing: (AxisRule("),
        (with_(tp=8), "requires.tp = 8: expected a tuple of positive whole numbers; a comma is missing: (8,)"),
        (with_(tp=(0,)), "requires.tp has 0 in it: expected positive whole numbers"),
        (with_(vendors=["amd"]), "requires.vendors = ['amd']: expected a tuple of text"),
        (with_(vendors=("intel",)), "requires.vendors: there is no 'intel'; known: amd, cpu, nvidia"),
        (with_(vendors=("AMD",)), "requires.vendors: there is no 'AMD', did you mean amd?"),
        (with_(dtypes=("bf16",)), "requires.dtypes: there is no 'bf16', did you mean bfloat16?"),
        (with_(dtypes=("fp32",)), "requires.dtypes: there is no 'fp32', did you mean float32?"),
        (with_(state_dtypes=("fp16",)), "requires.state_dtypes: there is no 'fp16', did you mean float16?"),
        (with_(kv_dtypes=("e4m3fn",)), "requires.kv_dtypes: there is no 'e4m3fn', did you mean float8_e4m3fn?"),
        (with_(weight_formats=("mxfp_4",)), "requires.weight_formats: there is no 'mxfp_4', did you mean mxfp4?"),
        (with_(features=("nvlnk",)), "requires.features: there is no 'nvlnk', did you mean nvlink?"),
        (with_(runtime=("cudaa>=12",)), "requires.runtime: there is no 'cudaa', did you mean cuda?"),
        (with_(max_nodes=0), "requires.max_nodes = 0: expected a positive whole number or None"),
        (with_(min_lds_bytes=-1), "requires.min_lds_bytes = -1: expected a number of bytes"),
        (replace(RIGHT, layouts={"kda_stat": "vk"}), "layouts: there is no 'kda_stat', did you mean kda_state?"),
        (replace(RIGHT, layouts={"experts": 1}), "layouts = {'experts': 1}: expected a mapping of text to text"),
        (replace(RIGHT, phases=(None,)), "phases has None in it: expected text"),
        (replace(RIGHT, name="mine.a b"), "name = 'mine.a b': expected backend.kernel of letters, digits"),
        (replace(RIGHT, name="mine..b"), "name = 'mine..b': expected backend.kernel"),
        (replace(RIGHT, name="mine.b\n"), "name = 'mine.b\\n': expected one line of text"),
        (replace(RIGHT, doc="two\nlines"), "doc = 'two\\nlines': expected one line of text"),
        (replace(RIGHT, priority=True), "priority = True: expected a whole number"),
        (replace(RIGHT, parts=("gated_norm",)), "parts: gated_norm is not made of gated_norm; of nothing"),
        (replace(RIGHT, op="kda", parts=("linear",)), "parts: kda is not made of linear; of short_conv, kda_core"),
        (replace(RIGHT, pack="nothere.at.all:f"), "pack: there is no module nothere.at.all"),
        (replace(RIGHT, source=Unfit()), "its record cannot be read: RuntimeError: no words for it"),
    ],
)
def test_a_wrong_record_says_what_is_wrong(spec: KernelSpec, said: str) -> None:
    (problem,) = registry_of(spec).problems
    assert said in problem and "was left out: " in problem


def test_an_unknown_architecture_or_axis_is_a_doubt_and_the_kernel_stays() -> None:
    """An architecture of tomorrow must not need another version of k3port."""
    registry = registry_of(replace(with_(archs=("gfx9999", "sm_80"), axis="Q"), name="mine.new"))
    (problem,) = registry.problems
    assert registry.kernel("mine.new")
    assert "kernel mine.new: requires.archs: no platform has 'gfx9999', did you mean gfx9" in problem
    assert "requires.axes: a rule that limits nothing, no query has 'Q'; known: C, D, " in problem
    assert "sm_80" not in problem.partition("did you mean")[0]


def test_a_platform_of_a_plugin_makes_its_architecture_known(tmp_path: Any) -> None:
    file = tmp_path / "lab.yaml"
    file.write_text("schema: 2\nplatforms:\n  lab: {extends: mi355x, arch: gfx9999}\n")
    hooks = {
        "k3port_kernels": hookimpl(lambda self: [with_(archs=("gfx9999",))]),
        "k3port_platforms": hookimpl(lambda self: [file]),
    }
    registry = make_registry([type("Lab", (), hooks)()], entry_points=False)
    assert registry.problems == ()


def test_the_known_names_are_those_that_queries_and_platforms_have() -> None:
    queries = model_queries(parse_config(published_k3_config()), Workload("bfloat16", "mxfp4", tp=8, vision=(1152, 14)))
    assert {axis for query in queries for axis in query.axes} == set(admit.AXES)
    assert {query.weight_format for query in queries} - {""} <= set(admit.WEIGHT_FORMATS)
    assert set(DTYPES) <= set(admit.DTYPES)
    runtime = FIELDS["runtime"]
    assert isinstance(runtime, Table) and runtime.keys == admit.RUNTIMES
    layouts = {key for spec in make_registry(entry_points=False).kernels for key in spec.layouts}
    assert layouts == set(admit.LAYOUTS)


def raises(*args: Any) -> Any:
    raise RuntimeError("first\n  second")


@pytest.mark.parametrize(
    ("field", "function", "said"),
    [
        ("check", raises, "its own check failed: RuntimeError: first second"),
        ("check", lambda q, t: True, "its own check failed: check must return a reason or None, it returned True"),
        ("check", lambda q, t: False, "its own check failed: check must return a reason or None, it returned False"),
        ("tokens", raises, "its own tokens failed: RuntimeError"),
        ("tokens", lambda q, t: ("a", None), "its own tokens failed: tokens must return (first, last)"),
        ("tokens", lambda q: (1, 2), "its own tokens failed: TypeError"),
        ("padding", raises, "its own padding failed: RuntimeError"),
        ("padding", lambda q: "16", "its own padding failed: padding must return a Padding or None"),
        ("padding", lambda q: Padding({"H": "x"}, ""), "its own padding failed: padding must return a Padding"),  # pyright: ignore
        ("note", raises, "its own note failed: RuntimeError"),
        ("note", lambda q, t: 5, "its own note failed: note must return text, it returned 5"),
        ("workspace_bytes", raises, "its own workspace_bytes failed: RuntimeError"),
        ("workspace_bytes", lambda q: "much", "its own workspace_bytes failed: workspace_bytes must return a number"),
    ],
)
def test_a_function_of_a_record_that_fails_refuses_its_kernel_alone(
    field: str, function: Callable[..., Any], said: str
) -> None:
    spec = KernelSpec("mine.linear", "linear", "json:dumps", "", priority=900, **{field: function})  # pyright: ignore
    plan = resolve([QUERY], registry_of(spec).kernels, CPU)
    assert plan.selection("linear").kernel == "cpu.linear"
    (warning,) = plan.warnings
    assert warning.startswith(f"kernel mine.linear is left out: {said}")
    (rejection,) = [r for r in plan.selection("linear").rejected if r.kernel == "mine.linear"]
    assert is_own_fault(rejection.detail)
    json.loads(plan.to_json())


def test_a_reason_of_several_lines_is_one_and_is_no_fault() -> None:
    spec = KernelSpec("mine.linear", "linear", "json:dumps", "", check=lambda q, t: "not\n   here")
    rejection = reject(spec, QUERY, CPU)
    assert rejection is not None and rejection.detail == "not here" and not is_own_fault(rejection.detail)
    assert ask_record(replace(spec, check=None), "check", QUERY, CPU) == (None, "")
