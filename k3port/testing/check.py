"""Everything that can be proved of one kernel on this machine: what ``k3port kernels check`` does.

The contract suite, on the CPU, in Triton's interpreter or on the GPU that is here; compilation for every target; the
AMD machine code in emulation; and what the samples notice of dropped instructions.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from k3port import __version__
from k3port.errors import ExitCode, K3Error
from k3port.oracle.profile import Profile, load_profiles
from k3port.oracle.spec import KernelSpec
from k3port.plugins import Registry
from k3port.runtime.platforms import find_profile
from k3port.testing.bench.machine import package_version
from k3port.testing.subject import DTYPES, is_triton, runs_on_cpu
from k3port.testing.suite import SuiteReport, run_suite
from k3port.testing.targets import ISAS, TARGETS

if TYPE_CHECKING:
    from k3port.testing.emulation import EmulationReport
    from k3port.testing.xcompile import CompileReport

INTERPRETED_DTYPES = ("float32", "bfloat16", "float16")


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

    @property
    def numeric_faults(self) -> tuple[str, ...]:
        """Faults of numbers, bounds and synchronisation."""
        found = [f"{run.where}: {fault}" for run in self.suites for fault in run.report.faults]
        found += [f"emulation: {fault}" for emulation in self.emulations for fault in emulation.faults]
        return tuple(found)

    @property
    def other_faults(self) -> tuple[str, ...]:
        """What does not compile or does not fit, and a kernel that nothing has been run of."""
        found = [f"compilation: {fault}" for fault in self.compilation.faults] if self.compilation else []
        if self.compilation is not None and self.compilation.silent:
            found.append("compilation: its host code launched no Triton kernel at production shapes")
        ran = any(run.report.ran for run in self.suites) or any(e.suite.ran for e in self.emulations)
        if not ran:
            here = bool(self.suites or self.emulations)
            why = (
                "its record admits no sample of the contract here" if here else "this machine has no GPU that it is for"
            )
            found.append(f"{why}: nothing was run")
        return tuple(found)

    @property
    def faults(self) -> tuple[str, ...]:
        """All faults; those of the numbers come first."""
        return (*self.numeric_faults, *self.other_faults)

    @property
    def exit_code(self) -> ExitCode:
        if self.numeric_faults:
            return ExitCode.NUMERICS
        return ExitCode.FAILED if self.other_faults else ExitCode.OK

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
        progress: gets a sentence before each part.
    """
    seconds: dict[str, float] = {}
    suites: list[SuiteRun] = []
    for place in _places(spec, registry):
        progress(f"contract of {spec.op}: {place.where} ...")
        begin = time.perf_counter()
        report = place.run(tuple(dtypes))
        suites.append(SuiteRun(place.where, place.platform, report, time.perf_counter() - begin))
    if suites:
        seconds["contract"] = sum(run.seconds for run in suites)
    compilation, emulations = None, []
    if is_triton(spec):
        # A composite has no host code of its own to compile; its parts are kernels with checks of their own.
        if targets and not spec.parts:
            progress(f"compilation for {', '.join(targets)} ...")
            begin = time.perf_counter()
            compilation = _compile(spec, targets, tps, all_configs, jobs)
            seconds["compilation"] = time.perf_counter() - begin
        for isa in isas if _is_for(spec, "amd") else ():
            progress(f"emulation of {isa}{f', {mutate} mutants' if mutate else ''} ...")
            emulations.append(_emulate(spec, registry, isa, dtypes, mutate, seed))
        if emulations:
            seconds["emulation"] = sum(emulation.seconds for emulation in emulations)
    return KernelCheck(
        spec=spec,
        versions=_versions(spec),
        machine=f"{platform.system()} {platform.machine()}, {_gpu_name() or 'no GPU'}",
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        suites=tuple(suites),
        compilation=compilation,
        emulations=tuple(emulations),
        seconds=seconds,
        not_run=tuple(_not_run(spec, suites, emulations, isas, targets, mutate)),
    )


@dataclass(frozen=True)
class _Place:
    """Somewhere the contract suite can run: on behalf of a platform, and how."""

    where: str
    platform: str
    run: Callable[[tuple[str, ...]], SuiteReport]


def _places(spec: KernelSpec, registry: Registry) -> list[_Place]:
    """The GPU of this machine where the kernel is for it; else the CPU, or Triton's interpreter."""
    places = []
    for_gpus = not spec.is_reference and (_is_for(spec, "nvidia") or _is_for(spec, "amd"))
    gpu = _profile_here() if for_gpus and torch.cuda.is_available() else None
    if gpu is not None and _is_for(spec, gpu.vendor):
        places.append(_Place(f"GPU, {_gpu_name()}", gpu.name, lambda names: _suite(spec, registry, gpu, "cuda", names)))
    if runs_on_cpu(spec):
        cpu = find_profile("cpu", registry=registry)
        places.append(_Place("CPU", "cpu", lambda names: _suite(spec, registry, cpu, "cpu", names)))
    elif is_triton(spec) and not places:
        name = "h200" if _is_for(spec, "nvidia") else "mi355x"
        places.append(_Place("Triton's interpreter", name, lambda names: _interpret(spec, name, names)))
    return places


def _suite(spec: KernelSpec, registry: Registry, where: Profile, device: str, names: tuple[str, ...]) -> SuiteReport:
    dtypes = [getattr(torch, name) for name in names or DTYPES]
    return run_suite(spec, registry.kernels, target=where.target(), device=device, dtypes=dtypes)


def _interpret(spec: KernelSpec, name: str, names: tuple[str, ...]) -> SuiteReport:
    from k3port.testing.interpreter import InterpreterFailed, run_interpreted

    dtypes = [dtype for dtype in INTERPRETED_DTYPES if not names or dtype in names]
    try:
        (report,) = run_interpreted([spec], platform=name, dtypes=dtypes)
    except InterpreterFailed as exc:
        raise K3Error(
            f"kernel {spec.name} cannot be interpreted",
            reasons=str(exc).strip().splitlines()[-3:],
            hint="its module and its plugin must be importable in a new process",
        ) from None
    return report


def _compile(
    spec: KernelSpec, targets: Sequence[str], tps: Sequence[int], all_configs: bool, jobs: int
) -> CompileReport:
    from k3port.testing.xcompile import compile_kernel

    return compile_kernel(spec, targets=tuple(targets), tps=tuple(tps), all_configs=all_configs, jobs=jobs)


def _emulate(
    spec: KernelSpec, registry: Registry, isa: str, names: Sequence[str], mutate: int, seed: int
) -> EmulationReport:
    from k3port.testing import emulation

    dtypes = [dtype for dtype in emulation.DTYPES if not names or str(dtype).removeprefix("torch.") in names]
    return emulation.run_emulated(spec, registry.kernels, isa, dtypes=dtypes, mutate=mutate, seed=seed)


def _is_for(spec: KernelSpec, vendor: str) -> bool:
    return not spec.requires.vendors or vendor in spec.requires.vendors


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _profile_here() -> Profile | None:
    """A profile of the architecture of this machine's GPU; of several, the one with its product name."""
    from k3port.backends.portable.launch import arch

    here = arch()
    found = [profile for profile in load_profiles().values() if profile.arch == here]
    name = _gpu_name().lower()
    named = [profile for profile in found if any(word.lower() in name for word in (profile.name, *profile.aliases))]
    return next(iter(named or found), None)


def _versions(spec: KernelSpec) -> dict[str, str]:
    from packaging.requirements import Requirement

    names = dict.fromkeys(("triton", *(Requirement(text).name for text in spec.requires.packages)))
    found = {"k3port": __version__, "Python": platform.python_version(), "PyTorch": torch.__version__}
    found |= {"Triton" if name == "triton" else name: version for name in names if (version := package_version(name))}
    return found


def _not_run(
    spec: KernelSpec,
    suites: Sequence[SuiteRun],
    emulations: Sequence[EmulationReport],
    isas: Sequence[str],
    targets: Sequence[str],
    mutate: int,
) -> list[str]:
    """What the check leaves open, so that a green report is not read as more than it is."""
    found: list[str] = []
    on_gpu = any(run.where.startswith("GPU") for run in suites)
    vendors = [name for vendor, name in (("nvidia", "NVIDIA"), ("amd", "AMD")) if vendor in spec.requires.vendors]
    for name in vendors:
        if not (on_gpu and (name == "NVIDIA") == (torch.cuda.is_available() and "NVIDIA" in _gpu_name())):
            emulated = ": its code was executed in emulation only" if name == "AMD" and emulations else ""
            found.append(f"{name} hardware{emulated}")
    if not suites:
        found.append(f"the contract suite: {spec.name} needs a GPU of {' or '.join(vendors) or 'its vendor'}")
    if not is_triton(spec):
        return found
    if spec.parts:
        found.append(f"compilation: check the parts, {', '.join(spec.parts)}")
    elif missing := [name for name in TARGETS if name not in targets]:
        found.append(f"compilation for {', '.join(missing)}")
    if missing := [name for name in ISAS if name not in isas and _is_for(spec, "amd")]:
        found.append(f"emulation of {', '.join(missing)}")
    if emulations:
        found.append(
            "in emulation: strided and permuted rows; invariants on large calls; in further dtypes, large samples"
        )
    if left_out := dict.fromkeys(sample for emulation in emulations for sample in emulation.left_out):
        found.append(f"in emulation, for their size: {', '.join(left_out)}")
    if emulations and not mutate:
        found.append("mutation (--mutate N)")
    return found
