"""The two commands as functions: all kernels of a table with a receipt, and configuration files for tuned kernels."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3port.errors import ExitCode, K3Error, UsageError
from k3port.oracle.packages import host_versions, needed_packages
from k3port.oracle.spec import KernelSpec
from k3port.testing.bench import workloads
from k3port.testing.bench.ceilings import Ceilings, measure_ceilings
from k3port.testing.bench.clock import Clock, GpuClock
from k3port.testing.bench.config_file import NewEntry, save_config
from k3port.testing.bench.machine import Machine, describe, target_of
from k3port.testing.bench.peers import fla
from k3port.testing.bench.receipt import Receipt, Row, Skipped
from k3port.testing.bench.rotate import COLD_BYTES
from k3port.testing.bench.suite import Bench, Progress, run_case
from k3port.testing.bench.timing import QUICK, Settings
from k3port.testing.bench.workload import Workload

CONFIGS = Path(__file__).parents[2] / "backends" / "portable" / "configs"


@dataclass(frozen=True)
class Device:
    """A clock, what it times, and how fast that is at most: both commands begin with this."""

    clock: Clock
    machine: Machine
    ceilings: Ceilings


def prepare(settings: Settings, progress: Progress) -> Device:
    """Looks at the GPU and measures its ceilings.

    Raises:
        NoDeviceError: there is none.
    """
    clock = GpuClock()
    machine = describe(clock.device)
    progress(f"{machine.device}: measuring ceilings")
    return Device(clock, machine, measure_ceilings(clock, settings))


def make_bench(
    device: Device,
    kernels: Sequence[KernelSpec],
    settings: Settings,
    progress: Progress,
    names: Sequence[str] = (),
    *,
    peers: bool = True,
    cold_bytes: int = COLD_BYTES,
) -> Bench:
    """A bench on a device, for all kernels of a registry or those named."""
    target = target_of(device.machine)
    packages = {**host_versions(needed_packages(kernels)), **target.packages}
    return Bench(
        clock=device.clock,
        target=dataclasses.replace(target, packages=packages),
        ceilings=device.ceilings,
        kernels=kernels,
        settings=settings,
        names=frozenset(names),
        peers=peers,
        cold_bytes=cold_bytes,
        progress=progress,
    )


def chosen_workloads(ops: Sequence[str], kernels: Sequence[KernelSpec]) -> list[Workload]:
    """The workloads of the given ops, and of the given kernels' ops and phases; all where nothing is given.

    Raises:
        UsageError: there is none.
    """

    def wanted(workload: Workload) -> bool:
        of_kernel = any(k.op == workload.op and (not k.phases or workload.phase in k.phases) for k in kernels)
        return (not ops or workload.op in ops) and (not kernels or of_kernel)

    found = [workload for workload in workloads.WORKLOADS if wanted(workload)]
    if not found:
        if ops and kernels and not any(k.op in ops for k in kernels):
            theirs = ", ".join(dict.fromkeys(k.op for k in kernels))
            raise UsageError(
                f"{', '.join(k.name for k in kernels)} does not do {', '.join(ops)}",
                hint=f"--op {theirs}, or no --op" if len(kernels) == 1 else f"their ops: {theirs}",
            )
        known = ", ".join(dict.fromkeys(workload.op for workload in workloads.WORKLOADS))
        asked = ", ".join((*ops, *(k.name for k in kernels)))
        raise UsageError(f"nothing to measure for {asked}", hint=f"ops with shapes to measure: {known}")
    return found


def bench_kernels(
    kernels: Sequence[KernelSpec],
    ops: Sequence[str] = (),
    named: Sequence[KernelSpec] = (),
    *,
    quick: bool = False,
    peers: bool = True,
    progress: Progress = lambda text: None,
    checkpoint: Callable[[Receipt], None] = lambda receipt: None,
) -> Receipt:
    """Measures every case of the chosen workloads.

    Args:
        kernels: all kernels of the registry.
        named: only these.
        quick: fewer cases and shorter samples.
        checkpoint: gets what there is, at the start and after each workload: a long run that is stopped is not lost.

    Raises:
        NoDeviceError: there is no GPU.
        UsageError: nothing fits.
    """
    chosen = chosen_workloads(ops, named)
    settings = QUICK if quick else Settings()
    device = prepare(settings, progress)
    bench = make_bench(device, kernels, settings, progress, [spec.name for spec in named], peers=peers)
    rows: list[Row] = []
    skipped: list[Skipped] = []

    def receipt() -> Receipt:
        return Receipt(device.machine, device.ceilings, settings, tuple(rows), tuple(skipped), fla.pinned())

    checkpoint(receipt())
    for workload in chosen:
        for case in workload.cases:
            if quick and not case.quick:
                continue
            for found in run_case(bench, workload, case):
                if isinstance(found, Row):
                    rows.append(found)
                else:
                    skipped.append(found)
        checkpoint(receipt())
    return receipt()


@dataclass(frozen=True)
class TuneReport:
    """New entries by configuration file, and every case's result as JSON values."""

    machine: Machine
    entries: dict[str, list[NewEntry]]
    cases: list[dict[str, Any]]

    @property
    def measured(self) -> dict[str, Any]:
        """What an entry says about where it comes from."""
        versions = {name: self.machine.packages.get(name, "") for name in ("torch", "triton")}
        return {"device": self.machine.device, **versions, "date": self.machine.date[:10]}


def bench_tune(
    kernels: Sequence[KernelSpec],
    named: Sequence[KernelSpec],
    ops: Sequence[str] = (),
    *,
    quick: bool = False,
    jobs: int = 1,
    progress: Progress = lambda text: None,
    checkpoint: Callable[[TuneReport], None] = lambda report: None,
) -> TuneReport:
    """Tunes the named kernels on every case of their workloads.

    Args:
        jobs: processes that compile configurations before they are tried.
        checkpoint: gets what there is after each kernel, and when one fails: hours of tuning are not lost with it.

    Raises:
        NoDeviceError: there is no GPU.
        UsageError: a kernel has no shape to measure.
        K3Error: a kernel has no candidates, does not serve any case, or is wrong as it is.
    """
    if importlib.util.find_spec("triton") is None:
        raise K3Error("Triton is not installed: there is nothing to tune", hint="pip install triton")
    from k3port.testing.bench.compile_ahead import CompileAhead
    from k3port.testing.bench.tune import CaseResult, Spills, entries_of, tune_case

    # Whatever needs no device, before the first minutes are spent on one.
    plans = [(spec, _candidates_of(spec, kernels), chosen_workloads(ops, [spec])) for spec in named]
    settings = QUICK if quick else Settings()
    device = prepare(settings, progress)
    machine = device.machine
    entries: dict[str, list[NewEntry]] = {}
    cases: list[dict[str, Any]] = []
    with CompileAhead(jobs, device.clock.device) as ahead:
        for spec, grid_names, chosen in plans:
            spills: Spills = {}
            tuned: set[str] = set()
            bench = make_bench(device, kernels, settings, progress, [spec.name], peers=False)
            try:
                for workload in chosen:
                    results: list[CaseResult] = []
                    for case in workload.cases:
                        if case.tuned and (case.quick or not quick):
                            found = tune_case(bench, spec, workload, case, spills, ahead)
                            results += found
                            tuned.update(result.name for result in found)
                            cases += [
                                {"kernel": spec.name, "slot": workload.slot, **dataclasses.asdict(r)} for r in found
                            ]
                    # Of all its sizes or none: an entry reaches to the middle between a size and the next one.
                    for name, new in entries_of(results).items():
                        entries.setdefault(name, []).extend(new)
            finally:
                checkpoint(TuneReport(machine, dict(entries), list(cases)))
            if not tuned:
                raise Unserved(
                    f"{spec.name}: no shape to tune on {machine.arch}", hint="k3port kernels explain says why"
                )
            if lost := grid_names - {""} - tuned:
                raise K3Error(
                    f"{spec.name}: CANDIDATES names {', '.join(sorted(lost))}, which no call looks up",
                    hint=f"configurations that were looked up: {', '.join(sorted(tuned))}",
                )
    return TuneReport(machine, entries, cases)


def _candidates_of(spec: KernelSpec, kernels: Sequence[KernelSpec]) -> set[str]:
    """Names of the configurations that a kernel's ``CANDIDATES`` are for, as ``grids`` gives them.

    Raises:
        K3Error: it has none. The hint names kernels with candidates whose functions it calls, where there are any.
    """
    from k3port.testing.bench.tune import grids

    try:
        return set(grids(spec))
    except K3Error as exc:
        home = spec.load.partition(":")[0]
        module = importlib.import_module(home)
        used = {getattr(value, "__module__", "") for value in vars(module).values() if callable(value)} - {home}
        through: dict[str, str] = {}
        for other in kernels:
            place = other.load.partition(":")[0]
            if place in used and hasattr(sys.modules.get(place), "CANDIDATES"):
                through.setdefault(place, other.name)
        if through and not hasattr(module, "CANDIDATES"):
            names = " ".join(sorted(through.values()))
            raise K3Error(exc.message, hint=f"what it calls is tuned by: k3port bench tune {names}") from None
        raise


class Unserved(K3Error):
    """None of the shapes can be served by the kernel on this device."""

    exit_code = ExitCode.UNSUPPORTED


def save_entries(report: TuneReport, folder: Path = CONFIGS) -> list[Path]:
    """Writes the entries into the configuration files; the paths of these.

    Raises:
        K3Error: a file cannot be read or written.
    """
    paths = [folder / f"{name}.json" for name in report.entries]
    for path, new in zip(paths, report.entries.values(), strict=True):
        save_config(path, report.machine.arch, new, report.measured)
    return paths
