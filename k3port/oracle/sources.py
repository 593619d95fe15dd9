"""What vendor probes report about this machine, and the small helpers that they share.

A probe looks and never computes: no GPU context is made, and torch is not imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from k3port.oracle.spec import Device, Vendor

Severity = Literal["info", "warning", "error"]
State = Literal["ok", "absent", "failed"]
UNKNOWN = "unknown"
"""The architecture of a GPU that a source lists without saying what it is."""


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing about this machine: a stable id, what it is, and one command that helps."""

    id: str
    severity: Severity
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice of it, as a source lists it; after combining, as all of them together do.

    Attributes:
        index: place in the list of its vendor: PCI order on NVIDIA, the order of the driver's tree on AMD.
        sources: who listed it, most trusted first.
        parent: UUID of the whole GPU where this is a slice of one.
        speed: only for comparing: what the runtime's fastest-first order would go by; 0 where unknown.
    """

    device: Device
    index: int = 0
    sources: tuple[str, ...] = ()
    parent: str = ""
    speed: int = 0

    @property
    def label(self) -> str:
        """A name for messages that stays the same whatever order the devices are counted in."""
        place = self.device.pci or self.device.uuid or f"number {self.index}"
        return f"{self.device.name} ({self.device.arch}, {place})"


@dataclass(frozen=True)
class SourceReport:
    """What one source says.

    Attributes:
        state: ``absent``: not on this machine; ``failed``: there, and did not answer.
        detail: the file or library that was read, or why it gave nothing.
        facts: versions by name, such as ``driver`` and ``cuda_ceiling``.
        blocked: why no GPU of this vendor can compute although some are seen; empty where nothing speaks against it.
        counts_only: it tells how many there are, and not enough to be a device of its own.
    """

    source: str
    vendor: Vendor
    state: State
    detail: str
    gpus: tuple[Gpu, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    blocked: str = ""
    counts_only: bool = False


Probe = Callable[[Path], Sequence[SourceReport]]
"""Looks at the machine whose file system starts at the given folder: ``/``, or a test's fake."""


@dataclass(frozen=True)
class Answer:
    """What a child process printed; ``error`` says why there is nothing."""

    text: str = ""
    error: str = ""


def ask_child(code: str, timeout: float = 10.0) -> Answer:
    """Runs Python code in a process of its own: a vendor library that hangs or crashes takes only that one down."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {timeout:g} s")
    except OSError as exc:
        return Answer(error=str(exc))
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        how = f"signal {-done.returncode}" if done.returncode < 0 else last
        return Answer(error=how)
    return Answer(done.stdout)


def read_text(path: Path) -> str | None:
    """A small system file, or None where it is absent or not ours to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def pci_address(text: str) -> str:
    """One spelling for all sources: ``00000000:3B:00.0`` and ``0000:3b:00.0`` are the same place."""
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.?([0-7])?", text.strip().lower())
    if match is None:
        return text.strip().lower()
    domain, bus, slot, function = match.groups(default="0")
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(slot, 16):02x}.{function}"


# Display controllers, and processing accelerators such as the MI series.
_GPU_CLASSES = ("0x03", "0x12")


def pci_functions(root: Path, vendor_id: int) -> Iterator[tuple[str, str]]:
    """PCI address and device id of every GPU of a vendor on the bus, with or without a driver."""
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if (read_text(folder / "vendor") or "").strip() != f"{vendor_id:#06x}":
            continue
        if (read_text(folder / "class") or "").startswith(_GPU_CLASSES):
            yield pci_address(folder.name), (read_text(folder / "device") or "").strip()


def pci_report(root: Path, vendor: Vendor, vendor_id: int, name: str) -> SourceReport:
    """The GPUs on the PCI bus. They are counted, no more: a GPU without its driver cannot be used."""
    folder = root / "sys/bus/pci/devices"
    if not folder.is_dir():
        return SourceReport("pci", vendor, "absent", f"{folder} is not there", counts_only=True)
    found = list(pci_functions(root, vendor_id))
    gpus = tuple(
        Gpu(Device(vendor, UNKNOWN, f"{name} {device}".strip(), "detected", pci=pci), number, ("pci",))
        for number, (pci, device) in enumerate(found)
    )
    detail = str(folder) if gpus else f"no {name} in {folder}"
    return SourceReport("pci", vendor, "ok", detail, gpus, counts_only=True)


def missing_driver(vendor_name: str, on_bus: int, listed: int, remedy: str) -> tuple[Finding, ...]:
    """What to say where the bus has more GPUs than the driver lists."""
    if on_bus <= listed:
        return ()
    if listed:
        text = f"{on_bus - listed} more {vendor_name} GPU(s) on the bus: kept from this container, or without a driver"
        return (Finding("devices.driver", "info", text),)
    text = f"{on_bus} {vendor_name} GPU(s) on the bus, and no {vendor_name} driver lists them"
    return (Finding("devices.driver", "warning", text, remedy),)
