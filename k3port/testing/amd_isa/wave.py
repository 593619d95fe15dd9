"""The state of one wave: registers, EXEC, the outstanding memory operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from k3port.testing.amd_isa.core import M32, M64, WAVE_SIZE, f32, int2mask, u8, u32
from k3port.testing.amd_isa.mode import FP16_OVFL

if TYPE_CHECKING:
    from k3port.testing.amd_isa.memory import GlobalMemory, LocalMemory
    from k3port.testing.amd_isa.program import Program

VECTOR_NAN, SCALAR_NAN = 0x7FE17FE1, 0x7FE1BEEF
"""What registers hold before they are written: a NaN in f32, and a large address or loop bound as an integer; vector
registers a NaN in both halves as f16 and bf16 too."""

_U32 = np.dtype(u32)


class Wave:
    """One wave of 64 lanes.

    ``V`` holds the vector registers (rows 0-255) and the accumulation registers (256-511) as u32, ``VF`` the same as
    f32; ``S`` the scalar registers with VCC and M0; EXEC is kept apart (``ex``, as booleans ``exm``).
    """

    __slots__ = (
        "S",
        "V",
        "VF",
        "count",
        "ex",
        "exm",
        "full",
        "glob",
        "lds",
        "mode",
        "pc",
        "program",
        "scc",
        "scratch",
        "vmq",
        "wid",
    )  # fmt: skip

    def __init__(
        self, program: Program, wid: int, lds: LocalMemory, glob: GlobalMemory, scratch_bytes: int, user: Sequence[int]
    ):
        self.program, self.wid, self.lds, self.glob = program, wid, lds, glob
        self.V = np.full((512, WAVE_SIZE), VECTOR_NAN, u32)
        self.VF = self.V.view(f32)
        self.S = [*user, *[SCALAR_NAN] * (128 - len(user))]
        self.scc, self.pc, self.count, self.mode = 0, 0, 0, program.mode
        self.set_exec(M64)
        self.scratch = np.full((WAVE_SIZE, scratch_bytes), 0xFF, u8)
        self.vmq: list[Callable[[], None] | None] = []
        """Outstanding vector memory operations, oldest first: None, or a write to LDS that has not landed."""

    def set_exec(self, x: int) -> None:
        self.ex, self.full, self.exm = x, x == M64, int2mask(x)

    @property
    def saturates(self) -> bool:
        """FP16_OVFL of the MODE register."""
        return bool(self.mode & FP16_OVFL)

    def where(self) -> str:
        return self.program.describe(self.pc)

    def wait_vm(self, n: int) -> None:
        """``s_waitcnt vmcnt(n)``: all but the youngest ``n`` operations are done."""
        while len(self.vmq) > n:
            landing = self.vmq.pop(0)
            if landing is not None:
                landing()

    def r32(self, i: int) -> int:
        if i < 126:
            return self.S[i]
        return self.ex & M32 if i == 126 else self.ex >> 32

    def r64(self, i: int) -> int:
        return self.ex if i == 126 else self.S[i] | (self.S[i + 1] << 32)

    def w32(self, i: int, x: int) -> None:
        if i < 126:
            self.S[i] = x & M32
        elif i == 126:
            self.set_exec((self.ex & ~M32) | (x & M32))
        else:
            self.set_exec((self.ex & M32) | ((x & M32) << 32))

    def w64(self, i: int, x: int) -> None:
        if i == 126:
            self.set_exec(x & M64)
        else:
            self.S[i], self.S[i + 1] = x & M32, (x >> 32) & M32

    def active(self, i: int) -> np.ndarray:
        """The active lanes of one vector register; of all lanes the register itself."""
        return self.V[i] if self.full else self.V[i][self.exm]

    def put(self, i: int, val: Any, mask: np.ndarray | None = None) -> None:
        """Write one vector register, under EXEC or another mask: 32-bit numbers, or one for all lanes."""
        if val.dtype is not _U32:
            val = val.view(u32)
        if mask is not None:
            np.copyto(self.V[i], val, where=mask)
        elif self.full:
            self.V[i] = val
        else:
            np.copyto(self.V[i], val, where=self.exm)
