"""The suite of one kernel: which cases there are, what is refused, what survives a trip through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from builtin_kernels import CPU, KERNELS, REGISTRY

from k3port.ops.contract import Sample
from k3port.oracle.spec import AxisRule, KernelSpec, Requires
from k3port.testing import suite
from k3port.testing.contract.memory import Guards
from k3port.testing.harness import op_contracts
from k3port.testing.suite import INVARIANT, SuiteReport, run_suite


def norm(name: str = "reference.rms_norm", **changes: Any) -> KernelSpec:
    return replace(REGISTRY.kernel(name), **changes)


def only_rows(sample: Sample) -> bool:
    return sample.name == "rows"


def run(spec: KernelSpec, **options: Any) -> SuiteReport:
    return run_suite(spec, KERNELS, target=CPU, **{"dtypes": [torch.float32], **options})


def test_every_sample_runs_in_every_memory_order() -> None:
    report = run(norm(), dtypes=[torch.float32, torch.float16])
    report.check()
    (contract,) = op_contracts("rms_norm")
    samples = [sample.name for sample in contract.samples(torch.float32, torch.Generator())]
    assert [case.sample for case in report.ran if case.dtype == "float16" and case.variant == "plain"] == samples
    assert {case.variant for case in report.ran} == {"plain", "strided", "permuted", "unaligned"}
    assert len(report.ran) == 2 * 4 * len(samples)
    assert not report.refused
    assert all(case.seconds > 0 for case in report.ran)
    assert report.seconds > 0
    assert set(report.worst()) == {"float32", "float16"}


def test_a_kernel_really_gets_each_memory_order(monkeypatch: pytest.MonkeyPatch) -> None:
    import k3port.ops.norm as module

    seen: list[tuple[tuple[int, ...], int, int]] = []

    def spy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        seen.append((x.stride(), x.data_ptr() % 64, weight.data_ptr() % 64))
        return module.rms_norm(x, weight, eps)

    monkeypatch.setattr(module, "spy", spy, raising=False)
    report = run(norm(load=f"{module.__name__}:spy"), samples=only_rows)
    report.check()
    assert [case.variant for case in report.ran] == ["plain", "strided", "permuted", "unaligned"]
    width, rows = 256, 37
    # A case may be called more than once.
    assert list(dict.fromkeys(seen)) == [
        ((width, 1), 0, 0),
        ((width + 24, 1), 32, 0),
        ((1, rows), 0, 0),
        ((width + 1, 1), 4, 0),
    ]


def test_what_the_record_does_not_admit_is_refused_with_its_reason() -> None:
    spec = norm(requires=Requires(dtypes=("float32",), axes=(AxisRule("D", maximum=256),)))
    report = run(spec, dtypes=[torch.float32, torch.bfloat16], variants=["plain"])
    assert {case.sample for case in report.refused if case.dtype == "float32"} == {"wide"}
    reasons = report.refusals()
    assert reasons["AXIS: D = 7168, needs at most 256"] == 1
    assert reasons["DTYPE: needs float32 activations, asked for bfloat16"] == 7
    assert all(case.report is None and case.variant == "plain" for case in report.refused)


def test_a_declared_kernel_is_refused_whole() -> None:
    report = run(norm(load=""))
    assert not report.ran
    assert list(report.refusals()) == ["NOT_BUILT: its adapter does not exist in this version"]


def test_samples_and_variants_can_be_chosen() -> None:
    report = run(norm(), samples=only_rows, variants=["permuted"])
    assert [(case.sample, case.variant) for case in report.cases] == [("rows", "permuted")]
    assert report.cases[0].name == "float32, 'rows', permuted"


def test_phases_are_refused_and_invariants_run() -> None:
    started: list[tuple[str, ...]] = []
    report = run(REGISTRY.kernel("cpu.kda_core_step"), started=lambda *case: started.append(case), variants=["plain"])
    report.check()
    assert {case.phase for case in report.ran if case.variant != INVARIANT} == {"decode"}
    assert any(reason.startswith("PHASE: needs") or "serves decode" in reason for reason in report.refusals())
    invariants = {case.sample: case for case in report.cases if case.variant == INVARIANT}
    assert invariants["other slots untouched"].report is not None
    split = invariants["split equals whole"].refusal
    assert split is not None and split.code == "PHASE"
    assert len(started) == len(report.ran) + sum(case.refusal is not None for case in invariants.values())
    assert not any(case.variant == INVARIANT for case in run(norm(), dtypes=[torch.float64]).cases)


def wrong_core(**args: Any) -> Any:
    return CORE.reference(**{**args, "dt_bias": args["dt_bias"] + 0.5})


(CORE,) = op_contracts("kda_core")


def test_an_invariant_that_does_not_hold_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    import k3port.ops.kda as module

    monkeypatch.setattr(module, "wrong_core", wrong_core, raising=False)
    spec = norm("reference.kda_core", load="k3port.ops.kda:wrong_core")
    report = run(spec, samples=lambda sample: False)
    assert [case.variant for case in report.ran] == [INVARIANT] * len(CORE.invariants)
    # The other invariants hold whatever the gate.
    (fault,) = report.faults
    said = "reference.kda_core, float32, 'published values of the gate', invariant: does not keep it: AssertionError"
    assert said in fault
    with pytest.raises(AssertionError, match="1 faults"):
        report.check()


def test_writes_out_of_bounds_inside_an_invariant_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guards, "faults", lambda self: ["y: something outside"])
    report = run(norm("reference.kda_commit"), samples=lambda sample: False)
    assert "y: something outside" in report.faults[0]


def test_a_report_survives_json() -> None:
    spec = norm(requires=Requires(axes=(AxisRule("D", maximum=256),)))
    report = run(spec, variants=["plain", "strided"])
    assert report.refused and report.ran
    assert SuiteReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_a_kernel_may_be_twice_as_far_off_as_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where plain torch misses the contract's tolerance; the reference kernel itself gets no such allowance."""
    contract = replace(op_contracts("rms_norm")[0], tolerance={torch.bfloat16: 1e-4})
    monkeypatch.setattr(suite, "op_contracts", lambda op: (contract,))
    suite._expected.cache_clear()
    options = {"dtypes": [torch.bfloat16], "samples": only_rows, "variants": ["plain"]}
    other = run(replace(norm(), name="test.rms_norm"), **options)
    reference = run(norm(), **options)
    suite._expected.cache_clear()
    other.check()
    (case,) = other.ran
    assert case.report is not None
    (error,) = case.report.outputs
    assert 1e-3 < error.relative_rms < error.tolerance <= 1e-2
    assert "tolerance 1e-04" in reference.faults[0]


@pytest.mark.parametrize(
    "name", ["cpu.kda_core_step", "cpu.moe_experts_dense", "reference.short_conv", "cpu.sample_batched"]
)
def test_calls_are_moved_to_the_device(name: str) -> None:
    """``cpu:0`` counts as another device: the same way as to a GPU, for arguments, packed weights and updates."""
    report = run(REGISTRY.kernel(name), device="cpu:0")
    report.check()
    here = run(REGISTRY.kernel(name))
    assert [case.name for case in report.ran] == [case.name for case in here.ran]
    assert report.refusals() == here.refusals()
