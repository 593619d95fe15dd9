"""Control flow, waits, barriers, clocks and scalar loads (SOPP, SMEM of the CDNA3 ISA document).

Only the vector-memory part of s_waitcnt has an effect: direct-to-LDS copies land there. Everything else has happened
when its instruction was done.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import BARRIER, END, M64, VCC, EmuError, Step, nothing, sx, u32
from k3port.testing.amd_isa.mode import changed, register_part
from k3port.testing.amd_isa.operands import scalar32
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.wave import Wave

IGNORED = (
    "s_nop s_setprio s_sleep s_sethalt s_icache_inv s_dcache_inv s_dcache_wb s_inst_prefetch s_sendmsg s_ttracedata "
    "s_clause s_sched_barrier s_wakeup s_code_end"
).split()
"""Without effect here."""

_CONDITIONS: dict[str, Callable[[Wave], bool]] = {
    "scc0": lambda w: not w.scc,
    "scc1": lambda w: bool(w.scc),
    "execz": lambda w: w.ex == 0,
    "execnz": lambda w: w.ex != 0,
    "vccz": lambda w: w.r64(VCC) == 0,
    "vccnz": lambda w: w.r64(VCC) != 0,
}


def _label(target: Target, inst: Instruction) -> int:
    if inst.raw[0] not in target.labels:
        raise EmuError(f"no label {inst.raw[0]}")
    return target.labels[inst.raw[0]]


def _waitcnt(target: Target, inst: Instruction) -> Step:
    named = re.search(r"vmcnt\((\d+)\)", inst.text)
    if named:
        left = int(named[1])
    elif re.fullmatch(r"s_waitcnt (0x[0-9a-fA-F]+|\d+)", inst.text):
        v = int(inst.text.split()[1], 0)
        left = (v & 15) | ((v >> 14) & 3) << 4
    else:
        return nothing
    return lambda w: w.wait_vm(left)


def _branch(target: Target, inst: Instruction) -> Step:
    to = _label(target, inst)
    return lambda w: to


def _conditional(condition: Callable[[Wave], bool], target: Target, inst: Instruction) -> Step:
    to = _label(target, inst)
    return lambda w: to if condition(w) else None


def _load(words: int, buffer: bool, target: Target, inst: Instruction) -> Step:
    o, extra = inst.ops, inst.num("offset")
    dst, base, offset = o[0].index, o[1].index, scalar32(o[2])
    signed = o[2].kind == "imm"

    def step(w: Wave) -> None:
        a = w.r64(base) & 0xFFFFFFFFFFFF if buffer else w.r64(base)
        a += (sx(offset(w), 32) if signed else offset(w)) + extra
        v = w.glob.load_scalar(a & M64, 4 * words).copy().view(u32)
        for k in range(words):
            w.w32(dst + k, int(v[k]))

    return step


def _clock(target: Target, inst: Instruction) -> Step:
    """s_memtime: the number of instructions that this wave had run when it last met a barrier."""
    dst = inst.ops[0].index
    return lambda w: w.w64(dst, w.count)


def _getreg(target: Target, inst: Instruction) -> Step:
    """Of the MODE register; any other one (hardware identity, traps) reads zero."""
    dst = inst.ops[0].index
    if "MODE" not in inst.raw[1]:
        return lambda w: w.w32(dst, 0)
    first, mask = register_part(inst, 1)
    return lambda w: w.w32(dst, (w.mode >> first) & mask)


def _setreg(target: Target, inst: Instruction) -> Step:
    first, mask = register_part(inst, 0)
    value = scalar32(inst.ops[1])

    def step(w: Wave) -> None:
        w.mode = changed(w.mode, first, mask, value(w))

    return step


def _end(target: Target, inst: Instruction) -> Step:
    return lambda w: END


def _barrier(target: Target, inst: Instruction) -> Step:
    return lambda w: BARRIER


def _all_opcodes() -> dict[str, Builder]:
    found: dict[str, Builder] = {name: lambda target, inst: nothing for name in IGNORED}
    found |= {
        "s_endpgm": _end,
        "s_barrier": _barrier,
        "s_waitcnt": _waitcnt,
        "s_branch": _branch,
        "s_memtime": _clock,
        "s_memrealtime": _clock,
        "s_getreg_b32": _getreg,
        "s_setreg_b32": _setreg,
        "s_setreg_imm32_b32": _setreg,
    }
    found |= {f"s_cbranch_{name}": partial(_conditional, fn) for name, fn in _CONDITIONS.items()}
    for words in (1, 2, 4, 8, 16):
        name = "dword" if words == 1 else f"dwordx{words}"
        found[f"s_load_{name}"] = partial(_load, words, False)
        found[f"s_buffer_load_{name}"] = partial(_load, words, True)
    return found


FAMILY = Family(
    "control flow and scalar loads", _all_opcodes(), frozenset({"offset", "glc", "vmcnt", "lgkmcnt", "expcnt"})
)
