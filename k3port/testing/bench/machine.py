"""On what, with what and when a measurement was made: the head of a receipt."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import k3port
from k3port.oracle.spec import Device, Target, Vendor

PACKAGES = ("torch", "triton", "fla-core", "numpy")


@dataclass(frozen=True)
class Machine:
    """Facts about one device, its software, and this copy of k3port. Empty strings: not known."""

    device: str
    arch: str
    vendor: Vendor
    memory_bytes: int
    compute_units: int
    driver: str
    toolkit: str
    python: str
    packages: dict[str, str]
    k3port: str
    commit: str
    date: str


def package_version(name: str) -> str:
    """Version of an installed distribution; of a copied package without metadata its ``__version__``; else empty."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        module = {"fla-core": "fla"}.get(name, name)
        if importlib.util.find_spec(module) is None:
            return ""
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))


def describe(device: torch.device) -> Machine:
    """Reads everything about a device and the software that drives it."""
    found: dict[str, Any] = {"device": platform.processor() or platform.machine(), "arch": platform.machine()}
    vendor: Vendor = "cpu"
    if device.type == "cuda":
        props: Any = torch.cuda.get_device_properties(device)
        amd = str(getattr(props, "gcnArchName", ""))
        vendor = "amd" if amd.startswith("gfx") else "nvidia"
        found = {
            "device": props.name,
            "arch": amd.split(":", 1)[0] if vendor == "amd" else f"sm_{props.major}{props.minor}",
            "memory_bytes": props.total_memory,
            "compute_units": props.multi_processor_count,
        }
    versions = {name: version for name in PACKAGES if (version := package_version(name))}
    return Machine(
        device=found["device"],
        arch=found["arch"],
        vendor=vendor,
        memory_bytes=found.get("memory_bytes", 0),
        compute_units=found.get("compute_units", 0),
        driver=_driver() if vendor != "cpu" else "",
        # The build's local version says for which toolkit it was made: +cu130, +rocm7.0, +cpu.
        toolkit=torch.__version__.partition("+")[2],
        python=platform.python_version(),
        packages=versions,
        k3port=k3port.__version__,
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def target_of(machine: Machine) -> Target:
    """What the oracle is asked about: this device with what is installed here."""
    device = Device(
        machine.vendor,
        machine.arch,
        machine.device,
        "detected",
        memory_bytes=machine.memory_bytes,
        compute_units=machine.compute_units,
    )
    return Target("here", device, packages=machine.packages, packages_source="host")


def _driver() -> str:
    """Version of the kernel driver, as the driver itself tells it."""
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        words = text.split()
        return next((word for word in words if word[0].isdigit() and word.count(".") >= 1), words[0] if words else "")
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _commit() -> str:
    """Commit of the checkout that this package lies in; ``+`` after it where files differ. Empty without git."""
    root = str(Path(k3port.__file__).parents[1])
    commit = _first_line(["git", "-C", root, "rev-parse", "--short=12", "HEAD"])
    if not commit or _first_line(["git", "-C", root, "ls-files", "k3port/__init__.py"]) == "":
        return ""
    return commit + ("+" if _first_line(["git", "-C", root, "status", "--porcelain", "--", "k3port"]) else "")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
