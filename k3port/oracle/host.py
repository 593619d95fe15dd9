"""Whether this machine is the platform that a run was asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from k3port.errors import PlanError
from k3port.oracle.profile import Profile
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
