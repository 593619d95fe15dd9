"""Tuned configurations of the Triton kernels, as data: they can be read where Triton is not installed.

A configuration file ``configs/<kernel>.json`` holds a list of entries, the first that fits is taken::

    {"kernel": "rms_norm", "entries": [
      {"archs": ["sm_90"], "when": {"D": [4096, null]}, "config": {"num_warps": 8}, "measured": {"device": "..."}},
      {"archs": ["*"], "when": {}, "config": {"num_warps": 4}, "measured": null}]}

``when`` bounds an axis from both sides, null is no bound. The last entry fits everything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

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
