"""Kernels that both GPU vendors share, mostly Triton. Declared here, one file per family."""

from __future__ import annotations

from collections.abc import Sequence

from k3port.backends.portable import collectives, dense, kda, mla, moe
from k3port.hookspecs import hookimpl
from k3port.oracle.spec import KernelSpec

KERNELS: tuple[KernelSpec, ...] = tuple(
    spec for family in (mla, kda, moe, dense, collectives) for spec in family.KERNELS
)


@hookimpl
def k3port_kernels() -> Sequence[KernelSpec]:
    return KERNELS
