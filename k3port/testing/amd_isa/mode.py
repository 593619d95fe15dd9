"""The MODE register: what s_setreg may set, and FP16_OVFL, which makes conversions saturate.

CDNA3 ISA document, "MODE register": rounding in bits 0-3, denormals in 4-7, DX10_CLAMP 8, IEEE 9, LOD_CLAMPED 10,
FP16_OVFL 23. Triton sets FP16_OVFL (and rounding of f16 to nearest) in kernels that convert to fp8. Rounding and
denormals have one setting here, so another one is an error, as is any other bit that would change a result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from k3port.testing.amd_isa.core import M32, Array, EmuError, f16
from k3port.testing.amd_isa.text import Instruction

ROUND, DENORM, DX10_CLAMP, IEEE, LOD_CLAMPED, FP16_OVFL = 0xF, 0xF0, 1 << 8, 1 << 9, 1 << 10, 1 << 23
START = DENORM | DX10_CLAMP | IEEE
"""Nearest even, denormals kept, clamp turns NaN into 0."""
_FREE = IEEE | LOD_CLAMPED | FP16_OVFL
_LARGEST = f16(65504)
_DIRECTIVES = {
    "float_round_mode_32": 0, "float_round_mode_16_64": 0, "float_denorm_mode_32": 3, "float_denorm_mode_16_64": 3,
    "dx10_clamp": 1,
}  # fmt: skip


def start_mode(settings: Mapping[str, int]) -> int:
    """MODE at the start of a kernel with these ``.amdhsa_`` directives.

    Raises:
        EmuError: they ask for a rounding or denormal mode that is not modelled.
    """
    for name, expected in _DIRECTIVES.items():
        if settings.get(name, expected) != expected:
            raise EmuError(f".amdhsa_{name} {settings[name]} is not modelled, {expected} is")
    return START | (FP16_OVFL if settings.get("fp16_overflow") else 0)


def register_part(inst: Instruction, k: int) -> tuple[int, int]:
    """(shift, mask of the width) of operand ``k``, ``hwreg(HW_REG_MODE[, first bit, bits])``.

    Raises:
        EmuError: it is another hardware register.
    """
    m = re.fullmatch(r"hwreg\(\s*(\w+)\s*(?:,\s*(\d+)\s*,\s*(\d+)\s*)?\)", inst.raw[k])
    if m is None or m[1] not in ("HW_REG_MODE", "1"):
        raise EmuError(f"hardware register {inst.raw[k]}")
    first, bits = (int(m[2]), int(m[3])) if m[2] else (0, 32)
    return first, (1 << bits) - 1


def changed(mode: int, first: int, mask: int, value: int) -> int:
    """MODE after a part of it was written.

    Raises:
        EmuError: a field other than FP16_OVFL, IEEE or LOD_CLAMPED is no longer as at the start.
    """
    new = (mode & ~(mask << first) & M32) | ((value & mask) << first)
    if (new ^ START) & ~_FREE:
        raise EmuError(f"MODE {new:#x}: rounding, denormals, clamp and traps have one setting here ({START:#x})")
    return new


def saturated16(r: Array, sources: Sequence[Array], pole_at_zero: bool = False) -> Array:
    """f16 results with FP16_OVFL set: an overflow becomes +-65504, an infinity that comes from one stays.

    ``pole_at_zero``: functions whose exact value at 0 is infinite.
    """
    r = np.asarray(r)
    over = np.isinf(r)
    if not over.any():
        return r
    for x in sources:
        if np.asarray(x).dtype.kind == "f":
            over = over & np.isfinite(x)
            if pole_at_zero:
                over = over & (x != 0)
    return np.where(over, np.copysign(_LARGEST, r), r)
