"""GPUs that are in the machine while the run goes to the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from k3port.oracle.spec import Device

_VENDORS = {"nvidia": "NVIDIA", "amd": "AMD"}


def idle_gpus(devices: Iterable[Device]) -> str:
    """One line about GPUs that nothing uses, or nothing where there are none."""
    counts: Counter[str] = Counter()
    for device in devices:
        if device.vendor in _VENDORS:
            counts[device.vendor] += device.count
    if not counts:
        return ""
    total = sum(counts.values())
    listing = " and ".join(f"{count} {_VENDORS[vendor]}" for vendor, count in counts.items())
    noun = "GPU is" if total == 1 else "GPUs are"
    return f"{listing} {noun} present; no GPU kernels in this version: running on cpu"
