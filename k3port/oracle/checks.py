"""The checks of ``k3port doctor`` as data: an id, a category, what is checked, and a function of gathered facts.

Facts are gathered by the command; checks only judge them. So every case can be made up in a test, and a plugin adds
checks through the hook ``k3port_doctor_checks``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from k3port.oracle.detect import Detection
from k3port.oracle.profile import Profile
from k3port.oracle.spec import KernelSpec, Plan

Status = Literal["ok", "info", "warning", "fail"]
CATEGORIES = ("system", "settings", "devices", "packages", "plugins", "profiles", "kernels", "model")
_ORDER: Sequence[Status] = ("ok", "info", "warning", "fail")


@dataclass(frozen=True)
class Result:
    """What a check found: a sentence, and at most one command that helps."""

    status: Status
    text: str
    remedy: str = ""


class SettingRow(Protocol):
    """One setting as it is in force: where its value comes from and what it does."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def effect(self) -> str: ...

    @property
    def kind(self) -> str: ...


@dataclass(frozen=True)
class SystemFacts:
    """The machine beside its accelerators."""

    python: str = ""
    system: str = ""
    cpus: int = 0
    memory_bytes: int = 0
    rdma_devices: int = 0
    rdma_openable: bool = False
    shared_memory_bytes: int | None = None
    address: str = ""


@dataclass(frozen=True)
class ModelFacts:
    """A checkpoint folder or a configuration as far as it could be read without weights."""

    path: str
    error: str = ""
    layers: str = ""
    stop_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    weights: str = ""
    weight_faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """Everything that doctor's checks judge.

    Attributes:
        version: of k3port.
        settings_digest: a short hash of the settings that can change a plan or a result.
        settings_error: why the environment could not be read.
        packages: installed versions by canonical name, of those that k3port or a profile knows.
        required: what k3port itself cannot do without.
        imports: why an optional package cannot be imported (empty: it can); None where nobody tried.
        plugins: installed plugins; plugin_problems: why one was left out; clash: two owners of one name.
        profile_faults: kernels that a profile names and that do not exist.
        profile: the platform that is looked at; platform_source says why this one, platform_choices
            what else would fit, platform_error why there is none.
        here: whether the platform is this machine.
        tp: ranks that are asked for.
        kernels: all that are declared.
        plan: of the model on the platform, or plan_error: why there is none.
    """

    version: str
    system: SystemFacts = field(default_factory=SystemFacts)
    settings: tuple[SettingRow, ...] = ()
    settings_digest: str = ""
    settings_error: str = ""
    detection: Detection = field(default_factory=Detection)
    packages: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    imports: Mapping[str, str] | None = None
    plugins: tuple[str, ...] = ()
    plugin_problems: tuple[str, ...] = ()
    clash: str = ""
    profiles: tuple[str, ...] = ()
    profiles_error: str = ""
    profile_faults: tuple[str, ...] = ()
    profile: Profile | None = None
    platform_source: str = ""
    platform_choices: tuple[str, ...] = ()
    platform_error: str = ""
    here: bool = True
    tp: int = 1
    kernels: tuple[KernelSpec, ...] = ()
    plan: Plan | None = None
    plan_error: str = ""
    model: ModelFacts | None = None


@dataclass(frozen=True)
class DoctorCheck:
    """One check. ``run`` gives what it found; nothing where it does not apply."""

    id: str
    category: str
    doc: str
    run: Callable[[Any], Iterable[Result]]


@dataclass(frozen=True)
class Checked:
    """A result with the check that it comes from."""

    id: str
    category: str
    result: Result


def worst(statuses: Iterable[Status]) -> Status:
    found = set(statuses)
    for status in reversed(_ORDER):
        if status in found:
            return status
    return "ok"


def run_checks(checks: Iterable[DoctorCheck], facts: Facts) -> list[Checked]:
    """Every result, in the order of categories. A check that raises is a finding of its own, never the end."""
    found: list[Checked] = []
    for check in checks:
        try:
            results = list(check.run(facts))
            if not all(isinstance(result, Result) for result in results):
                raise TypeError("a check gives Result records")
        except Exception as exc:
            results = [Result("warning", f"the check {check.id} failed itself: {type(exc).__name__}: {exc}")]
        found += [Checked(check.id, check.category, result) for result in results]
    known = {category: number for number, category in enumerate(CATEGORIES)}
    return sorted(found, key=lambda checked: known.get(checked.category, len(known)))


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
