"""NVIDIA: which devices are here. Its kernels register in this package."""

from __future__ import annotations

from collections.abc import Sequence

from k3port.backends.cuda.device import find_devices
from k3port.hookspecs import hookimpl
from k3port.oracle.spec import Device


@hookimpl
def k3port_detect() -> Sequence[Device]:
    return find_devices()
