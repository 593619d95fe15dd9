"""Runs a program: workgroup after workgroup, in each the waves in turn from barrier to barrier."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from k3port.testing.amd_isa.core import BARRIER, LANES, M32, EmuError, Step
from k3port.testing.amd_isa.memory import GlobalMemory, LocalMemory
from k3port.testing.amd_isa.program import Program
from k3port.testing.amd_isa.wave import SCALAR_NAN, Wave

MAX_INSTRUCTIONS = 20_000_000
"""Per wave; a wave that runs longer is taken to hang."""
Trace = Callable[[Wave, int], None]
_PADDING = 64  # bytes behind the kernel arguments that a wide scalar load may touch


class HangError(EmuError):
    """A wave has run more instructions than allowed."""


@dataclass(frozen=True)
class Outcome:
    """``instructions`` of all waves, ``longest`` of one wave, ``races`` as text without repetition."""

    instructions: int
    longest: int
    races: tuple[str, ...]


def _user_registers(settings: Mapping[str, int], kernarg: int) -> list[int]:
    """The scalar registers that the launch fills, in the order of the kernel descriptor; then the workgroup's."""
    found: list[int] = []
    for name, values in (
        ("private_segment_buffer", [0] * 4), ("dispatch_ptr", [0, 0]), ("queue_ptr", [0, 0]),
        ("kernarg_segment_ptr", [kernarg & M32, kernarg >> 32]), ("dispatch_id", [0, 0]), ("flat_scratch_init", [0, 0]),
        ("private_segment_size", [0]),
    ):  # fmt: skip
        if settings.get(f"user_sgpr_{name}"):
            found += values
    # Preloaded arguments take the rest: the program begins with the code that loads them itself.
    return found + [SCALAR_NAN] * (settings.get("user_sgpr_count", len(found)) - len(found))


def execute(
    program: Program,
    grid: tuple[int, int, int],
    num_warps: int,
    kernarg: bytes,
    memory: GlobalMemory,
    lds_bytes: int,
    *,
    max_instructions: int = MAX_INSTRUCTIONS,
    trace: Trace | None = None,
    race_check: bool = True,
    code: Sequence[Step] | None = None,
) -> Outcome:
    """Runs all workgroups of a grid.

    ``code`` replaces the program's steps (mutants); ``trace`` is called after each instruction with the wave and the
    number of the instruction.

    Raises:
        EmuError: with the workgroup, the wave, the instruction and its source line.
    """
    buffer = ctypes.create_string_buffer(kernarg + b"\0" * _PADDING, len(kernarg) + _PADDING)
    pointer = ctypes.addressof(buffer)
    memory.add(pointer, len(buffer), "the kernel arguments")
    settings = program.kernel.settings
    user = _user_registers(settings, pointer)
    axes = [k for k, name in enumerate("xyz") if settings.get(f"system_sgpr_workgroup_id_{name}")]
    scratch = settings.get("private_segment_fixed_size", 0)
    size = max(lds_bytes, settings.get("group_segment_fixed_size", 0))
    run = _Runner(code or program.code, program, max_instructions, trace)
    races: dict[str, None] = {}
    with np.errstate(all="ignore"):
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    run.group = (x, y, z)
                    lds = LocalMemory(size, race_check, num_warps == 1)
                    registers = [*user, *[run.group[k] for k in axes]]
                    waves = [Wave(program, k, lds, memory, scratch, registers) for k in range(num_warps)]
                    run.workgroup(waves, lds)
                    races |= dict.fromkeys(lds.races)
    return Outcome(run.total, run.longest, tuple(races))


class _Runner:
    def __init__(self, code: Sequence[Step], program: Program, limit: int, trace: Trace | None):
        self.code, self.program, self.limit, self.trace = code, program, limit, trace
        self.group: tuple[int, int, int] = (0, 0, 0)
        self.total = self.longest = 0

    def workgroup(self, waves: list[Wave], lds: LocalMemory) -> None:
        """A wave that has ended no longer takes part in barriers."""
        for w in waves:
            w.V[0] = w.wid * 64 + LANES
        alive = waves
        while alive:
            alive = [w for w in alive if self.interval(w)]
            lds.barrier()
        for w in waves:
            self.total += w.count
            self.longest = max(self.longest, w.count)

    def interval(self, w: Wave) -> bool:
        """Runs a wave to its next barrier (True) or its end (False)."""
        code, trace, pc, n = self.code, self.trace, w.pc, 0
        left = self.limit - w.count
        try:
            while True:
                w.pc = pc
                r = code[pc](w)
                n += 1
                if trace is not None:
                    trace(w, pc)
                if r is None:
                    pc += 1
                elif r >= 0:
                    pc = r
                    if n > left:
                        raise HangError(f"more than {self.limit} instructions (endless loop?)")
                elif r == BARRIER:
                    w.pc = pc + 1
                    if n > left:
                        raise HangError(f"more than {self.limit} instructions (endless loop?)")
                    return True
                else:
                    w.wait_vm(0)
                    return False
        except Exception as e:
            kind = HangError if isinstance(e, HangError) else EmuError
            where = f"workgroup {self.group} wave {w.wid} at {self.program.describe(pc)}"
            raise kind(f"{where}: {e if isinstance(e, EmuError) else repr(e)}") from e
        finally:
            w.count += n
