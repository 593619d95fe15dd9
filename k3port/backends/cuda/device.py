"""NVIDIA devices from the kernel driver's process files: no library is loaded and no context is made."""

from __future__ import annotations

from pathlib import Path

from k3port.oracle.spec import Device

DRIVER_ROOT = Path("/proc/driver/nvidia/gpus")


def find_devices(root: Path = DRIVER_ROOT) -> list[Device]:
    """One entry per GPU that the driver lists. The architecture is not in these files, so it stays ``unknown``."""
    devices = []
    for info in sorted(root.glob("*/information")):
        pairs = (line.partition(":") for line in info.read_text().splitlines())
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        devices.append(Device("nvidia", "unknown", fields.get("Model", "NVIDIA GPU"), "detected"))
    return devices
