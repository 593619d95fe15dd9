"""The architectures that kernels are proved for without owning them. Without torch: a wrong name is told at once."""

from __future__ import annotations

import functools

from k3port.oracle.profile import load_profiles
from k3port.oracle.spec import Target

NVIDIA_TARGETS = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
AMD_TARGETS = ("gfx942", "gfx950", "gfx1250")
TPS = (1, 2, 4, 8, 16)
"""Ranks that the published Kimi K3 can be split over."""
TARGETS = (*NVIDIA_TARGETS, *AMD_TARGETS)
"""Architectures that kernels are compiled for."""
ISAS = ("gfx942", "gfx950")
"""Instruction sets that can be emulated."""


@functools.cache
def platform_target(arch: str) -> Target:
    """The first platform of ``platforms.yaml`` with this architecture, as the oracle sees it: whose limits count.

    Raises:
        ValueError: no platform has it, or the one that has it does not say its shared memory.
    """
    found = sorted((p for p in load_profiles().values() if p.arch == arch), key=lambda profile: profile.name)
    if not found:
        raise ValueError(f"no platform has the architecture {arch!r}; known: {', '.join(TARGETS)}")
    if not found[0].lds_bytes:
        raise ValueError(f"{found[0].name}: platforms.yaml does not say lds_bytes")
    return found[0].target()


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that one block (workgroup) may use.

    Raises:
        ValueError: as :func:`platform_target`.
    """
    return platform_target(arch).device.lds_bytes
