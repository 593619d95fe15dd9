"""The registry: built-in backends and installed plugins, collected once through the same hooks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import pluggy

from k3port import hookspecs
from k3port.errors import PlanError
from k3port.oracle.spec import Device, KernelSpec

ENTRY_POINT_GROUP = "k3port"


@dataclass(frozen=True)
class Registry:
    """Everything the hooks gave, with what went wrong on the way (``problems`` never stop a run)."""

    kernels: tuple[KernelSpec, ...]
    devices: tuple[Device, ...]
    problems: tuple[str, ...]

    def kernel(self, name: str) -> KernelSpec:
        return next(spec for spec in self.kernels if spec.name == name)


def builtin_plugins() -> list[ModuleType]:
    from k3port.backends import cpu, cuda, reference, rocm

    return [reference, cpu, cuda, rocm]


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
    # Hook by hook and plugin by plugin, so that a clash or a failure can name its plugin.
    for plugin, name in ((p, manager.get_name(p) or repr(p)) for p in manager.get_plugins()):
        only = manager.subset_hook_caller
        others = [p for p in manager.get_plugins() if p is not plugin]
        try:
            specs = [spec for group in only("k3port_kernels", others)() for spec in group]
            devices += [device for group in only("k3port_detect", others)() for device in group]
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
    return Registry(tuple(sorted(kernels, key=lambda s: s.name)), tuple(devices), tuple(problems))


@cache
def default_registry() -> Registry:
    """The registry of this process; it does not change after the first call."""
    return make_registry()
