"""AMD devices from the kernel driver's topology tree (KFD): no library is loaded and no context is made."""

from __future__ import annotations

from pathlib import Path

from k3port.oracle.spec import Device

KFD_ROOT = Path("/sys/class/kfd/kfd/topology/nodes")


def gfx_name(version: int) -> str:
    """``gfx_target_version`` of the driver to the architecture name: 90402 is gfx942, 90500 is gfx950.

    The number is major * 10000 + minor * 100 + stepping; the name writes the stepping in hexadecimal.
    """
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


def find_devices(root: Path = KFD_ROOT) -> list[Device]:
    """One entry per GPU node of the topology; CPU nodes have gfx_target_version 0."""
    devices = []
    for node in sorted(root.glob("*/properties"), key=lambda p: int(p.parent.name)):
        pairs = (line.split() for line in node.read_text().splitlines())
        fields = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
        version = int(fields.get("gfx_target_version", "0"))
        if version:
            arch = gfx_name(version)
            devices.append(Device("amd", arch, f"AMD {arch}", "detected"))
    return devices
