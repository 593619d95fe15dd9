"""The registry: built-in backends and installed plugins, collected once through the same hooks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from k3port import hookspecs
from k3port.errors import K3Error, PlanError
from k3port.oracle.checks import DoctorCheck
from k3port.oracle.profile import load_profiles
from k3port.oracle.sources import Probe
from k3port.oracle.spec import Device, KernelSpec

ENTRY_POINT_GROUP = "k3port"
_HOOKS = ("k3port_kernels", "k3port_detect", "k3port_probes", "k3port_doctor_checks", "k3port_platforms")


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

    def kernel(self, name: str) -> KernelSpec:
        return next(spec for spec in self.kernels if spec.name == name)


def builtin_plugins() -> list[ModuleType]:
    from k3port.backends import cpu, cuda, portable, reference, rocm

    return [reference, cpu, portable, cuda, rocm]


def make_registry(extra: Sequence[Any] = (), *, entry_points: bool = True) -> Registry:
    """Collects kernels and devices.

    Args:
        extra: plugin modules or objects beside the built-in and installed ones.
        entry_points: whether to load the installed plugins (entry-point group ``k3port``).

    Raises:
        PlanError: two plugins own one kernel name.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    problems: list[str] = []
    for module in builtin_plugins():
        manager.register(module, name=module.__name__)
    if entry_points:
        # One by one: pluggy's own loader would let the first broken plugin stop all others.
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            name = f"{point.name} of {point.dist.name if point.dist else 'unknown'} ({point.value})"
            try:
                manager.register(point.load(), name=name)
            except Exception as exc:
                problems.append(f"plugin {name} was skipped: {type(exc).__name__}: {exc}")
    for number, plugin in enumerate(extra):
        name = getattr(plugin, "__name__", type(plugin).__qualname__)
        manager.register(plugin, name=f"{name} (given, {number})")
    owners: dict[str, str] = {}
    kernels: list[KernelSpec] = []
    devices: list[Device] = []
    probes: list[Probe] = []
    checks: list[DoctorCheck] = []
    platforms: list[Path] = []
    # Hook by hook and plugin by plugin, so that a clash or a failure can name its plugin.
    plugins = [(name, plugin) for name, plugin in manager.list_name_plugin() if plugin is not None]
    for name, plugin in plugins:
        only = manager.subset_hook_caller
        others = [other for _, other in plugins if other is not plugin]
        try:
            specs, seen, looks, own_checks, files = (
                [item for group in only(hook, others)() for item in group] for hook in _HOOKS
            )
        except Exception as exc:
            problems.append(f"plugin {name} was skipped: {type(exc).__name__}: {exc}")
            continue
        for spec in specs:
            if spec.name in owners:
                raise PlanError(
                    f"two plugins own the kernel name {spec.name}",
                    reasons=[owners[spec.name], name],
                    hint="uninstall one of them, or rename the kernel",
                )
            owners[spec.name] = name
            kernels.append(spec)
        devices += seen
        probes += looks
        checks += own_checks
        for file in map(Path, files):
            # Checked here, so that a plugin's broken file costs its platforms and not every run.
            try:
                load_profiles((file,))
            except K3Error as exc:
                problems.append(f"plugin {name}: {exc.message}: {'; '.join(exc.reasons)}")
            else:
                platforms.append(file)
    ordered = tuple(sorted(kernels, key=lambda s: s.name))
    return Registry(ordered, tuple(devices), tuple(problems), tuple(probes), tuple(checks), tuple(platforms))


@cache
def default_registry() -> Registry:
    """The registry of this process; it does not change after the first call."""
    return make_registry()
