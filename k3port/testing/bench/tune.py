"""``bench tune`` as a library: tries a grid of configurations of one kernel offline, each through the gate first.

A kernel's module names its choices beside the function::

    CANDIDATES = {"BLOCK": (512, 1024), "num_warps": (4, 8)}

Every combination is tried; keys that are not named keep the value of the configuration in use. Where a module asks for
several configurations, ``CANDIDATES`` maps their names to such mappings, or to several of them that are tried one after
the other.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from k3port.backends.portable.launch import Lookup, force_config
from k3port.errors import K3Error
from k3port.ops.contract import cloned
from k3port.oracle.spec import KernelSpec
from k3port.testing.bench.compilations import count_compilations
from k3port.testing.bench.compile_ahead import CompileAhead
from k3port.testing.bench.config_file import NewEntry, Tuned, merge_points
from k3port.testing.bench.gate import GateError, answer_of, pass_gate
from k3port.testing.bench.observe import observed_configs
from k3port.testing.bench.rotate import copies_needed, tensor_bytes
from k3port.testing.bench.suite import Bench, candidates, make_args
from k3port.testing.bench.timing import Measured, Settings, Subject, measure
from k3port.testing.bench.workload import Answer, Args, Case, Op, Workload
from k3port.testing.harness import build_kernel

FINALISTS = 4
"""Configurations that are timed again, in turn with the one in use, after a first look at all."""
SCREENING = Settings(rounds=5, sample_seconds=5e-4, warmup_seconds=0.003)
KEEP_MARGIN = 0.01
"""The configuration in use stays unless another one is faster by this share: less is noise."""

Config = dict[str, int]


@dataclass(frozen=True)
class Trial:
    """One configuration on one case: its time, or why it was dropped."""

    config: Config
    microseconds: float | None
    dropped: str = ""


@dataclass(frozen=True)
class CaseResult:
    """What tuning found for one case of one configuration file."""

    name: str
    case: str
    axes: Mapping[str, int]
    in_use: Trial
    best: Trial
    trials: tuple[Trial, ...]

    def point(self) -> Tuned:
        """For the file."""
        assert self.best.microseconds is not None
        return Tuned(self.axes, self.best.config, self.best.microseconds)


Grid = Mapping[str, Sequence[int]]


def grids(spec: KernelSpec) -> dict[str, tuple[Grid, ...]]:
    """The ``CANDIDATES`` of a kernel's module by configuration name; one name "" where the module gives none.

    Raises:
        K3Error: the module has none, or they are no mapping of names to whole numbers.
    """
    module = spec.load.partition(":")[0]
    found = getattr(importlib.import_module(module), "CANDIDATES", None)
    if not isinstance(found, Mapping) or not found:
        raise K3Error(f"{spec.name} has nothing to tune", hint=f"{module} needs CANDIDATES: see docs/benchmarks.md")
    nested = {name: _as_grids(value) for name, value in found.items()}
    result = nested if all(nested.values()) else {"": (found,)}
    for key, values in (item for several in result.values() for grid in several for item in grid.items()):
        if _as_grids(values) or not values or not all(isinstance(value, int) for value in values):
            raise K3Error(f"CANDIDATES of {module}: {key} needs whole numbers", hint="see docs/benchmarks.md")
    return result


def _as_grids(value: Any) -> tuple[Grid, ...]:
    """A mapping, or several in a sequence; empty where it is neither."""
    several = (value,) if isinstance(value, Mapping) else value
    whole = isinstance(several, Sequence) and all(isinstance(grid, Mapping) for grid in several)
    return tuple(several) if whole else ()


def combinations(several: Sequence[Grid], in_use: Config) -> Iterator[Config]:
    """Every combination of some grids laid over the configuration in use, each once, that one first."""
    yield in_use
    seen = [in_use]
    for grid in several:
        for values in itertools.product(*grid.values()):
            config = {**in_use, **dict(zip(grid, values, strict=True))}
            if config not in seen:
                seen.append(config)
                yield config


Spills = dict[tuple[str, tuple[tuple[str, int], ...]], int]
"""Registers spilled by a configuration's name and values: a variant that is compiled already does not tell again."""


@torch.no_grad()
def tune_case(
    bench: Bench, spec: KernelSpec, workload: Workload, case: Case, spills: Spills, ahead: CompileAhead | None = None
) -> list[CaseResult]:
    """Tunes every configuration that a call of this case asks for; none where the kernel does not serve the case, or
    asks for none, as where it leaves the case to torch.

    Args:
        spills: shared between the cases of one kernel.
        ahead: compiles the configurations before they are tried.

    Raises:
        K3Error: the configuration in use does not pass the gate, or ``CANDIDATES`` does not say what it is for.
    """
    args = make_args(case, bench.clock.device)
    if all(refusal for found, refusal in candidates(bench, workload, case, args) if found.name == spec.name):
        return []
    function = build_kernel(spec, bench.kernels, workload.phase)
    answer = answer_of(workload, args)
    with observed_configs() as requests:
        pass_gate(spec.name, function, workload, case.name, args, answer)
    results = sum(wanted.numel() for wanted in answer.outputs) * workload.dtype.itemsize
    sets = [cloned(args) for _ in range(copies_needed(tensor_bytes(*args.values()) + results, bench.cold_bytes))]
    tuned: dict[str, Config] = {}
    found: list[CaseResult] = []
    for name, several in grids(spec).items():
        request = _request(spec, name, requests)
        if request is None:
            continue
        in_use = dict(request.config)
        trials, passed = list[Trial](), list[Config]()
        configs = list(combinations(several, in_use))
        if ahead is not None:
            all_forced = [{**tuned, request.name: config} for config in configs]
            ahead.compile(spec, workload, case, all_forced, tensor_bytes(*args.values()))
        for config in configs:
            forced = {**tuned, request.name: config}
            reason = _unfit(spec.name, function, workload, case, args, answer, forced, request.name, spills)
            if reason and config != in_use:
                trials.append(Trial(config, None, reason))
            else:
                passed.append(config)
        times = _race(bench, function, sets, request.name, tuned, passed, SCREENING)
        trials += [Trial(config, time) for config, time in zip(passed, times, strict=True)]
        ranked = [passed[i] for i in sorted(range(len(passed)), key=lambda i: times[i]) if passed[i] != in_use]
        finalists = [in_use, *ranked[:FINALISTS]]
        finals = _race(bench, function, sets, request.name, tuned, finalists, bench.settings)
        winner = min(range(len(finalists)), key=lambda i: finals[i])
        if finals[winner] > finals[0] * (1 - KEEP_MARGIN):
            winner = 0
        tuned[request.name] = finalists[winner]
        first, best = (Trial(finalists[i], finals[i]) for i in (0, winner))
        found.append(CaseResult(request.name, case.name, dict(request.axes), first, best, tuple(trials)))
        bench.progress(f"{spec.name} {case.name}: {finals[0]:.2f} us -> {finals[winner]:.2f} us, {best.config}")
    return found


def _unfit(
    kernel: str,
    function: Op,
    workload: Workload,
    case: Case,
    args: Args,
    answer: Answer,
    forced: Mapping[str, Config],
    name: str,
    spills: Spills,
) -> str:
    """Why a configuration is not tried: it does not compile, does not fit the device, is wrong, or spills."""
    place = (name, tuple(forced[name].items()))
    with _forced(forced), count_compilations() as compiled:
        try:
            pass_gate(kernel, function, workload, case.name, args, answer)
        except GateError as exc:
            return "; ".join(exc.reasons)
    if len(compiled):
        spills[place] = compiled.spills()
    return f"{spills[place]} registers spilled" if spills.get(place) else ""


def _request(spec: KernelSpec, name: str, requests: Sequence[Lookup]) -> Lookup | None:
    """The look-up that a grid is for: the one of its name, or the only one. None where the call makes no such look-up.

    Raises:
        K3Error: a grid without a name, and several look-ups.
    """
    fitting = [request for request in requests if name in ("", request.name)]
    if len(fitting) > 1:
        raise K3Error(
            f"{spec.name}: CANDIDATES do not say for which configuration they are",
            reasons=[f"a call asks for: {', '.join(request.name for request in requests)}"],
            hint="map the names of configurations to their candidates",
        )
    return fitting[0] if fitting else None


def _forced(configs: Mapping[str, Config]) -> ExitStack:
    stack = ExitStack()
    for name, config in configs.items():
        stack.enter_context(force_config(name, config))
    return stack


def _race(
    bench: Bench,
    function: Op,
    sets: Sequence[Mapping[str, Any]],
    name: str,
    others: Mapping[str, Config],
    configs: Sequence[Config],
    settings: Settings,
) -> list[float]:
    """Microseconds of each configuration, timed in turn: captured where the clock can, else eager."""

    def call(config: Config, own: Mapping[str, Any]) -> Any:
        with _forced({**others, name: config}):
            return function(**own)

    subjects = [
        Subject(str(index), tuple(lambda c=config, a=own: call(c, a) for own in sets))
        for index, config in enumerate(configs)
    ]
    return [_time(found) for found in measure(subjects, bench.clock, settings)]


def _time(found: Measured) -> float:
    return (found.captured or found.eager).median


def entries_of(results: Iterable[CaseResult]) -> dict[str, list[NewEntry]]:
    """New entries by configuration file, from the cases of one workload.

    Workloads are not merged: sizes of decode and of prefill are far apart, and what lies between them is neither. Of
    several cases at one place of the axes the slowest one counts.
    """
    points: dict[str, dict[tuple[tuple[str, int], ...], Tuned]] = {}
    for result in results:
        place, point = tuple(result.axes.items()), result.point()
        known = points.setdefault(result.name, {}).get(place)
        if known is None or point.microseconds > known.microseconds:
            points[result.name][place] = point
    return {name: merge_points(list(found.values())) for name, found in points.items()}
