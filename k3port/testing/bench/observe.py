"""Which tuned configurations a call asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Request:
    """One look-up: the configuration file's name, the axes that were given, and what was found."""

    name: str
    axes: tuple[tuple[str, int], ...]
    config: tuple[tuple[str, int], ...]


@contextmanager
def observed_configs() -> Iterator[list[Request]]:
    """The look-ups of Triton kernels inside, each once, in order. Forced configurations are not looked up."""
    found: list[Request] = []
    if importlib.util.find_spec("triton") is None:
        yield found
        return
    from k3port.backends.portable import launch

    look_up = launch._tuned

    def observed(kernel: str, arch: str, axes: tuple[tuple[str, int], ...]) -> Any:
        config = look_up(kernel, arch, axes)
        request = Request(kernel, axes, tuple(config.items()))
        if request not in found:
            found.append(request)
        return config

    with mock.patch.object(launch, "_tuned", observed):
        yield found
