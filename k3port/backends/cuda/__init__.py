"""NVIDIA: which devices are here, and the kernels declared for them, one file per family."""

from __future__ import annotations

from collections.abc import Sequence

from k3port.backends.cuda import collectives, kda, mla, moe, norms, sampling, vision
from k3port.backends.cuda.device import glance, probe
from k3port.hookspecs import hookimpl
from k3port.oracle.sources import Probe
from k3port.oracle.spec import Device, KernelSpec

KERNELS: tuple[KernelSpec, ...] = tuple(
    spec for family in (mla, kda, moe, norms, sampling, vision, collectives) for spec in family.KERNELS
)


@hookimpl
def k3port_kernels() -> Sequence[KernelSpec]:
    return KERNELS


@hookimpl
def k3port_detect() -> Sequence[Device]:
    return glance()


@hookimpl
def k3port_probes() -> Sequence[Probe]:
    return [probe]
