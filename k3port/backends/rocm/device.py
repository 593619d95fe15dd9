"""AMD devices: the kernel driver's topology tree (KFD), the PCI bus and amdsmi. No library is loaded here.

The architecture is read from ``gfx_target_version``; product names are labels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3port.oracle.sources import (
    UNKNOWN,
    Answer,
    Finding,
    Gpu,
    SourceReport,
    ask_child,
    missing_driver,
    pci_address,
    pci_report,
    read_text,
)
from k3port.oracle.spec import Device

KFD_ROOT = Path("/sys/class/kfd/kfd/topology/nodes")
VENDOR_ID = 0x1002
_LOCAL_HEAPS = {"1", "2"}  # memory of the GPU itself, with and without a window for the CPU
_NO_HEAP = "-1"

# Runs in a process of its own: the library prints, and has been seen to hang when the driver is in trouble.
_AMDSMI = """
import json, amdsmi
amdsmi.amdsmi_init()
found = []
for handle in amdsmi.amdsmi_get_processor_handles():
    asic = amdsmi.amdsmi_get_gpu_asic_info(handle)
    entry = {"pci": amdsmi.amdsmi_get_gpu_device_bdf(handle), "name": asic.get("market_name", "")}
    entry["gfx"] = str(asic.get("target_graphics_version", ""))
    found.append(entry)
print(json.dumps(found))
"""

AskAmdsmi = Callable[[], "Answer | None"]


def ask_amdsmi() -> Answer | None:
    """What amdsmi lists as JSON, or None where it is not installed."""
    return ask_child(_AMDSMI) if importlib.util.find_spec("amdsmi") else None


def can_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


def gfx_name(version: int) -> str:
    """``gfx_target_version`` of the driver to the architecture name: 90402 is gfx942, 90500 is gfx950.

    The number is major * 10000 + minor * 100 + stepping; the name writes the stepping in hexadecimal.
    """
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


def find_devices(root: Path = KFD_ROOT) -> list[Device]:
    """One entry per GPU node of the topology: the quick look that every start can afford."""
    return [replace(gpu.device, name=f"AMD {gpu.device.arch}") for gpu in _kfd_gpus(root)[0]]


def probe(
    root: Path = Path("/"), *, amdsmi: AskAmdsmi = ask_amdsmi, openable: Callable[[Path], bool] = can_open
) -> Sequence[SourceReport]:
    """All sources of AMD devices, most trusted first."""
    bus = pci_report(root, "amd", VENDOR_ID, "AMD GPU")
    kfd = _read_kfd(root, openable)
    remedy = "sudo modprobe amdgpu"
    kfd = replace(kfd, findings=(*kfd.findings, *missing_driver("AMD", len(bus.gpus), len(kfd.gpus), remedy)))
    smi = _read_amdsmi(amdsmi)
    order = [gpu.device.pci for gpu in smi.gpus]
    places = [gpu.device.pci for gpu in kfd.gpus]
    if len(order) > 1 and order != places and sorted(order) == sorted(places):
        listing = ", ".join(f"{pci} is {order.index(pci)} and {number}" for number, pci in enumerate(places))
        text = f"amd-smi and HIP count the GPUs in different orders: {listing}"
        smi = replace(smi, findings=(Finding("devices.order", "info", text, "name GPUs by their UUID"),))
    return [kfd, smi, bus]


def _read_kfd(root: Path, openable: Callable[[Path], bool]) -> SourceReport:
    nodes = root / KFD_ROOT.relative_to("/")
    if not nodes.is_dir():
        missing = "no /dev/kfd" if not (root / "dev/kfd").exists() else "/dev/kfd without its topology tree"
        return SourceReport("kfd", "amd", "absent", f"{nodes} is not there ({missing})")
    gpus, hidden = _kfd_gpus(nodes)
    detail = str(nodes) + (f"; {hidden} nodes belong to others and cannot be read" if hidden else "")
    facts = {"rocm": (read_text(root / "opt/rocm/.info/version") or "").strip()}
    facts["amdgpu"] = (read_text(root / "sys/module/amdgpu/version") or "").strip()
    facts = {name: value for name, value in facts.items() if value}
    blocked, remedy, findings = "", "", ()
    device = root / "dev/kfd"
    if gpus and not device.exists():
        blocked, remedy = "/dev/kfd is not there", "docker run --device=/dev/kfd --device=/dev/dri ..."
    elif gpus and not openable(device):
        blocked, remedy = "/dev/kfd may not be opened by this user", "sudo usermod -aG render,video $USER"
    if blocked:
        text = f"{len(gpus)} AMD GPU(s) are seen and none is usable: {blocked}"
        findings = (Finding("devices.usable", "error", text, remedy),)
    return SourceReport("kfd", "amd", "ok", detail, tuple(gpus), facts, findings, blocked)


def _kfd_gpus(nodes: Path) -> tuple[list[Gpu], int]:
    """GPU nodes in the driver's order, and how many nodes could not be read (GPUs kept from a container)."""
    gpus: list[Gpu] = []
    hidden = 0
    folders = [path for path in nodes.glob("*") if path.name.isdecimal()]
    for folder in sorted(folders, key=lambda path: int(path.name)):
        text = read_text(folder / "properties")
        if text is None:
            hidden += 1
            continue
        fields = _fields(text)
        version = _number(fields, "gfx_target_version")
        # CPU nodes have version 0. Other vendors do not use this tree, and some drivers leave the id out.
        if version and fields.get("vendor_id", str(VENDOR_ID)) == str(VENDOR_ID):
            gpus.append(_kfd_gpu(folder, fields, gfx_name(version), len(gpus)))
    return gpus, hidden


def _kfd_gpu(folder: Path, fields: Mapping[str, str], arch: str, index: int) -> Gpu:
    location, unique = _number(fields, "location_id"), _number(fields, "unique_id")
    place = f"{_number(fields, 'domain'):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"
    banks = [_fields(read_text(path) or "") for path in folder.glob("mem_banks/*/properties")]
    memory = sum(_number(bank, "size_in_bytes") for bank in banks if bank.get("heap_type", _NO_HEAP) in _LOCAL_HEAPS)
    device = Device(
        vendor="amd",
        arch=arch,
        name="",
        source="detected",
        memory_bytes=memory,
        lds_bytes=_number(fields, "lds_size_in_kb") * 1024,
        compute_units=_number(fields, "simd_count") // max(_number(fields, "simd_per_cu"), 1),
        uuid=f"GPU-{unique:016x}" if unique else "",
        pci=place if location else "",
    )
    return Gpu(device, index, ("kfd",))


def _fields(text: str) -> dict[str, str]:
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _number(fields: Mapping[str, str], name: str) -> int:
    value = fields.get(name, "")
    return int(value) if value.isdecimal() else 0


def _read_amdsmi(ask: AskAmdsmi) -> SourceReport:
    answer = ask()
    if answer is None:
        return SourceReport("amdsmi", "amd", "absent", "the package amdsmi is not installed")
    if answer.error:
        return SourceReport("amdsmi", "amd", "failed", answer.error)
    try:
        # The library may print lines of its own before ours.
        entries: Any = json.loads(answer.text.strip().splitlines()[-1])
        gpus = [_amdsmi_gpu(entry, number) for number, entry in enumerate(entries)]
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        return SourceReport("amdsmi", "amd", "failed", f"its answer cannot be read: {type(exc).__name__}")
    return SourceReport("amdsmi", "amd", "ok", "the package amdsmi", tuple(gpus))


def _amdsmi_gpu(entry: Mapping[str, Any], index: int) -> Gpu:
    gfx = str(entry.get("gfx", ""))
    arch = gfx if re.fullmatch(r"gfx[0-9a-f]{3,4}", gfx) else UNKNOWN
    device = Device("amd", arch, str(entry.get("name") or ""), "detected", pci=pci_address(str(entry["pci"])))
    return Gpu(device, index, ("amdsmi",))
