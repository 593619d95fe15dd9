"""A kernel check as Markdown for a pull request, and as JSON values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from k3port.errors import ExitCode
from k3port.testing.check import KernelCheck, SuiteRun
from k3port.testing.suite import SuiteReport

if TYPE_CHECKING:
    # These need Triton, which kernels for the CPU do not.
    from k3port.testing.emulation import EmulationReport
    from k3port.testing.xcompile import CompileReport

SHOWN_FAULTS = 20
"""Faults that the text lists; the JSON form has all."""


def markdown(check: KernelCheck, *, verbose: bool = False) -> list[str]:
    """The report as lines of Markdown. ``verbose`` adds a row per sample and per compiled launch."""
    spec = check.spec
    verdict = f"not run here: needs {check.absent}" if check.absent else "ok"
    if check.faults:
        verdict = _counted(len(check.faults), "fault")
    versions = ", ".join(f"{name} {version}" for name, version in check.versions.items())
    lines = [
        f"## {spec.name}: {verdict}",
        "",
        f"{spec.op}: {spec.doc} (`{spec.load}`)  ",
        f"{versions}; {check.machine}; {check.date}",
    ]
    if check.faults:
        lines += ["", "### Faults", "", *(f"- {_one_line(fault)}" for fault in check.faults[:SHOWN_FAULTS])]
        if len(check.faults) > SHOWN_FAULTS:
            lines.append(f"- and {len(check.faults) - SHOWN_FAULTS} more")
    for run in check.suites:
        lines += _contract(run, verbose)
    if check.compilation is not None:
        title = f"### Compilation at production shapes ({check.seconds['compilation']:.0f} s)"
        lines += ["", title, "", *(check.compilation.lines() if verbose else _compiled(check.compilation))]
    for emulation in check.emulations:
        lines += _emulated(emulation, verbose)
    return [
        *lines,
        "",
        "### Not run",
        "",
        *(f"- {sentence}" for sentence in check.not_run or ("nothing was left out",)),
    ]


def record(check: KernelCheck) -> dict[str, Any]:
    """The report as JSON values."""
    spec = check.spec
    document = {
        "kernel": spec.name,
        "op": spec.op,
        "load": spec.load,
        "ok": check.exit_code == ExitCode.OK,
        "needs": check.absent,
        "exit_code": int(check.exit_code),
        "date": check.date,
        "machine": check.machine,
        "versions": dict(check.versions),
        "faults": list(check.faults),
        "contract": [
            {"where": run.where, "platform": run.platform, "seconds": run.seconds, **_suite_record(run.report)}
            for run in check.suites
        ],
        "compilation": None if check.compilation is None else check.compilation.to_dict(),
        "emulation": [_emulation_record(emulation) for emulation in check.emulations],
        "seconds": dict(check.seconds),
        "not_run": list(check.not_run),
    }
    return _finite(document)


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the first row is its head."""
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def _contract(run: SuiteRun, verbose: bool) -> list[str]:
    report = run.report
    title = f"### Contract: {run.where}, with the limits of {run.platform} ({run.seconds:.0f} s)"
    return ["", title, "", *_numbers(report), *_refused(report), *(_samples(report) if verbose else ())]


def _emulated(emulation: EmulationReport, verbose: bool) -> list[str]:
    report = emulation.suite
    noise = ", approximate instructions off by up to one ulp" if emulation.ulp_noise else ""
    facts = [
        f"{emulation.launches} launches, {emulation.instructions} wave instructions executed",
        f"{len(emulation.out_of_bounds)} accesses out of bounds",
        f"{len(emulation.races)} races in LDS",
        f"{len(emulation.unknown)} unknown instructions",
    ]
    lines = ["", f"### {emulation.arch}: executed in emulation{noise} ({emulation.seconds:.0f} s)", ""]
    lines += [*_numbers(report), "", "; ".join(facts) + ".", *_refused(report)]
    if verbose:
        lines += _samples(report)
    if emulation.warnings:
        lines += ["", "Warnings of the compiler:", "", *(f"- {_one_line(text)}" for text in emulation.warnings)]
    if emulation.mutation is not None:
        lines += _mutated(emulation)
    return lines


def _mutated(emulation: EmulationReport) -> list[str]:
    found = emulation.mutation
    assert found is not None
    counts = (
        f"{found.noticed} of {found.count} dropped instructions noticed, chosen from {found.candidates} executed ones"
    )
    lines = ["", f"Mutation: {counts}."]
    if found.missed:
        lines += ["Not noticed:", "", *(f"- `{_one_line(str(mutant))}`" for mutant in found.missed)]
    return lines


def _compiled(report: CompileReport) -> list[str]:
    """A row per target and jit function, over all its launches: the largest sizes, the fewest waves."""
    done = [row for row in report.rows if row.resources is not None]
    lines = [f"{len(done)} of {len(report.rows)} launches compiled, {len(report.faults)} faults."]
    rows: list[tuple[str, ...]] = [
        ("target", "function", "launches", "shared / limit", "registers", "spills", "waves/SIMD", "matrix", "loads")
    ]
    for target, jit in dict.fromkeys((row.target, row.jit) for row in done):
        group = [row for row in done if (row.target, row.jit) == (target, jit)]
        found = [row.resources for row in group if row.resources is not None]
        waves = min(r.waves for r in found)
        rows.append(
            (
                target,
                jit,
                str(len(group)),
                f"{max(row.shared for row in group)} / {group[0].limit}",
                str(max(r.registers for r in found)),
                str(max(r.spills + r.scalar_spills for r in found)),
                str(waves) if waves else "-",
                ", ".join(sorted({name for r in found for name in r.matrix})) or "-",
                ", ".join(sorted({name for r in found for name in r.loads})) or "-",
            )
        )
    if done:
        lines += ["", *table(rows)]
    if report.left_out:
        lines += ["", "Refused by its record:", "", *(f"- {text}" for text in report.left_out)]
    return lines


def _numbers(report: SuiteReport) -> list[str]:
    """Per dtype: how many cases ran, and the output that came nearest to its bound."""
    worst = report.worst()
    rows: list[tuple[str, ...]] = [("dtype", "cases", "faults", "nearest to its bound", "relative RMS", "bound")]
    for dtype in dict.fromkeys(case.dtype for case in report.ran):
        cases = [case for case in report.ran if case.dtype == dtype]
        faults = sum(len(case.report.faults) for case in cases if case.report)
        error = worst.get(dtype)
        numbers = (error.name, f"{error.relative_rms:.1e}", f"{error.tolerance:.1e}") if error else ("-", "-", "-")
        rows.append((dtype, str(len(cases)), str(faults), *numbers))
    return table(rows) if len(rows) > 1 else ["No case ran."]


def _refused(report: SuiteReport) -> list[str]:
    found = report.refusals()
    if not found:
        return []
    return ["", "Refused by its record: " + "; ".join(f"{count} x {reason}" for reason, count in found.items()) + "."]


def _samples(report: SuiteReport) -> list[str]:
    rows: list[tuple[str, ...]] = [("case", "relative RMS", "bound", "faults")]
    for case in report.ran:
        assert case.report is not None
        error = max(case.report.outputs, key=lambda e: e.relative_rms / (e.tolerance or 1), default=None)
        numbers = (f"{error.relative_rms:.1e}", f"{error.tolerance:.1e}") if error else ("-", "-")
        rows.append((case.name, *numbers, str(len(case.report.faults))))
    return ["", *table(rows)]


def _suite_record(report: SuiteReport) -> dict[str, Any]:
    return {
        "cases": [dataclasses.asdict(case) for case in report.cases],
        "ran": len(report.ran),
        "refused": report.refusals(),
        "worst": {dtype: dataclasses.asdict(error) for dtype, error in report.worst().items()},
    }


def _emulation_record(emulation: EmulationReport) -> dict[str, Any]:
    mutation = emulation.mutation
    return {
        "arch": emulation.arch,
        "ulp_noise": emulation.ulp_noise,
        "seconds": emulation.seconds,
        "launches": emulation.launches,
        "instructions": emulation.instructions,
        "out_of_bounds": list(emulation.out_of_bounds),
        "races": list(emulation.races),
        "unknown": list(emulation.unknown),
        "faults": list(emulation.faults),
        "left_out": list(emulation.left_out),
        "warnings": list(emulation.warnings),
        "mutation": None
        if mutation is None
        else {**dataclasses.asdict(mutation), "noticed": mutation.noticed, "count": mutation.count},
        **_suite_record(emulation.suite),
    }


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinities, which JSON does not have: errors of wrong kernels can be both."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _one_line(text: str) -> str:
    return " ".join(text.split())
