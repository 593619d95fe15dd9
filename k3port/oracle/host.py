"""Whether this machine is the platform that a run was asked for, and which platforms a GPU can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from k3port.errors import PlanError
from k3port.oracle.profile import Profile, normalise
from k3port.oracle.sources import Gpu
from k3port.oracle.spec import Device

_UNKNOWN = "unknown"


def is_here(profile: Profile, devices: Iterable[Device]) -> bool:
    """Whether a device of the profile's architecture is among those that were detected; a CPU always is.

    The architecture decides, since product names are only labels. A device of that vendor whose architecture no
    source could tell counts: what is not known must not stop a run.
    """
    if profile.vendor == "cpu":
        return True
    return any(d.vendor == profile.vendor and d.arch in (profile.arch, _UNKNOWN) for d in devices)


def describe(devices: Iterable[Device]) -> str:
    """``8 x AMD Instinct MI325X (gfx942)``, or that there is no GPU."""
    counts: Counter[tuple[str, str]] = Counter()
    for device in devices:
        if device.vendor != "cpu":
            counts[device.name, device.arch] += device.count
    listing = [f"{count} x {name} ({arch})" for (name, arch), count in counts.items()]
    return ", ".join(listing) or "no GPU"


def require_host(profile: Profile, devices: Iterable[Device]) -> None:
    """Refuses to run for a platform that this machine is not.

    Raises:
        PlanError: no device of the platform is here; says what was found and how to ask without running.
    """
    found = list(devices)
    if not is_here(profile, found):
        raise PlanError(
            f"this machine is not {profile.name}",
            reasons=[f"it needs {profile.product or profile.name} ({profile.arch}), found: {describe(found)}"],
            hint=f"k3port plan --platform {profile.name} answers without the hardware; --platform cpu runs here",
        )


def fitting_profiles(gpu: Gpu, profiles: Mapping[str, Profile]) -> list[Profile]:
    """Platforms of a GPU's architecture. Name and memory only tell apart those that share it."""
    device = gpu.device
    same = [p for p in profiles.values() if (p.vendor, p.arch) == (device.vendor, device.arch)]
    name = normalise(device.name)
    named = [p for p in same if any(normalise(text) in name for text in (p.name, *p.aliases))]
    if named:
        # "H200" is in the name of an H200 NVL too: the longest match says most.
        return [max(named, key=lambda p: max(len(t) for t in (p.name, *p.aliases) if normalise(t) in name))]
    near = [p for p in same if device.memory_bytes and abs(p.memory_bytes / device.memory_bytes - 1) < 0.1]
    return sorted(near or same, key=lambda p: p.name)
