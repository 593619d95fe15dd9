"""Everything that a contract asks of one kernel: every sample in every dtype and memory order, and the invariants.

Each case is a measured call, or a refusal with the oracle's reason: a kernel is asked only what its own record admits,
and what it does not admit is said.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Contract, Sample
from k3port.oracle.predicates import reject
from k3port.oracle.spec import KernelSpec, Rejection, Target
from k3port.testing.contract.invariant import invariant_refusal
from k3port.testing.contract.measure import OutputError
from k3port.testing.contract.reference import (
    DTYPES,
    Expected,
    contract_samples,
    dtype_name,
    expect,
    fitted,
    op_contracts,
    sample_phase,
    sample_query,
)
from k3port.testing.contract.sample import SampleReport, check_sample
from k3port.testing.contract.variants import VARIANTS, Variant, has_variant

INVARIANT = "invariant"
"""Variant of the cases that are invariants; their sample is the invariant's name."""


@dataclass(frozen=True)
class CaseReport:
    """One case: exactly one of ``report`` and ``refusal`` is set.

    ``variant`` is a memory order, or :data:`INVARIANT`; a refused sample has one case, ``plain``.
    """

    dtype: str
    phase: Phase | None
    sample: str
    variant: str
    seconds: float
    report: SampleReport | None = None
    refusal: Rejection | None = None

    @property
    def name(self) -> str:
        variant = "" if self.variant == "plain" else f", {self.variant}"
        return f"{self.dtype}, '{self.sample}'{variant}"


@dataclass(frozen=True)
class SuiteReport:
    """What the whole suite showed of one kernel."""

    kernel: str
    cases: tuple[CaseReport, ...]

    @property
    def ran(self) -> tuple[CaseReport, ...]:
        return tuple(case for case in self.cases if case.report is not None)

    @property
    def refused(self) -> tuple[CaseReport, ...]:
        return tuple(case for case in self.cases if case.refusal is not None)

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence per fault, each with its case."""
        return tuple(
            f"{self.kernel}, {case.name}: {fault}" for case in self.ran if case.report for fault in case.report.faults
        )

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)

    def refusals(self) -> dict[str, int]:
        """Why cases were refused, as ``CODE: detail``, with their number."""
        counts: dict[str, int] = {}
        for case in self.refused:
            if case.refusal is not None:
                reason = f"{case.refusal.code}: {case.refusal.detail}"
                counts[reason] = counts.get(reason, 0) + 1
        return counts

    def worst(self) -> dict[str, OutputError]:
        """By dtype, the output that came nearest to its bound; outputs that are compared exactly are left out."""
        found: dict[str, OutputError] = {}
        for case in self.ran:
            for error in case.report.outputs if case.report else ():
                old = found.get(case.dtype)
                if error.tolerance and (old is None or error.relative_rms / error.tolerance > _share(old)):
                    found[case.dtype] = error
        return found

    def check(self) -> None:
        """Raises AssertionError with all faults."""
        if self.faults:
            raise AssertionError("\n  - ".join([f"{len(self.faults)} faults:", *self.faults]))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SuiteReport:
        """Reads what :meth:`to_dict` wrote."""
        return cls(data["kernel"], tuple(_case_from(case) for case in data["cases"]))


def _share(error: OutputError) -> float:
    return error.relative_rms / error.tolerance


def _case_from(data: Mapping[str, Any]) -> CaseReport:
    report, refusal = data["report"], data["refusal"]
    if report is not None:
        outputs = tuple(OutputError(**item) for item in report["outputs"])
        report = SampleReport(**{**report, "outputs": outputs, "faults": tuple(report["faults"])})
    return CaseReport(**{**data, "report": report, "refusal": Rejection(**refusal) if refusal is not None else None})


@lru_cache(maxsize=64)
def _samples(op: str, number: int, dtype: torch.dtype) -> tuple[Sample, ...]:
    return tuple(contract_samples(op_contracts(op)[number], dtype))


@lru_cache(maxsize=512)
def _expected(op: str, number: int, dtype: torch.dtype, index: int) -> Expected:
    return expect(op_contracts(op)[number], _samples(op, number, dtype)[index], dtype)


def run_suite(
    spec: KernelSpec,
    kernels: Iterable[KernelSpec],
    *,
    target: Target,
    device: str = "cpu",
    dtypes: Sequence[torch.dtype] = DTYPES,
    samples: Callable[[Sample], bool] | None = None,
    variants: Sequence[Variant] = VARIANTS,
    invariants: bool | Callable[[Sample], bool] = True,
    started: Callable[[str, str, str], None] | None = None,
) -> SuiteReport:
    """Runs a kernel on every sample of its op's contracts that its record admits on ``target``.

    Args:
        kernels: where the parts of a composite come from.
        target: what the record is asked about; it need not be the machine that the suite runs on.
        device: where the kernel runs. The reference runs on the CPU in float64.
        samples: which samples to take; None takes all.
        variants: memory orders of the token rows, where a sample has any.
        invariants: whether the contract's invariants are checked too (not in float64); or which of their calls the
            kernel gets, the reference taking the others.
        started: called with dtype, sample and variant of each case before it runs: what a crash leaves behind.
    """
    cases: list[CaseReport] = []
    known = tuple(kernels)
    for number, contract in enumerate(op_contracts(spec.op)):
        for dtype in dtypes:
            for index, sample in enumerate(_samples(spec.op, number, dtype)):
                if samples is not None and not samples(sample):
                    continue
                own = fitted(contract, sample, spec)
                refusal = reject(spec, sample_query(contract, own, dtype), target)
                phase = sample_phase(contract, sample)
                if refusal is not None:
                    cases.append(CaseReport(dtype_name(dtype), phase, sample.name, "plain", 0.0, refusal=refusal))
                    continue
                expected = _expected(spec.op, number, dtype, index) if own is sample else expect(contract, own, dtype)
                for variant in variants:
                    if not has_variant(own.args, contract.inputs, variant):
                        continue
                    if started is not None:
                        started(dtype_name(dtype), sample.name, variant)
                    begin = time.perf_counter()
                    report = check_sample(
                        spec, contract, own, dtype, known, variant=variant, device=device, expected=expected
                    )
                    seconds = time.perf_counter() - begin
                    cases.append(CaseReport(report.dtype, phase, sample.name, variant, seconds, report))
            if invariants and dtype != torch.float64:
                calls = None if invariants is True else invariants
                cases += _invariants(spec, contract, dtype, known, target, device, started, calls)
    return SuiteReport(spec.name, tuple(cases))


def _invariants(
    spec: KernelSpec,
    contract: Contract,
    dtype: torch.dtype,
    kernels: tuple[KernelSpec, ...],
    target: Target,
    device: str,
    started: Callable[[str, str, str], None] | None,
    calls: Callable[[Sample], bool] | None,
) -> Iterable[CaseReport]:
    if not spec.is_built:
        return
    name, phase = dtype_name(dtype), contract.phase
    for invariant in contract.invariants:
        if started is not None:
            started(name, invariant.name, INVARIANT)
        begin, faults, refusal = time.perf_counter(), (), None
        try:
            refusal = invariant_refusal(
                spec, contract, invariant, dtype, kernels, phase, target=target, device=device, calls=calls
            )
        except Exception as exc:
            faults = (f"does not keep it: {type(exc).__name__}: {exc}",)
        seconds = time.perf_counter() - begin
        report = None
        if refusal is None:
            report = SampleReport(spec.name, contract.op, phase, name, invariant.name, (), faults)
        yield CaseReport(name, phase, invariant.name, INVARIANT, seconds, report, refusal)
