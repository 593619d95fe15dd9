"""Which GPU the Triton kernels are launched for, and the tuned configuration of a kernel there.

A configuration file ``configs/<kernel>.json`` holds a list of entries, the first that fits is taken::

    {"kernel": "rms_norm", "entries": [
      {"archs": ["sm_90"], "when": {"D": [4096, null]}, "config": {"num_warps": 8}, "measured": {"device": "..."}},
      {"archs": ["*"], "when": {}, "config": {"num_warps": 4}, "measured": null}]}

``when`` bounds an axis from both sides, null is no bound. The last entry fits everything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import triton
from triton import knobs

INTERPRETER = "interpreter"
"""Architecture name under Triton's interpreter."""

Config = Mapping[str, int]


@dataclass(frozen=True)
class Entry:
    """One tuned configuration and where it applies."""

    archs: tuple[str, ...]
    when: Mapping[str, tuple[int | None, int | None]]
    config: Config
    measured: Mapping[str, Any] | None = field(default=None, compare=False)

    def fits(self, arch: str, axes: Mapping[str, int]) -> bool:
        if "*" not in self.archs and arch not in self.archs:
            return False
        return all(
            (low is None or axes[name] >= low) and (high is None or axes[name] <= high)
            for name, (low, high) in self.when.items()
        )


@dataclass(frozen=True)
class Lookup:
    """One look-up of a tuned configuration: the file's name in ``configs/``, the axes it was asked with, the answer."""

    name: str
    axes: tuple[tuple[str, int], ...]
    config: tuple[tuple[str, int], ...]


_pretended: list[str] = []
_forced: list[tuple[str, Config]] = []
_watching: list[list[Lookup]] = []


@functools.cache
def _device_arch() -> str:
    if knobs.runtime.interpret:
        return INTERPRETER
    driver: Any = triton.runtime.driver
    target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":", 1)[0]


def arch() -> str:
    """Architecture that kernels are launched for: ``sm_90``, ``gfx950``, ``interpreter``."""
    return _pretended[-1] if _pretended else _device_arch()


@functools.cache
def entries(kernel: str) -> tuple[Entry, ...]:
    """All tuned configurations of a kernel.

    Raises:
        ValueError: the file names another kernel, or its last entry does not fit everything.
    """
    path = resources.files("k3port.backends.portable").joinpath("configs", f"{kernel}.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    found = tuple(
        Entry(
            archs=tuple(item["archs"]),
            when={name: (low, high) for name, (low, high) in item["when"].items()},
            config=dict(item["config"]),
            measured=item.get("measured"),
        )
        for item in data["entries"]
    )
    if data["kernel"] != kernel or not found or found[-1].when or "*" not in found[-1].archs:
        raise ValueError(f"configs/{kernel}.json: wrong kernel name, or no last entry for every arch and shape")
    return found


@functools.lru_cache(maxsize=65536)
def _tuned(kernel: str, arch_name: str, axes: tuple[tuple[str, int], ...]) -> Config:
    return next(entry.config for entry in entries(kernel) if entry.fits(arch_name, dict(axes)))


def tuned(kernel: str, **axes: int) -> Config:
    """The configuration of ``kernel`` for these axis sizes on the current architecture."""
    for name, config in reversed(_forced):
        if name == kernel:
            return config
    found = _tuned(kernel, arch(), tuple(axes.items()))
    if _watching:
        lookup = Lookup(kernel, tuple(axes.items()), tuple(found.items()))
        for lookups in _watching:
            if lookup not in lookups:
                lookups.append(lookup)
    return found


@contextmanager
def watch_tuned() -> Iterator[list[Lookup]]:
    """The look-ups made inside, each once, in order. A forced configuration is not looked up."""
    found: list[Lookup] = []
    _watching.append(found)
    try:
        yield found
    finally:
        # By identity: two watchers that saw the same are equal lists.
        _watching[:] = [lookups for lookups in _watching if lookups is not found]


@contextmanager
def pretend_arch(name: str) -> Iterator[None]:
    """Launches made inside are made for another architecture; for compiling and emulating without the GPU."""
    _pretended.append(name)
    try:
        yield
    finally:
        _pretended.pop()


@contextmanager
def force_config(kernel: str, config: Config) -> Iterator[None]:
    """Launches of one kernel made inside use this configuration; for tuning and for compiling all of them."""
    _forced.append((kernel, config))
    try:
        yield
    finally:
        _forced.pop()
