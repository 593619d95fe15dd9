"""What a compute unit of each AMD architecture offers, and how many waves that leaves room for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeUnit:
    """What limits the waves of an AMD compute unit.

    Attributes:
        wave: lanes of a wave.
        simds: SIMDs per unit.
        vgprs: vector registers of one lane's slice of a SIMD, arch and accumulation registers together.
        vgpr_granule: registers are given out in such steps.
        max_waves: waves per SIMD at most.
        lds_bytes, lds_granule: LDS per unit, and the step it is given out in.
        max_workgroups: of more than one wave each, per unit (barriers).
    """

    wave: int
    simds: int
    vgprs: int
    vgpr_granule: int
    max_waves: int
    lds_bytes: int
    lds_granule: int
    max_workgroups: int


# Register files, granules and wave counts as LLVM's AMDGPU back end has them (AMDGPUBaseInfo, class IsaInfo); tests
# compare the register part with the occupancy that the compiler writes into its assembly. For gfx1250 the LDS granule
# and the numbers of SIMDs and workgroups are assumptions; no document on them was at hand.
COMPUTE_UNITS = {
    "gfx942": ComputeUnit(64, 4, 512, 8, 8, 65536, 512, 16),
    "gfx950": ComputeUnit(64, 4, 512, 8, 8, 163840, 1280, 16),
    "gfx1250": ComputeUnit(32, 4, 1024, 16, 16, 327680, 2048, 32),
}


def register_waves(unit: ComputeUnit, vgprs: int) -> int:
    """Waves per SIMD that the vector registers leave room for: ``min(max, file // round_up(vgprs, granule))``."""
    used = -(-max(vgprs, 1) // unit.vgpr_granule) * unit.vgpr_granule
    return max(1, min(unit.max_waves, unit.vgprs // used))


def waves_per_simd(arch: str, vgprs: int, shared: int, num_warps: int) -> int:
    """Waves that one SIMD can hold at once: the least of what registers, LDS and barriers allow, at least 1.

    LDS and barriers bound whole workgroups: ``groups x num_warps`` waves on the unit, spread over its SIMDs and rounded
    up. 0 where even one workgroup needs more LDS than there is.

    Args:
        vgprs: vector registers of a wave, arch and accumulation registers together (the metadata's ``vgpr_count``).
        shared: LDS bytes of a workgroup.
    """
    unit = COMPUTE_UNITS[arch]
    waves = register_waves(unit, vgprs)
    groups = unit.max_workgroups if num_warps > 1 else unit.max_waves * unit.simds
    if shared:
        groups = min(groups, unit.lds_bytes // (-(-shared // unit.lds_granule) * unit.lds_granule))
    return min(waves, -(-groups * num_warps // unit.simds))
