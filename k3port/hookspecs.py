"""The hooks through which kernels and platforms enter k3port; built-in ones use the same hooks as plugins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from k3port.oracle.checks import DoctorCheck
    from k3port.oracle.sources import Probe
    from k3port.oracle.spec import Device, KernelSpec

PROJECT = "k3port"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def k3port_kernels() -> Sequence[KernelSpec]:
    """Kernels of this plugin. Must not import torch or a vendor package: a spec names what to import when chosen."""
    raise AssertionError("a hook specification is never called")


@hookspec
def k3port_detect() -> Sequence[Device]:
    """Devices of this plugin's vendor that are in this machine, at a glance: asked at every start.

    Must not create a GPU context and should load no library; what is not known that way stays empty.
    """
    raise AssertionError("a hook specification is never called")


@hookspec
def k3port_platforms() -> Sequence[Path]:
    """Platform files (YAML) that add profiles to the built-in ones."""
    raise AssertionError("a hook specification is never called")


@hookspec
def k3port_probes() -> Sequence[Probe]:
    """Thorough looks at this plugin's devices, for doctor and for runs on a GPU. Must not create a GPU context."""
    raise AssertionError("a hook specification is never called")


@hookspec
def k3port_doctor_checks() -> Sequence[DoctorCheck]:
    """Checks that ``k3port doctor`` makes beside its own. Must not import torch or a vendor package."""
    raise AssertionError("a hook specification is never called")
