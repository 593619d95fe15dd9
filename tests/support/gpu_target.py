"""The GPU of this machine as a target of the oracle, or why there is none."""

from __future__ import annotations

import torch

from k3port.oracle.packages import host_versions, needed_packages
from k3port.oracle.profile import load_profiles
from k3port.oracle.spec import KernelSpec, Target


def gpu_arch() -> str:
    """``sm_90``, ``gfx950``; empty where torch sees no GPU."""
    if not torch.cuda.is_available():
        return ""
    properties = torch.cuda.get_device_properties(0)
    amd = getattr(properties, "gcnArchName", "")
    return amd.split(":", 1)[0] if amd.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def gpu_target(kernels: tuple[KernelSpec, ...]) -> Target | None:
    """The profile of this architecture with the versions that are installed here; None where there is no such GPU."""
    arch = gpu_arch()
    profile = next((p for p in load_profiles().values() if p.arch == arch), None)
    if profile is None:
        return None
    names = needed_packages(kernels) | set(profile.packages)
    return profile.target(host_versions(names), "host")
