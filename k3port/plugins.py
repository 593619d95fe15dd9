"""The registry: built-in backends and installed plugins, collected once through the same hooks."""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from k3port import hookspecs
from k3port.errors import K3Error
from k3port.oracle.admit import spec_doubts, spec_faults
from k3port.oracle.checks import DoctorCheck
from k3port.oracle.profile import load_profiles
from k3port.oracle.sources import Probe
from k3port.oracle.spec import Device, KernelSpec

ENTRY_POINT_GROUP = "k3port"
_HOOKS: Mapping[str, Any] = {
    "k3port_kernels": KernelSpec,
    "k3port_detect": Device,
    "k3port_probes": Callable,
    "k3port_doctor_checks": DoctorCheck,
    "k3port_platforms": (str, Path),
}
"""What the items of each hook's answer are."""


@dataclass(frozen=True)
class Registry:
    """Everything the hooks gave, with what went wrong on the way (``problems`` never stop a run)."""

    kernels: tuple[KernelSpec, ...]
    devices: tuple[Device, ...]
    problems: tuple[str, ...]
    probes: tuple[Probe, ...] = ()
    checks: tuple[DoctorCheck, ...] = ()
    platforms: tuple[Path, ...] = ()
    """Platform files of plugins."""
    clashes: tuple[str, ...] = ()
    """Kernel names with several owners; each is among ``problems`` too."""

    def kernel(self, name: str) -> KernelSpec:
        return next(spec for spec in self.kernels if spec.name == name)


def builtin_plugins() -> list[ModuleType]:
    from k3port.backends import cpu, cuda, portable, reference, rocm

    return [reference, cpu, portable, cuda, rocm]


def make_registry(extra: Sequence[Any] = (), *, entry_points: bool = True) -> Registry:
    """Collects kernels and devices.

    A plugin that cannot be imported or used is left out whole; one kernel whose record is wrong is left out alone. Both
    are told in ``problems``. Of two kernels with one name the built-in one stays; of two plugins' neither does, since
    the order of plugins must not decide what runs.

    Args:
        extra: plugin modules or objects beside the built-in and installed ones.
        entry_points: whether to load the installed plugins (entry-point group ``k3port``).
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    problems: list[str] = []
    for module in builtin_plugins():
        manager.register(module, name=module.__name__)
    for name, load in _others(extra, entry_points):
        problems += _register(manager, name, load)
    owned: dict[str, list[tuple[str, KernelSpec]]] = {}
    devices: list[Device] = []
    probes: list[Probe] = []
    checks: list[DoctorCheck] = []
    files: dict[Path, str] = {}
    # Plugin by plugin, so that a clash or a failure can name its plugin.
    plugins = [(name, plugin) for name, plugin in manager.list_name_plugin() if plugin is not None]
    for name, plugin in plugins:
        others = [other for _, other in plugins if other is not plugin]
        try:
            answers = {hook: _answer(manager, hook, others) for hook in _HOOKS}
        except (Exception, SystemExit) as exc:
            problems.append(f"plugin {name} was skipped: {_sentence(exc)}")
            continue
        for spec in answers["k3port_kernels"]:
            if faults := _faults(spec):
                problems.append(f"plugin {name}: kernel {_kernel(spec)} was left out: {'; '.join(faults)}")
                continue
            owned.setdefault(spec.name, []).append((name, spec))
        devices += answers["k3port_detect"]
        probes += answers["k3port_probes"]
        checks += answers["k3port_doctor_checks"]
        files |= {Path(file): name for file in answers["k3port_platforms"]}
    platforms, faults = _usable_files(files)
    problems += faults
    problems += _doubts(owned, platforms)
    kernels, clashes = _unique(owned)
    return Registry(
        kernels, tuple(devices), tuple((*problems, *clashes)), tuple(probes), tuple(checks), platforms, clashes
    )


def _faults(spec: KernelSpec) -> list[str]:
    try:
        return spec_faults(spec)
    except Exception as exc:  # a record can hold objects that fail when they are compared or shown
        return [f"its record cannot be read: {_sentence(exc)}"]


def _kernel(spec: KernelSpec) -> str:
    """The name of a kernel, where it has one."""
    if not isinstance(spec.name, str):
        return "without a name"
    return spec.name if spec.name.isprintable() else repr(spec.name)


def _doubts(owned: Mapping[str, list[tuple[str, KernelSpec]]], platforms: Sequence[Path]) -> Iterator[str]:
    """What is probably wrong with the plugins' kernels that are kept."""
    builtin = {module.__name__ for module in builtin_plugins()}
    entries = [entry for group in owned.values() for entry in group]
    archs = {arch for owner, spec in entries if owner in builtin for arch in spec.requires.archs}
    foreign = [(owner, spec) for owner, spec in entries if owner not in builtin]
    if any(set(spec.requires.archs) - archs for _, spec in foreign):
        archs |= {profile.arch for profile in load_profiles(platforms).values()}
    for owner, spec in foreign:
        if doubts := spec_doubts(spec, archs):
            yield f"plugin {owner}: kernel {spec.name}: {'; '.join(doubts)}"


def _unique(owned: Mapping[str, list[tuple[str, KernelSpec]]]) -> tuple[tuple[KernelSpec, ...], tuple[str, ...]]:
    """One kernel per name, and a sentence about every name that more than one plugin uses."""
    builtin = {module.__name__ for module in builtin_plugins()}
    kernels, clashes = [], []
    for name, entries in sorted(owned.items()):
        ours = [spec for owner, spec in entries if owner in builtin]
        if len(entries) > 1:
            kept = "the built-in one is kept" if ours else "none of them is used"
            clashes.append(f"{len(entries)} kernels are named {name}, of {', '.join(o for o, _ in entries)}: {kept}")
        if ours or len(entries) == 1:
            kernels.append((ours or [entries[0][1]])[0])
    return tuple(kernels), tuple(clashes)


def _usable_files(files: Mapping[Path, str]) -> tuple[tuple[Path, ...], list[str]]:
    """The platform files that can be read together, and why the others are left out: files by the plugin they are of.

    Checked here, so that a plugin's file costs its own platforms and not every run. Of two files that define one name
    neither is used: the order of plugins must not decide what a platform is.
    """
    alone = {file: fault for file in files if (fault := _file_fault(file))}
    whole = [file for file in files if file not in alone]
    clashes = {f: fault for f in whole for other in whole if other != f and (fault := _file_fault(other, f))}
    faults = {**alone, **clashes}
    return (
        tuple(file for file in whole if file not in clashes),
        [f"plugin {name}: {faults[file]}" for file, name in files.items() if file in faults],
    )


def _file_fault(*files: Path) -> str:
    try:
        load_profiles(files)
    except K3Error as exc:
        return f"{exc.message}: {'; '.join(exc.reasons)}"
    return ""


def _others(extra: Sequence[Any], entry_points: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Plugins beside the built-in ones: their names, and how to get them."""
    # One by one: pluggy's own loader would let the first broken plugin stop all others.
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP) if entry_points else ():
        yield f"{point.name} of {point.dist.name if point.dist else 'unknown'} ({point.value})", point.load
    for number, plugin in enumerate(extra):
        name = getattr(plugin, "__name__", type(plugin).__qualname__)
        yield f"{name} (given, {number})", lambda plugin=plugin: plugin


def _register(manager: pluggy.PluginManager, name: str, load: Callable[[], Any]) -> Iterator[str]:
    """Imports one plugin and adds it; says what is wrong with it."""
    try:
        manager.register(load(), name=name)
    except (Exception, SystemExit) as exc:
        # A plugin whose later hook is wrong has its earlier ones registered by now.
        if manager.has_plugin(name):
            manager.unregister(name=name)
        yield f"plugin {name} was skipped: {_sentence(exc)}"
        return
    callers = manager.get_hookcallers(manager.get_plugin(name)) or ()
    if not callers:
        yield f"plugin {name} has no hook of k3port; hooks: {', '.join(_HOOKS)}"
    for caller in callers:
        if not caller.has_spec():
            near = difflib.get_close_matches(caller.name, _HOOKS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"hooks: {', '.join(_HOOKS)}"
            yield f"plugin {name}: there is no hook {caller.name}; {advice}"


def _answer(manager: pluggy.PluginManager, hook: str, others: Sequence[Any]) -> list[Any]:
    """What the one plugin that is not among ``others`` gives to a hook.

    Raises:
        TypeError: something else than a list of what the hook asks for.
    """
    items: list[Any] = []
    for group in manager.subset_hook_caller(hook, others)():
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise TypeError(f"{hook} gave {group!r:.80}, not a list")
        for item in group:
            if not isinstance(item, _HOOKS[hook]):
                raise TypeError(f"{hook} gave a list with {item!r:.80} in it, which is no {_name_of(_HOOKS[hook])}")
            items.append(item)
    return items


def _name_of(kind: Any) -> str:
    return " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__


def _sentence(exc: BaseException) -> str:
    """Errors of pluggy and of compilers have several lines; a problem has one."""
    return " ".join(f"{type(exc).__name__}: {exc}".split())


@cache
def default_registry() -> Registry:
    """The registry of this process; it does not change after the first call."""
    return make_registry()
