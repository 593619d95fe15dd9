"""What translating one instruction may depend on, and the form of a family of opcodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from k3port.testing.amd_isa.core import EmuError, Step
from k3port.testing.amd_isa.formats import BF8_FNUZ, BF8_OCP, FP8_FNUZ, FP8_OCP, MiniFloat
from k3port.testing.amd_isa.text import Instruction

ARCHS = ("gfx942", "gfx950")


@dataclass(frozen=True)
class Target:
    """For what a kernel is translated."""

    arch: str
    ulp_noise: bool = False
    """Reciprocal, root, exp2, log2, sin and cos have an error of up to one ulp, as hardware may."""
    labels: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise EmuError(f"no emulation of {self.arch}; there are {', '.join(ARCHS)}")

    @property
    def fp8(self) -> MiniFloat:
        return FP8_OCP if self.arch == "gfx950" else FP8_FNUZ

    @property
    def bf8(self) -> MiniFloat:
        return BF8_OCP if self.arch == "gfx950" else BF8_FNUZ


Builder = Callable[[Target, Instruction], Step]


@dataclass(frozen=True)
class Family:
    """Opcodes that belong together and the modifiers that they understand; another modifier is an error."""

    name: str
    opcodes: Mapping[str, Builder]
    modifiers: frozenset[str] = frozenset()
