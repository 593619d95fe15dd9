"""Everything that a contract asks of one kernel: every sample in every dtype and memory order, and the invariants.

Each case is a measured call, or a refusal with the oracle's reason: a kernel is asked only what its own record admits,
and what it does not admit is said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Contract, Invariant, Sample
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
from k3port.testing.contract.repeat import repeat_faults
from k3port.testing.contract.sample import SampleReport, check_sample
from k3port.testing.contract.variants import VARIANTS, Variant, has_variant
from k3port.testing.kernel_code import LONG_CASE_S, PART_S, Budget, TookTooLong, said

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
    def grouped_faults(self) -> tuple[str, ...]:
        """The same, where equal faults of several cases are one sentence with their number and the first case."""
        cases: dict[str, list[str]] = {}
        for case in self.ran:
            for fault in case.report.faults if case.report else ():
                cases.setdefault(fault, []).append(case.name)
        return tuple(
            f"{self.kernel}, {f'in {len(names)} cases, first ' if len(names) > 1 else ''}{names[0]}: {fault}"
            for fault, names in cases.items()
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
        return cls(data["kernel"], tuple(case_from(case) for case in data["cases"]))


def _share(error: OutputError) -> float:
    return error.relative_rms / error.tolerance


def case_from(data: Mapping[str, Any]) -> CaseReport:
    """Reads one case as ``dataclasses.asdict`` made it."""
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
    finished: Callable[[CaseReport], None] | None = None,
    skipped: Callable[[str, str, str], bool] | None = None,
    repeat: bool = True,
    budget: Budget | None = None,
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
        finished: called with each case when it is known.
        skipped: asked with dtype, sample and variant; such a case is left out, as one that is known already.
        repeat: whether a kernel whose record says ``deterministic`` is called twice, on one ordinary sample per dtype.
        budget: time for the calls; what takes longer is a fault, and the rest is not run once all of it is used up.
            None takes :data:`LONG_CASE_S` and :data:`PART_S`.
    """
    budget = Budget(LONG_CASE_S, PART_S) if budget is None else budget
    cases = _Cases(budget, started, finished, skipped)
    with contextlib.suppress(_Over):
        _run(cases, spec, tuple(kernels), target, device, dtypes, samples, variants, invariants, repeat)
    return SuiteReport(spec.name, tuple(cases.found))


class _Over(Exception):
    """The time of the whole part is used up."""


class _Cases:
    """The cases of one run: each is told, limited in time, and kept."""

    def __init__(
        self,
        budget: Budget,
        started: Callable[[str, str, str], None] | None,
        finished: Callable[[CaseReport], None] | None,
        skipped: Callable[[str, str, str], bool] | None,
    ) -> None:
        self.found: list[CaseReport] = []
        self._budget, self._started, self._finished, self._skipped = budget, started, finished, skipped

    def wanted(self, dtype: str, sample: str, variant: str) -> bool:
        return self._skipped is None or not self._skipped(dtype, sample, variant)

    def keep(self, case: CaseReport) -> None:
        self.found.append(case)
        if self._finished is not None:
            self._finished(case)

    def run(
        self,
        names: tuple[str, str, str],
        phase: Phase | None,
        call: Callable[[], SampleReport | Rejection],
        failed: Callable[[str], SampleReport],
    ) -> None:
        """One case. ``failed`` makes the report of a call that never came back.

        Raises:
            _Over: nothing more can run.
        """
        if self._budget.over:
            # What used it up is a fault of its own.
            raise _Over
        dtype, sample, variant = names
        if self._started is not None:
            self._started(*names)
        begin = time.perf_counter()
        try:
            with self._budget.case():
                found = call()
        except (SystemExit, TookTooLong) as exc:
            rest = "; what comes after it was not run" if self._budget.over else ""
            found = failed(f"{said(exc)}{rest}")
        else:
            if self._budget.over:
                words = f"the whole part did not end within {self._budget.total_s:g} s; what comes after it was not run"
                found = failed(words)
        seconds = time.perf_counter() - begin
        report, refusal = (found, None) if isinstance(found, SampleReport) else (None, found)
        self.keep(CaseReport(dtype, phase, sample, variant, seconds, report, refusal))
        if self._budget.over:
            raise _Over


def _run(
    cases: _Cases,
    spec: KernelSpec,
    known: tuple[KernelSpec, ...],
    target: Target,
    device: str,
    dtypes: Sequence[torch.dtype],
    samples: Callable[[Sample], bool] | None,
    variants: Sequence[Variant],
    invariants: bool | Callable[[Sample], bool],
    repeat: bool,
) -> None:
    for number, contract in enumerate(op_contracts(spec.op)):
        for dtype in dtypes:
            name, repeated = dtype_name(dtype), not (repeat and spec.deterministic and spec.is_built)
            for index, sample in enumerate(_samples(spec.op, number, dtype)):
                if samples is not None and not samples(sample):
                    continue
                own = fitted(contract, sample, spec)
                refusal = reject(spec, sample_query(contract, own, dtype), target)
                phase = sample_phase(contract, sample)
                if refusal is not None:
                    if cases.wanted(name, sample.name, "plain"):
                        cases.keep(CaseReport(name, phase, sample.name, "plain", 0.0, refusal=refusal))
                    continue
                expected = _expected(spec.op, number, dtype, index) if own is sample else expect(contract, own, dtype)
                for variant in variants:
                    again = variant == "plain" and not sample.adversarial and not repeated
                    repeated |= again
                    if not has_variant(own.args, contract.inputs, variant):
                        continue
                    if not cases.wanted(name, sample.name, variant):
                        continue
                    call = partial(
                        _sample, spec, contract, own, dtype, known, variant=variant, device=device, expected=expected,
                        again=again,
                    )  # fmt: skip
                    failed = partial(_failed, spec, contract.op, phase, name, sample.name)
                    cases.run((name, sample.name, variant), phase, call, failed)
            if invariants and spec.is_built and dtype != torch.float64:
                calls = None if invariants is True else invariants
                for invariant in contract.invariants:
                    if not cases.wanted(name, invariant.name, INVARIANT):
                        continue
                    call = partial(_invariant, spec, contract, invariant, dtype, known, target, device, calls)
                    failed = partial(_failed, spec, contract.op, contract.phase, name, invariant.name)
                    cases.run((name, invariant.name, INVARIANT), contract.phase, call, failed)


def _failed(spec: KernelSpec, op: str, phase: Phase | None, dtype: str, sample: str, fault: str) -> SampleReport:
    return SampleReport(spec.name, op, phase, dtype, sample, (), (fault,))


def _sample(
    spec: KernelSpec,
    contract: Contract,
    sample: Sample,
    dtype: torch.dtype,
    kernels: tuple[KernelSpec, ...],
    *,
    device: str,
    again: bool,
    **options: Any,
) -> SampleReport:
    report = check_sample(spec, contract, sample, dtype, kernels, device=device, **options)
    if not again or report.faults:
        return report
    faults = repeat_faults(spec, contract, sample, dtype, kernels, device=device)
    return dataclasses.replace(report, faults=faults)


def _invariant(
    spec: KernelSpec,
    contract: Contract,
    invariant: Invariant,
    dtype: torch.dtype,
    kernels: tuple[KernelSpec, ...],
    target: Target,
    device: str,
    calls: Callable[[Sample], bool] | None,
) -> SampleReport | Rejection:
    phase, faults = contract.phase, ()
    try:
        refusal = invariant_refusal(
            spec, contract, invariant, dtype, kernels, phase, target=target, device=device, calls=calls
        )
    except Exception as exc:
        refusal, faults = None, (f"does not keep it: {said(exc)}",)
    if refusal is not None:
        return refusal
    return SampleReport(spec.name, contract.op, phase, dtype_name(dtype), invariant.name, (), faults)
