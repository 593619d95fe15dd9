"""The resolver: priorities, pins, layout agreement, coverage, and a reason for every kernel not taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3port.errors import ExitCode, PlanError, UsageError
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import Device, KernelSpec, OpQuery, Plan, Requires, Target

CPU = Target("cpu", Device("cpu", "cpu", "test", "fake"))


def kernel(name: str, op: str, priority: int = 0, **fields: object) -> KernelSpec:
    spec = KernelSpec(name=name, op=op, load="nowhere:nothing", doc="", priority=priority)
    return replace(spec, **fields)  # type: ignore[arg-type]


def queries(*slots: str, **fields: object) -> list[OpQuery]:
    result = []
    for slot in slots:
        op, _, phase = slot.partition("@")
        result.append(OpQuery(op, phase or None, {}, "float32", **fields))  # type: ignore[arg-type]
    return result


def codes(plan: Plan, op: str, phase: str | None = None) -> dict[str, str]:
    return {r.kernel: r.code for r in plan.selection(op, phase).rejected}  # type: ignore[arg-type]


def test_highest_priority_wins_and_the_other_is_explained():
    plan = resolve(queries("linear"), [kernel("a.slow", "linear"), kernel("b.fast", "linear", 100)], CPU)
    selection = plan.selection("linear")
    assert selection.kernel == "b.fast"
    assert selection.accepted == ("b.fast", "a.slow")
    assert codes(plan, "linear") == {"a.slow": "OUTRANKED"}
    assert selection.reason == "first of 2 that fit"


@pytest.mark.parametrize(
    ("requires", "code"),
    [
        (Requires(vendors=("amd",)), "VENDOR"),
        (Requires(archs=("gfx950",)), "ARCH"),
        (Requires(dtypes=("bfloat16",)), "DTYPE"),
        (Requires(weight_formats=("mxfp4",)), "WEIGHT_FORMAT"),
        (Requires(tp=(1,)), "AXIS"),
    ],
)
def test_each_limit_has_its_code(requires: Requires, code: str):
    specs = [kernel("a.any", "linear"), kernel("b.limited", "linear", 100, requires=requires)]
    plan = resolve(queries("linear", weight_format="bfloat16", tp=2), specs, CPU)
    assert plan.selection("linear").kernel == "a.any"
    assert codes(plan, "linear") == {"b.limited": code}


def test_a_check_gives_its_own_words():
    spec = kernel("b.eight", "moe_route", 100, check=lambda q, d: f"top-k {q.axes['X']} exceeds 8")
    query = OpQuery("moe_route", None, {"X": 16}, "float32")
    plan = resolve([query], [kernel("a.any", "moe_route"), spec], CPU)
    (rejection,) = plan.selection("moe_route").rejected
    assert (rejection.kernel, rejection.detail) == ("b.eight", "top-k 16 exceeds 8")


def test_b37_a_kernel_with_a_small_top_k_is_rejected_with_the_limit_named():
    test_a_check_gives_its_own_words()


def test_prefill_and_decode_agree_on_the_state_layout():
    """The decode kernel's rank decides; a faster prefill kernel with another state layout is left out."""
    specs = [
        kernel("a.decode", "kda_core", 100, phases=("decode",), layouts={"kda_state": "vk"}),
        kernel("b.prefill_fast", "kda_core", 200, phases=("prefill",), layouts={"kda_state": "kv"}),
        kernel("c.prefill", "kda_core", 50, phases=("prefill",), layouts={"kda_state": "vk"}),
    ]
    plan = resolve(queries("kda_core@prefill", "kda_core@decode"), specs, CPU)
    assert plan.selection("kda_core", "prefill").kernel == "c.prefill"
    assert codes(plan, "kda_core", "prefill")["b.prefill_fast"] == "LAYOUT"


def test_decode_gives_way_when_no_prefill_kernel_shares_its_layout():
    specs = [
        kernel("a.decode_fast", "kda_core", 200, phases=("decode",), layouts={"kda_state": "kv"}),
        kernel("b.decode", "kda_core", 0, phases=("decode",), layouts={"kda_state": "vk"}),
        kernel("c.prefill", "kda_core", 50, phases=("prefill",), layouts={"kda_state": "vk"}),
    ]
    plan = resolve(queries("kda_core@prefill", "kda_core@decode"), specs, CPU)
    assert plan.selection("kda_core", "decode").kernel == "b.decode"
    assert codes(plan, "kda_core", "decode")["a.decode_fast"] == "LAYOUT"
    reason = plan.selection("kda_core", "decode").reason
    assert reason == "a.decode_fast would come first and cannot go with the other choices"


def test_a_composite_that_lost_through_its_parts_was_not_outranked():
    """Its own layout is free; the kernel of its only part has another one than the decode kernel."""
    specs = [
        kernel("d.decode", "kda", phases=("decode",), layouts={"kda_state": "vk"}),
        kernel("a.parts", "kda", 200, phases=("prefill",), parts=("kda_core",)),
        kernel("b.whole", "kda", 100, phases=("prefill",), layouts={"kda_state": "vk"}),
        kernel("c.slow", "kda", 0, phases=("prefill",), layouts={"kda_state": "vk"}),
        kernel("e.core", "kda_core", phases=("prefill",), layouts={"kda_state": "kv"}),
    ]
    asked = [*queries("kda@prefill", "kda@decode"), *queries("kda_core@prefill", direct=False)]
    plan = resolve(asked, specs, CPU)
    chosen = plan.selection("kda", "prefill")
    assert chosen.kernel == "b.whole"
    assert chosen.reason == "a.parts would come first and cannot go with the other choices"
    refusal = {r.kernel: r for r in chosen.rejected}
    assert refusal["a.parts"].code == "LAYOUT" and "kda_core go with it" in refusal["a.parts"].detail
    assert refusal["c.slow"].code == "OUTRANKED" and refusal["c.slow"].detail == "b.whole comes first"


def test_what_only_the_chosen_kernel_itself_needs_is_no_clash():
    """A pin of the other would be kept: nothing but rank speaks against it."""
    specs = [
        kernel("a.first", "moe_experts", 100, layouts={"experts": "packed"}),
        kernel("b.second", "moe_experts", layouts={"experts": "stored"}),
    ]
    assert codes(resolve(queries("moe_experts"), specs, CPU), "moe_experts") == {"b.second": "OUTRANKED"}
    pinned = resolve(queries("moe_experts"), specs, CPU, pins={"moe_experts": "b.second"})
    assert pinned.selection("moe_experts").kernel == "b.second"


def test_the_order_of_a_platform_is_recorded():
    specs = [kernel("a.high", "linear", 100), kernel("b.low", "linear")]
    plan = resolve(queries("linear"), specs, replace(CPU, preferences={"linear": ("b.low",)}))
    chosen = plan.selection("linear")
    assert (chosen.kernel, chosen.reason) == ("b.low", "first of 2 that fit, in the order of cpu")


def test_where_both_phases_would_rather_have_another_layout_decode_decides():
    specs = [
        kernel("a.decode_fast", "kda_core", 100, phases=("decode",), layouts={"kda_state": "kv"}),
        kernel("b.decode", "kda_core", 0, phases=("decode",), layouts={"kda_state": "vk"}),
        kernel("c.prefill_fast", "kda_core", 200, phases=("prefill",), layouts={"kda_state": "vk"}),
        kernel("d.prefill", "kda_core", 0, phases=("prefill",), layouts={"kda_state": "kv"}),
    ]
    for slots in (("kda_core@prefill", "kda_core@decode"), ("kda_core@decode", "kda_core@prefill")):
        plan = resolve(queries(*slots), specs, CPU)
        assert plan.selection("kda_core", "decode").kernel == "a.decode_fast"
        assert plan.selection("kda_core", "prefill").kernel == "d.prefill"


def test_a_conflict_without_a_way_out_is_an_error():
    specs = [
        kernel("a.decode", "kda_core", phases=("decode",), layouts={"kda_state": "kv"}),
        kernel("c.prefill", "kda_core", phases=("prefill",), layouts={"kda_state": "vk"}),
    ]
    with pytest.raises(PlanError, match="agrees on layouts") as caught:
        resolve(queries("kda_core@prefill", "kda_core@decode"), specs, CPU)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED


def test_parts_are_chosen_only_for_a_composite():
    parts = ("moe_route", "moe_experts")
    fine = [kernel("r.route", "moe_route"), kernel("r.experts", "moe_experts")]
    composite = kernel("r.moe", "moe", parts=parts)
    fused = kernel("v.moe", "moe", 200, covers=parts)
    asked = [*queries("moe"), *queries(*parts, direct=False)]
    plan = resolve(asked, [composite, *fine], CPU)
    assert [s.kernel for s in plan.selections] == ["r.moe", "r.route", "r.experts"]
    plan = resolve(asked, [composite, fused, *fine], CPU)
    assert [s.kernel for s in plan.selections] == ["v.moe", "", ""]
    assert plan.selection("moe_route").reason == "covered by v.moe"
    assert codes(plan, "moe_route") == {"r.route": "COVERED"}


def test_a_pin_beats_priority_and_one_phase_beats_the_whole_op():
    specs = [kernel("a.ref", "kda"), kernel("b.fast", "kda", 100)]
    one, whole = {"kda@decode": "a.ref"}, {"kda": "b.fast"}
    for pins in ({**one, **whole}, {**whole, **one}):
        plan = resolve(queries("kda@prefill", "kda@decode"), specs, CPU, pins=pins)
        assert plan.selection("kda", "decode").kernel == "a.ref"
        assert plan.selection("kda", "decode").reason == "pinned"
        assert plan.selection("kda", "prefill").kernel == "b.fast"
        assert codes(plan, "kda", "decode") == {"b.fast": "NOT_PINNED"}


def test_a_pin_that_cannot_be_kept_fails_loudly():
    specs = [kernel("a.ref", "kda"), kernel("b.amd", "kda", 100, requires=Requires(vendors=("amd",)))]
    with pytest.raises(PlanError) as caught:
        resolve(queries("kda@decode"), specs, CPU, pins={"kda": "b.amd"})
    assert any("b.amd: VENDOR" in reason for reason in caught.value.reasons)


@pytest.mark.parametrize(
    ("pins", "hint"), [({"kdaa": "a.ref"}, "did you mean kda"), ({"kda": "a.reff"}, "did you mean a.ref?")]
)
def test_an_unknown_pin_names_the_nearest(pins: dict[str, str], hint: str):
    with pytest.raises(UsageError) as caught:
        resolve(queries("kda@decode"), [kernel("a.ref", "kda")], CPU, pins=pins)
    assert hint in caught.value.hint


def test_an_op_without_a_kernel_is_an_error_that_lists_the_refusals():
    spec = kernel("b.amd", "linear", requires=Requires(vendors=("amd",)))
    with pytest.raises(PlanError) as caught:
        resolve(queries("linear", "logits"), [spec], CPU)
    text = "\n".join(caught.value.reasons)
    assert "linear: b.amd: VENDOR" in text
    assert "logits: no kernel is registered" in text


def test_a_plan_survives_json_and_tells_its_difference():
    specs = [kernel("a.ref", "kda"), kernel("b.fast", "kda", 100, layouts={"kda_state": "vk"})]
    asked = queries("kda@prefill", "kda@decode")
    plan = resolve(asked, specs, CPU)
    assert Plan.from_json(plan.to_json()) == plan
    other = resolve(asked, specs, CPU, pins={"kda@decode": "a.ref"})
    assert plan.diff(other) == ["kda_decode: b.fast -> a.ref", "would run: kda_decode: b.fast -> a.ref"]
    with pytest.raises(ValueError, match="plan version 99"):
        Plan.from_json(plan.to_json().replace('"version": 2', '"version": 99'))


def test_the_version_is_that_of_the_package_and_not_of_one_with_a_similar_name():
    spec = kernel("a.fast", "linear", requires=Requires(packages=("Torch_Extras>=1",)))
    place = replace(CPU, packages={"torch": "2.14.0", "torch-extras": "1.5"})
    assert resolve(queries("linear"), [spec], place).selection("linear").version == "torch-extras 1.5"
