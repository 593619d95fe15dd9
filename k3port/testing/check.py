"""Everything that can be proved of one kernel on this machine: what ``k3port kernels check`` does.

The contract suite, on the CPU, in Triton's interpreter or on the GPU that is here; compilation for every target; the
AMD machine code in emulation; and what the samples notice of dropped instructions.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from k3port import __version__
from k3port.errors import ExitCode, K3Error, UsageError
from k3port.oracle.predicates import reject
from k3port.oracle.profile import Profile, load_profiles
from k3port.oracle.spec import KernelSpec
from k3port.plugins import Registry
from k3port.runtime.platforms import find_profile
from k3port.testing.bench.machine import package_version
from k3port.testing.contract.reference import contract_samples, fitted, op_contracts, sample_query
from k3port.testing.kernel_code import (
    FINDINGS,
    LONG_CASE_S,
    PART_S,
    Budget,
    load_fault,
    prints_to_stderr,
    said,
)
from k3port.testing.left_open import INTERPRETER, gpu_name, is_for, needed_gpu, not_run
from k3port.testing.subject import DTYPES, is_triton, runs_on_cpu
from k3port.testing.suite import SuiteReport, run_suite
from k3port.testing.targets import ISAS, TARGETS

if TYPE_CHECKING:
    from k3port.testing.emulation import EmulationReport
    from k3port.testing.xcompile import CompileReport

INTERPRETED_DTYPES = ("float32", "bfloat16", "float16")
_USUAL = ("h200", "mi355x")


@dataclass(frozen=True)
class SuiteRun:
    """The contract suite at one place. ``platform`` is the profile whose limits count; ``seconds`` is wall time."""

    where: str
    platform: str
    report: SuiteReport
    seconds: float


@dataclass(frozen=True)
class KernelCheck:
    """What was run of one kernel, what that showed, and what was not run.

    Attributes:
        versions: of k3port, Python, PyTorch, Triton and of the packages that the kernel requires.
        date: UTC.
        suites: the contract, by place.
        compilation: None where nothing was compiled.
        emulations: one per instruction set.
        seconds: wall time by part.
        unloaded: why the kernel cannot be loaded; nothing was run of it then.
        broken: parts that could not be done, a sentence each; the others were.
        hint: what the record lacks, where that explains why so little was run.
        absent: the device that this machine lacks, where nothing could be run for that alone: no fault of the kernel.
        not_run: a sentence for each thing that this check leaves open.
    """

    spec: KernelSpec
    versions: Mapping[str, str]
    machine: str
    date: str
    suites: tuple[SuiteRun, ...]
    compilation: CompileReport | None
    emulations: tuple[EmulationReport, ...]
    seconds: Mapping[str, float]
    not_run: tuple[str, ...]
    unloaded: str = ""
    broken: tuple[str, ...] = ()
    hint: str = ""
    absent: str = ""

    @property
    def numeric_faults(self) -> tuple[str, ...]:
        """Faults of numbers, bounds and synchronisation."""
        found = [f"{run.where}: {fault}" for run in self.suites for fault in run.report.grouped_faults]
        found += [f"emulation: {fault}" for emulation in self.emulations for fault in emulation.grouped_faults]
        return tuple(found)

    @property
    def other_faults(self) -> tuple[str, ...]:
        """What does not compile or does not fit, and a kernel that nothing has been run of."""
        if self.unloaded:
            return (self.unloaded,)
        found = list(self.broken)
        found += [f"compilation: {fault}" for fault in self.compilation.faults] if self.compilation else []
        if self.compilation is not None and self.compilation.silent:
            where = "; ".join(self.compilation.silent)
            found.append(f"compilation: its host code launched no Triton kernel at production shapes: {where}")
        ran = any(run.report.ran for run in self.suites) or any(e.suite.ran for e in self.emulations)
        here = bool(self.suites or self.emulations)
        # A part that could not be done is a fault already, and no machine's.
        if not ran and not self.absent and (here or not self.broken):
            why = (
                "its record admits no sample of the contract here" if here else "this machine has no GPU that it is for"
            )
            found.append(f"{why}: nothing was run{f'; {self.hint}' if self.hint else ''}")
        return tuple(found)

    @property
    def faults(self) -> tuple[str, ...]:
        """All faults; those of the numbers come first."""
        return (*self.numeric_faults, *self.other_faults)

    @property
    def exit_code(self) -> ExitCode:
        if self.numeric_faults:
            return ExitCode.NUMERICS
        if self.other_faults:
            return ExitCode.FAILED
        # Neither right nor wrong: a machine with the device can tell.
        return ExitCode.UNSUPPORTED if self.absent else ExitCode.OK

    def lines(self, *, verbose: bool = False) -> list[str]:
        """The report in Markdown, for a pull request. ``verbose`` adds rows."""
        from k3port.testing.check_report import markdown

        return markdown(self, verbose=verbose)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, samples included."""
        from k3port.testing.check_report import record

        return record(self)


def check_kernel(
    spec: KernelSpec,
    registry: Registry,
    *,
    isas: Sequence[str] = ISAS,
    targets: Sequence[str] = TARGETS,
    tps: Sequence[int] = (8,),
    dtypes: Sequence[str] = (),
    mutate: int = 0,
    seed: int = 0,
    all_configs: bool = False,
    jobs: int = 1,
    timeout_s: float = PART_S,
    progress: Callable[[str], None] = lambda text: None,
) -> KernelCheck:
    """Checks one built kernel of a registry (:func:`k3port.testing.subject.find_subject`).

    Args:
        isas: AMD instruction sets to emulate; none for none.
        targets: architectures to compile for; none for none.
        tps: how many ranks the compiled shapes are split over.
        dtypes: activation dtypes by name; empty takes all that the record admits.
        mutate: single instructions to drop per instruction set.
        seed: which ones.
        all_configs: compile every tuned configuration instead of the chosen one.
        jobs: compilers side by side.
        timeout_s: seconds for each part: the contract at one place, the host code of compilation, one emulation.
        progress: gets a sentence before each part.

    What the kernel's code prints goes to stderr. A kernel that cannot be loaded has a report too, with that fault. Of a
    kernel for GPUs that is no Triton code, nothing can be run without its GPU: its report says so, and has no fault.

    Raises:
        UsageError: a dtype that Triton kernels are not run in.
        K3Error: the kernel is written in Triton, which cannot be imported.
    """
    wide = [name for name in dtypes if name not in INTERPRETED_DTYPES]
    if wide and is_triton(spec):
        raise UsageError(
            f"kernel {spec.name} is written in Triton, and Triton kernels are not run in {', '.join(wide)}",
            hint=f"they compute in float32 at most; ask for {', '.join(INTERPRETED_DTYPES)}",
        )
    if is_triton(spec):
        _import_triton(spec)
    seconds: dict[str, float] = {}
    suites: list[SuiteRun] = []
    broken: list[str] = []
    compilation: CompileReport | None = None
    emulations: list[EmulationReport] = []
    with prints_to_stderr():
        unloaded = load_fault(spec.load)
        places = _places(spec, registry) if not unloaded else []
        for place in places:
            progress(f"contract of {spec.op}: {place.where} ...")
            begin = time.perf_counter()
            with _part(place.where, broken):
                report = place.run(tuple(dtypes), timeout_s)
                suites.append(SuiteRun(place.where, place.platform, report, time.perf_counter() - begin))
        if suites:
            seconds["contract"] = sum(run.seconds for run in suites)
        # A composite has no host code of its own to compile; its parts are kernels with checks of their own.
        if is_triton(spec) and targets and not spec.parts and not unloaded:
            progress(f"compilation for {', '.join(targets)} ...")
            begin = time.perf_counter()
            with _part("compilation", broken):
                compilation = _compile(spec, targets, tps, all_configs, jobs, timeout_s)
            seconds["compilation"] = time.perf_counter() - begin
        for isa in isas if is_triton(spec) and is_for(spec, "amd") and not unloaded else ():
            progress(f"emulation of {isa}{f', {mutate} mutants' if mutate else ''} ...")
            with _part(f"emulation of {isa}", broken):
                emulations.append(_emulate(spec, registry, isa, dtypes, mutate, seed, timeout_s))
        if emulations:
            seconds["emulation"] = sum(emulation.seconds for emulation in emulations)
    hint = "" if unloaded else _unnamed_triton(spec)
    is_elsewhere = not (unloaded or places or hint or is_triton(spec))
    return KernelCheck(
        spec=spec,
        versions=_versions(spec),
        machine=f"{platform.system()} {platform.machine()}, {gpu_name() or 'no GPU'}",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        suites=tuple(suites),
        compilation=compilation,
        emulations=tuple(emulations),
        seconds=seconds,
        not_run=("everything",)
        if unloaded
        else tuple(not_run(spec, suites, emulations, isas, targets, mutate, dtypes)),
        unloaded=unloaded,
        broken=tuple(broken),
        hint=hint,
        absent=_absent(spec) if is_elsewhere else "",
    )


@contextlib.contextmanager
def _part(name: str, broken: list[str]) -> Iterator[None]:
    """A part that fails as a whole is a fault; the parts after it are run all the same."""
    try:
        yield
    except FINDINGS as exc:
        reason = "; ".join([exc.message, *exc.reasons]) if isinstance(exc, K3Error) else said(exc)
        broken.append(f"{name}: could not be done: {reason}")


def _import_triton(spec: KernelSpec) -> None:
    try:
        importlib.import_module("triton")
    except Exception as exc:
        raise K3Error(
            f"kernel {spec.name} is written in Triton, which is not installed, or cannot be imported",
            reasons=[said(exc)],
            hint="pip install triton; it needs no GPU here",
        ) from None


def _unnamed_triton(spec: KernelSpec) -> str:
    """A hint for a kernel for GPUs whose module has Triton functions, and whose record does not say so."""
    if is_triton(spec) or "triton" not in sys.modules:
        return ""
    from triton.runtime.jit import JITFunction

    module = sys.modules.get(spec.load.partition(":")[0])
    if any(isinstance(value, JITFunction) for value in vars(module).values()) if module else False:
        return "its module has Triton functions: packages must name triton, such as packages=('triton>=3.6',)"
    return ""


@dataclass(frozen=True)
class _Place:
    """Somewhere the contract suite can run: on behalf of a platform, and how."""

    where: str
    platform: str
    run: Callable[[tuple[str, ...], float], SuiteReport]


def _places(spec: KernelSpec, registry: Registry) -> list[_Place]:
    """The GPU of this machine where the kernel is for it; else the CPU, or Triton's interpreter."""
    places = []
    for_gpus = not spec.is_reference and (is_for(spec, "nvidia") or is_for(spec, "amd"))
    gpu = _profile_here() if for_gpus and torch.cuda.is_available() else None
    if gpu is not None and is_for(spec, gpu.vendor):
        places.append(_Place(f"GPU, {gpu_name()}", gpu.name, lambda *how: _suite(spec, registry, gpu, "cuda", *how)))
    # Before the CPU: a record that names no vendor is for every one, and Triton's functions need a GPU all the same.
    if is_triton(spec):
        if not places:
            name = platform_for(spec)
            places.append(_Place(INTERPRETER, name, lambda *how: _interpret(spec, name, *how)))
    elif runs_on_cpu(spec):
        cpu = find_profile("cpu", registry=registry)
        places.append(_Place("CPU", "cpu", lambda *how: _suite(spec, registry, cpu, "cpu", *how)))
    return places


def platform_for(spec: KernelSpec) -> str:
    """The platform whose limits count where a kernel for GPUs runs without one: the first with a sample that it admits.

    h200 and mi355x come first, and h200 is the answer where no platform admits any.
    """
    dtypes = [getattr(torch, name) for name in INTERPRETED_DTYPES]
    queries = [
        sample_query(contract, fitted(contract, sample, spec), dtype)
        for contract in op_contracts(spec.op)
        for dtype in dtypes
        for sample in contract_samples(contract, dtype)
    ]
    profiles = sorted(load_profiles().values(), key=lambda profile: (profile.name not in _USUAL, profile.name))
    targets = [profile.target() for profile in profiles if profile.vendor != "cpu"]
    return next((t.platform for t in targets if any(reject(spec, q, t) is None for q in queries)), _USUAL[0])


def _suite(
    spec: KernelSpec, registry: Registry, where: Profile, device: str, names: tuple[str, ...], timeout_s: float
) -> SuiteReport:
    dtypes = [getattr(torch, name) for name in names or DTYPES]
    budget = Budget(LONG_CASE_S, timeout_s)
    return run_suite(spec, registry.kernels, target=where.target(), device=device, dtypes=dtypes, budget=budget)


def _interpret(spec: KernelSpec, name: str, names: tuple[str, ...], timeout_s: float) -> SuiteReport:
    from k3port.testing.interpreter import InterpreterFailed, run_interpreted

    dtypes = [dtype for dtype in INTERPRETED_DTYPES if not names or dtype in names]
    try:
        (report,) = run_interpreted([spec], platform=name, dtypes=dtypes, timeout_s=timeout_s)
    except InterpreterFailed as exc:
        raise K3Error(
            f"kernel {spec.name} cannot be interpreted",
            reasons=[str(exc)],
            hint="its module and its plugin must be importable in a new process",
        ) from None
    return report


def _compile(
    spec: KernelSpec, targets: Sequence[str], tps: Sequence[int], all_configs: bool, jobs: int, timeout_s: float
) -> CompileReport:
    from k3port.testing.xcompile import compile_kernel

    return compile_kernel(
        spec, targets=tuple(targets), tps=tuple(tps), all_configs=all_configs, jobs=jobs, timeout_s=timeout_s
    )


def _emulate(
    spec: KernelSpec,
    registry: Registry,
    isa: str,
    names: Sequence[str],
    mutate: int,
    seed: int,
    timeout_s: float,
) -> EmulationReport:
    from k3port.testing import emulation

    dtypes = [dtype for dtype in emulation.DTYPES if not names or str(dtype).removeprefix("torch.") in names]
    return emulation.run_emulated(
        spec, registry.kernels, isa, dtypes=dtypes, mutate=mutate, seed=seed, timeout_s=timeout_s
    )


def _absent(spec: KernelSpec) -> str:
    """The device that nothing can be run without, in words."""
    unknown = torch.cuda.is_available() and _profile_here() is None
    return needed_gpu(spec) + (f" that some platform describes, and none describes {gpu_name()}" if unknown else "")


def _profile_here() -> Profile | None:
    """A profile of the architecture of this machine's GPU; of several, the one with its product name."""
    from k3port.backends.portable.launch import arch

    here = arch()
    found = [profile for profile in load_profiles().values() if profile.arch == here]
    name = gpu_name().lower()
    named = [profile for profile in found if any(word.lower() in name for word in (profile.name, *profile.aliases))]
    return next(iter(named or found), None)


def _versions(spec: KernelSpec) -> dict[str, str]:
    from packaging.requirements import Requirement

    names = dict.fromkeys(("triton", *(Requirement(text).name for text in spec.requires.packages)))
    found = {"k3port": __version__, "Python": platform.python_version(), "PyTorch": torch.__version__}
    found |= {"Triton" if name == "triton" else name: version for name in names if (version := package_version(name))}
    return found
