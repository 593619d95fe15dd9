"""From a kernel's record to the launches that its production calls make, per target and configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import triton

from k3port.backends.portable.launch import force_config
from k3port.backends.portable.tuning import Config, entries
from k3port.oracle.predicates import reject
from k3port.oracle.spec import KernelSpec
from k3port.runtime.binding import load_object
from k3port.testing.kernel_code import CASE_S, FINDINGS, PART_S, Budget, TookTooLong, said
from k3port.testing.launches import Launch, Recording, record
from k3port.testing.production import Call, NoProductionCall, production_calls
from k3port.testing.targets import platform_target
from k3port.testing.xcompile.cache import cache_key
from k3port.testing.xcompile.report import CHOSEN

SHAPE_CODES = frozenset({"PHASE", "VENDOR", "ARCH", "LDS", "DTYPE", "WEIGHT_FORMAT", "KV_DTYPE", "AXIS", "TOKENS"})
"""Refusals that no installation or setting changes: such a call would never be made."""


@dataclass
class Job:
    """One launch of one kernel on one target, or the error that came instead of it."""

    kernel: str
    target: str
    tp: int
    config: str
    launch: Launch | None
    error: str = ""
    key: str = ""
    cases: list[str] = field(default_factory=list)


@dataclass
class Gathered:
    """All jobs of one kernel.

    ``left_out`` says which calls its record refuses, ``silent`` where it was called and launched nothing.
    """

    jobs: list[Job] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)


def gather(
    spec: KernelSpec,
    targets: Sequence[str],
    tps: Sequence[int],
    *,
    all_configs: bool,
    timeout_s: float = PART_S,
) -> Gathered:
    """Makes every production call of a kernel under a recorder; equal launches become one job.

    Without ``all_configs``, a call that is not a main one is made for the first target that takes it only: what may go
    wrong there is how Triton specialises arguments, which does not depend on the target. A call of host code may take
    :data:`CASE_S` seconds, all of them ``timeout_s``; three that do not end are enough to know.
    """
    found = Gathered()
    budget = Budget(CASE_S, timeout_s)
    for tp in tps:
        try:
            function, calls = load_object(spec.load), list(production_calls(spec, tp))
        except NoProductionCall as exc:
            found.jobs.append(Job(spec.name, "", tp, CHOSEN, None, str(exc), cases=["production calls"]))
            continue
        except FINDINGS as exc:  # an import that fails is a finding as well
            found.jobs.append(Job(spec.name, "", tp, CHOSEN, None, said(exc), cases=["loading"]))
            continue
        done: set[int] = set()
        for target in targets:
            known: dict[tuple[str, str], Job] = {}
            called = False
            for number, call in enumerate(calls):
                if (refused := _refusal(spec, call, target)) is not None:
                    found.left_out[f"{spec.name} on {target}, tp {tp}: {refused}"] = None
                    continue
                if not (all_configs or call.main) and number in done:
                    continue
                if budget.over:
                    # Whatever used it up is a fault with its call; hundreds of equal ones would take hours.
                    return found
                done.add(number)
                called = True
                for job in _jobs(spec, function, call, target, tp, all_configs, budget):
                    first = known.setdefault((job.config, job.key or job.error), job)
                    if first is job:
                        found.jobs.append(job)
                    elif call.name not in first.cases:
                        first.cases.append(call.name)
            if called and not known:
                found.silent.append(f"{spec.name} on {target}, tp {tp}")
    return found


def _refusal(spec: KernelSpec, call: Call, target: str) -> str | None:
    found = platform_target(target)
    compiling = replace(found, packages={**found.packages, "triton": triton.__version__})
    # Without packages first: one that is missing here would hide what the kernel says of the call.
    for asked in (found, compiling):
        refused = reject(spec, call.query, asked)
        if refused is not None and refused.code in SHAPE_CODES:
            return refused.detail
    return None


def _jobs(
    spec: KernelSpec,
    function: Callable[..., Any],
    call: Call,
    target: str,
    tp: int,
    all_configs: bool,
    budget: Budget,
) -> Iterator[Job]:
    """The launches of one call: with the configuration that it takes by itself, then with each that it could take."""
    waiting: list[tuple[str, tuple[str, Config] | None]] = [(CHOSEN, None)]
    while waiting:
        label, forced = waiting.pop(0)
        with record(target, every_autotuned=all_configs) as recording:
            try:
                with nullcontext() if forced is None else force_config(*forced), budget.case():
                    function(**call.args)
            except FINDINGS as exc:  # whatever the host code raises is a finding
                what = "its host code: " if isinstance(exc, TookTooLong) else ""
                yield Job(spec.name, target, tp, label, None, f"{what}{said(exc)}", cases=[call.name])
        for launch in recording.launches:
            name = f"{label}, {launch.autotuned}" if launch.autotuned and all_configs else label
            yield Job(spec.name, target, tp, name, launch, key=cache_key(launch), cases=[call.name])
        if all_configs and forced is None:
            waiting = list(_configurations(recording))


def _configurations(recording: Recording) -> Iterator[tuple[str, tuple[str, Config]]]:
    """Every tuned entry that fits the architecture and the axes that a launch asked with, down to the first one for all
    axes: what stands behind it, this architecture never gets."""
    seen = set()
    for tuned in recording.tuned:
        for entry in entries(tuned.name):
            if not entry.fits(recording.arch, dict(tuned.axes)):
                continue
            label = f"{tuned.name}: {' '.join(f'{name}={value}' for name, value in entry.config.items())}"
            if label not in seen:
                seen.add(label)
                yield label, (tuned.name, entry.config)
            if not entry.when:
                break
