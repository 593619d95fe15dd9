"""A kernel translated into steps, one function per instruction."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from k3port.testing.amd_isa.build import Target
from k3port.testing.amd_isa.core import EmuError, Step
from k3port.testing.amd_isa.mode import start_mode
from k3port.testing.amd_isa.registry import refusal, translate
from k3port.testing.amd_isa.text import KernelText, parse_kernel


class Program:
    """The steps of one kernel for one architecture.

    ``unknown`` maps opcodes that are not modelled to the text of their first use and the reason; reaching one of them
    raises :class:`EmuError`. ``digest`` tells programs apart.
    """

    def __init__(self, text: str, arch: str, name: str | None = None, ulp_noise: bool = False):
        self.kernel: KernelText = parse_kernel(text, name)
        if not self.kernel.instructions:
            raise EmuError(f"no instructions of kernel {self.kernel.name!r} in the assembly text")
        self.arch, self.name, self.mode = arch, self.kernel.name, start_mode(self.kernel.settings)
        self.digest = hashlib.sha256(f"{arch} {ulp_noise}\n{text}".encode()).hexdigest()
        target = Target(arch, ulp_noise, self.kernel.labels)
        self.code: list[Step] = []
        unknown: dict[str, str] = {}
        for inst in self.kernel.instructions:
            try:
                self.code.append(translate(target, inst))
            except EmuError as e:
                unknown.setdefault(inst.op, f"{inst}: {e}")
                self.code.append(refusal(inst, e))
        self.unknown: Mapping[str, str] = unknown

    def describe(self, pc: int) -> str:
        """Number, text and source line of an instruction."""
        if not 0 <= pc < len(self.code):
            return f"[{pc}] beyond the end of {self.name}"
        return f"[{pc}] {self.kernel.instructions[pc]}"
