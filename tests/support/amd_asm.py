"""Runs a few lines of AMD assembly in the emulator and gives back the waves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import amd_needs  # noqa: F401
import numpy as np

from k3port.testing.amd_isa.execute import Outcome, execute
from k3port.testing.amd_isa.memory import GlobalMemory
from k3port.testing.amd_isa.program import Program
from k3port.testing.amd_isa.wave import Wave

LANES = np.arange(64)


@dataclass
class Ran:
    """Waves after the end, and what the run reported."""

    waves: list[Wave]
    outcome: Outcome
    program: Program

    def v(self, i: int, t: Any = np.uint32, wave: int = 0) -> np.ndarray:
        """Vector register ``i`` (accumulation registers from 256)."""
        return self.waves[wave].V[i].view(t)

    def s(self, i: int) -> int:
        return self.waves[0].S[i]

    @property
    def scc(self) -> int:
        return self.waves[0].scc


def as_bits(x: Any) -> np.ndarray:
    """One number or 64 as 32-bit registers: float arrays by their bits, integers modulo 2**32."""
    a = np.asarray(x)
    if a.dtype.kind == "f":
        return np.broadcast_to(a.astype(np.float32).view(np.uint32), (64,))
    numbers = np.array([int(n) & 0xFFFFFFFF for n in a.reshape(-1)], np.uint32)
    return np.broadcast_to(numbers.reshape(a.shape), (64,))


def memory_of(**arrays: np.ndarray) -> GlobalMemory:
    memory = GlobalMemory()
    for name, a in arrays.items():
        memory.add(a.ctypes.data, a.nbytes, name)
    return memory


def run_asm(
    lines: str | Iterable[str],
    arch: str = "gfx942",
    *,
    v: Mapping[int, Any] | None = None,
    s: Mapping[int, int] | None = None,
    exec_mask: int = (1 << 64) - 1,
    scc: int = 0,
    setup: Callable[[Wave], None] | None = None,
    waves: int = 1,
    lds: int = 0,
    memory: GlobalMemory | None = None,
    source: str | None = None,
    settings: Mapping[str, int] | None = None,
    **kwargs: Any,
) -> Ran:
    """``v`` and ``s`` give registers their values; ``v`` through :func:`as_bits`. ``s_endpgm`` is added."""
    body = lines.splitlines() if isinstance(lines, str) else list(lines)
    text = [f'.file 1 "dir" "{source}"'] if source else []
    text += [f".amdhsa_{name} {value}" for name, value in (settings or {}).items()]
    text += ["kernel:", *([".loc 1 7 3"] if source else []), "s_nop 0", *body, "s_endpgm", ".Lfunc_end0:"]
    program = Program("\n".join(text), arch, "kernel", kwargs.pop("ulp_noise", False))
    seen: dict[int, Wave] = {}

    def trace(w: Wave, pc: int) -> None:
        if pc == 0 and w.wid not in seen:
            seen[w.wid] = w
            for i, x in (v or {}).items():
                w.V[i] = as_bits(x)
            for i, x in (s or {}).items():
                w.w32(i, x)
            w.scc = scc
            w.set_exec(exec_mask)
            if setup is not None:
                setup(w)

    outcome = execute(program, (1, 1, 1), waves, b"", memory or GlobalMemory(), lds, trace=trace, **kwargs)
    return Ran([seen[k] for k in range(waves)], outcome, program)
