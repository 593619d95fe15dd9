"""Constants and readers that the tests of ``k3port doctor`` share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_machines import Card

from k3port.oracle.detect import TorchBuild
from k3port.oracle.sources import Gpu
from k3port.oracle.spec import Device

ROOT = Path(__file__).parents[2]
CPU_TORCH = TorchBuild("2.14.0+cpu")
CUDA_TORCH = TorchBuild("2.14.0+cu130", cuda="13.0")
EIGHT = [Card(f"GPU-{n}", f"00000000:{n + 1:02X}:00.0") for n in range(8)]
PLUGIN = """
from k3port.hookspecs import hookimpl
from k3port.oracle.spec import KernelSpec
{code}
"""


Machine = Callable[..., None]


def results(k3port: Any, *args: object, code: int | None = 0) -> dict[str, list[dict[str, str]]]:
    """Results by check id. A code of None is for machines whose kernels this version may or may not have."""
    result = k3port("doctor", "--json", *args)
    assert code in (None, result.code), result.out + result.err
    found: dict[str, list[dict[str, str]]] = {}
    for item in json.loads(result.out)["checks"]:
        found.setdefault(item["id"], []).append(item)
    return found


def texts(found: dict[str, list[dict[str, str]]], id: str, status: str = "") -> str:
    return "\n".join(item["text"] for item in found.get(id, ()) if status in ("", item["status"]))


def gpu(name: str, arch: str, memory: int = 0, vendor: Any = "amd") -> Gpu:
    return Gpu(Device(vendor, arch, name, "fake", memory_bytes=memory))
