"""Which platform a run takes where none is asked for, and which of this machine's GPUs it runs on. Without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from k3port.errors import PlanError
from k3port.oracle.detect import VENDOR_NAMES, Detection
from k3port.oracle.host import fitting_profiles
from k3port.oracle.profile import Profile, load_profiles
from k3port.oracle.spec import Device
from k3port.plugins import Registry
from k3port.runtime.platforms import platform_files

HOST = "cpu"


def torch_device(profile: Profile, detection: Detection) -> str:
    """The device of a run as torch names it: the first visible GPU of the platform's architecture.

    Torch calls GPUs of both vendors ``cuda``. A GPU whose architecture no source could tell counts.

    Raises:
        PlanError: no visible GPU can compute, or the installed PyTorch is built for something else.
    """
    if (shortage := detection.shortage(1, profile.vendor)) is not None:
        raise PlanError(shortage.text, hint=shortage.remedy)
    build = detection.torch
    own = "nvidia" if build.cuda else "amd" if build.hip else ""
    if build.version and own != profile.vendor:
        found = next((f for f in detection.findings if f.id == "devices.torch"), None)
        reason = found.text if found else f"PyTorch {build.version} is not built for {VENDOR_NAMES[profile.vendor]}"
        raise PlanError("PyTorch cannot use the GPU", reasons=[reason], hint=found.remedy if found else "k3port doctor")
    gpus = detection.usable(profile.vendor)
    fitting = [n for n, gpu in enumerate(gpus) if gpu.device.arch in (profile.arch, "unknown")]
    if not fitting:
        listing = ", ".join(gpu.label for gpu in gpus)
        raise PlanError(
            f"no visible GPU is {profile.arch}", reasons=[f"visible: {listing}"], hint="k3port doctor lists all GPUs"
        )
    return f"cuda:{fitting[0]}"


def device_memory(device: str, profile: Profile, detection: Detection) -> int:
    """Bytes of that GPU: what the platform says, or less where this one has less (a slice of a GPU, for instance)."""
    gpu = detection.usable(profile.vendor)[int(device.partition(":")[2])].device
    known = [size for size in (profile.memory_bytes, gpu.memory_bytes) if size]
    return min(known, default=0)


def recognised(registry: Registry, detection: Detection, files: Sequence[Path]) -> tuple[Profile | None, str]:
    """The platform of this machine's GPU, or why there is none to run on.

    Args:
        files: platform files beside those of plugins and settings.
    """
    usable = {vendor: detection.usable(vendor) for vendor in detection.vendors if detection.usable(vendor)}
    if len(usable) > 1:
        return None, "GPUs of two vendors: --platform NAME chooses"
    if not usable:
        hidden = [f"hidden by {because}" for because in detection.because.values() if because]
        return None, next(iter((*detection.blocked.values(), *hidden)), "k3port doctor looks closer")
    (gpus,) = usable.values()
    profiles = load_profiles(platform_files(files, registry=registry))
    fitting = fitting_profiles(gpus[0], profiles)
    if not fitting:
        return None, f"no platform is known for {gpus[0].device.arch}"
    return fitting[0], ""


def idle_gpus(devices: Iterable[Device], why: str = "") -> str:
    """One line about GPUs that nothing uses, or nothing where there are none."""
    counts = Counter[str]()
    for device in devices:
        if device.vendor != HOST:
            counts[VENDOR_NAMES[device.vendor]] += device.count
    if not counts:
        return ""
    listing = " and ".join(f"{count} {name}" for name, count in counts.items())
    noun = "GPU is" if counts.total() == 1 else "GPUs are"
    return f"{listing} {noun} present; running on cpu{f': {why}' if why else ''}"
