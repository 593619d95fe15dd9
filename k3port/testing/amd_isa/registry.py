"""All opcodes: the one place where families meet."""

from __future__ import annotations

from collections.abc import Iterable

from k3port.testing.amd_isa import (
    buffer_memory,
    compare,
    conversions,
    crosslane,
    division,
    global_memory,
    lds,
    mfma,
    packed,
    scalar,
    scalar_control,
    select,
    small_floats,
    vector_float,
    vector_int,
)  # fmt: skip
from k3port.testing.amd_isa.build import Family, Target
from k3port.testing.amd_isa.core import EmuError, Step
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.wave import Wave

_MODULES = (
    scalar, scalar_control, vector_int, vector_float, conversions, division, compare, select, packed, crosslane,
    small_floats, mfma, global_memory, buffer_memory, lds,
)  # fmt: skip
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in _MODULES)


def merged(families: Iterable[Family]) -> dict[str, Family]:
    """Opcode -> family.

    Raises:
        ValueError: two families claim one opcode.
    """
    found: dict[str, Family] = {}
    for family in families:
        for name in family.opcodes:
            if name in found:
                raise ValueError(f"{name} is in two families: {found[name].name}, {family.name}")
            found[name] = family
    return found


OPCODES = merged(FAMILIES)


def translate(target: Target, inst: Instruction) -> Step:
    """The step of an instruction.

    Raises:
        EmuError: opcode, modifier or operand is not modelled.
    """
    family = OPCODES.get(inst.base)
    if family is None:
        raise EmuError(f"opcode {inst.base} is not modelled")
    foreign = sorted({key.partition("(")[0] for key in inst.mods} - family.modifiers)
    if foreign:
        raise EmuError(f"modifier {foreign[0]} of {inst.base} is not modelled")
    try:
        return family.opcodes[inst.base](target, inst)
    except (IndexError, KeyError, ValueError) as e:
        raise EmuError(f"the operands of {inst.base} are not modelled ({e!r})") from e


def refusal(inst: Instruction, why: EmuError) -> Step:
    """A step that raises: code that is never reached may contain what is not modelled."""

    def step(w: Wave) -> None:
        raise EmuError(f"not modelled: {inst} - {why}")

    return step
