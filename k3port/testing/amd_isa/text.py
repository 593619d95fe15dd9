"""Reads the assembly text of a kernel: instructions with operands and modifiers, labels, source lines, metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

import numpy as np

from k3port.testing.amd_isa.core import ACCUMULATION_BASE, EXEC, M0, VCC

ENCODINGS = ("_e32", "_e64_dpp", "_e64", "_dpp", "_sdwa")
_INV_2PI = 0.15915494309189532
_SPECIAL = {
    "vcc": (VCC, 2), "vcc_lo": (VCC, 1), "vcc_hi": (VCC + 1, 1), "exec": (EXEC, 2), "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1), "m0": (M0, 1), "flat_scratch": (102, 2), "flat_scratch_lo": (102, 1),
    "flat_scratch_hi": (103, 1), "xnack_mask": (104, 2),
}  # fmt: skip


@dataclass
class Operand:
    """One operand. ``kind``: v (vector; accumulation registers from 256), s (scalar), imm, scc, off, null, sym."""

    text: str
    kind: str = "sym"
    index: int = 0
    count: int = 1
    value: int | float | str | None = None
    neg: bool = False
    abs: bool = False
    sext: bool = False

    def shifted(self, k: int) -> Operand:
        """The register ``k`` further; an immediate stays."""
        return self if self.kind == "imm" else replace(self, index=self.index + k)


def parse_operand(text: str) -> Operand:
    o = Operand(text)
    t = text.strip()
    if re.match(r"^-(v|s|a|\||abs|vcc|neg|exec|m0)", t):
        o.neg, t = True, t[1:]
    if m := re.match(r"^neg\((.*)\)$", t):
        o.neg, t = True, m[1]
    if (m := re.match(r"^\|(.*)\|$", t)) or (m := re.match(r"^abs\((.*)\)$", t)):
        o.abs, t = True, m[1]
    if m := re.match(r"^sext\((.*)\)$", t):
        o.sext, t = True, m[1]
    if m := re.match(r"^([vsa])(\d+)$", t):
        o.kind, o.index = m[1], int(m[2])
    elif m := re.match(r"^([vsa])\[(\d+):(\d+)\]$", t):
        o.kind, o.index, o.count = m[1], int(m[2]), int(m[3]) - int(m[2]) + 1
    elif m := re.match(r"^([vsa])\[(\d+)\]$", t):
        o.kind, o.index = m[1], int(m[2])
    elif t in _SPECIAL:
        o.kind = "s"
        o.index, o.count = _SPECIAL[t]
    elif t in ("off", "null"):
        o.kind = t
    elif t in ("scc", "src_scc"):
        o.kind = "scc"
    elif re.match(r"^-?(0x[0-9a-fA-F]+|\d+)$", t):
        o.kind, o.value = "imm", int(t, 0)
    elif re.match(r"^-?\d+\.\d*(e[+-]?\d+)?$", t):
        # 1 / (2 pi) is an inline constant that the text gives with fewer digits than the register gets
        v = float(t)
        o.kind, o.value = "imm", float(np.copysign(_INV_2PI, v)) if "0.15915494" in t else v
    else:
        o.value = t
    if o.kind == "a":
        o.kind, o.index = "v", o.index + ACCUMULATION_BASE
    return o


def split_operands(s: str) -> list[str]:
    """Splits at commas outside of brackets."""
    out, depth, current = [], 0, ""
    for c in s:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += c
    return [*out, current.strip()] if current.strip() else out


class Instruction:
    """One line of assembly.

    ``op`` is the mnemonic, ``base`` the same without the encoding suffix, ``enc`` that suffix (``e64``, ``dpp``,
    ``sdwa``, ...); ``mods`` are the modifiers behind the operands; ``source`` is ``file.py:line``.
    """

    def __init__(self, text: str, source: str = ""):
        self.text, self.source = text, source
        self.op, _, rest = text.partition(" ")
        self.mods: dict[str, str] = {}
        self.raw: list[str] = []
        for piece in split_operands(rest.strip()):
            words = re.findall(r"\S+\([^)]*\)|\S+\[[^\]]*\]\|?|\S+", piece)
            self.raw.append(words[0])
            for word in words[1:]:
                key, _, value = word.partition(":")
                self.mods[key] = value
        self.ops = [parse_operand(t) for t in self.raw]
        self.base, self.enc = self.op, ""
        for suffix in ENCODINGS:
            if self.op.endswith(suffix):
                self.base, self.enc = self.op[: -len(suffix)], suffix[1:]
                break

    def bits(self, key: str, n: int, default: int) -> list[int]:
        """A modifier that is a list of bits, such as ``op_sel:[0,1]``; absent ones are ``default``."""
        v = self.mods.get(key)
        if v is None:
            return [default] * n
        given = [int(x) for x in v.strip("[]").split(",")]
        return given + [default] * (n - len(given))

    def num(self, key: str, default: int = 0) -> int:
        """A modifier that is a number, such as ``offset:16``."""
        v = self.mods.get(key)
        return default if v in (None, "") else int(v, 0)

    def __str__(self) -> str:
        return f"{self.text} ({self.source})" if self.source else self.text


@dataclass(frozen=True)
class KernelText:
    """What the assembly text of one kernel says.

    ``labels`` map to instruction numbers, ``settings`` are the ``.amdhsa_`` directives, ``args`` the
    (offset, size, kind) of the kernel arguments.
    """

    name: str
    instructions: list[Instruction]
    labels: Mapping[str, int]
    settings: Mapping[str, int]
    args: list[tuple[int, int, str]] = field(default_factory=list)


def _arguments(text: str) -> list[tuple[int, int, str]]:
    """(offset, size, kind) of the kernel arguments, from the metadata note."""
    part = text.split(".amdgpu_metadata", 1)[-1].split(".args:", 1)
    if len(part) < 2:
        return []
    found: list[dict[str, str]] = [{}]
    for line in part[1].split("\n"):
        if re.match(r"^    \.\w", line):
            break
        if re.match(r"^\s+- ", line) and found[-1]:
            found.append({})
        if m := re.match(r"^\s+-?\s*\.(\w+):\s*(\S+)", line):
            found[-1][m[1]] = m[2]
    return [(int(a["offset"]), int(a["size"]), a.get("value_kind", "")) for a in found if "offset" in a]


def parse_kernel(text: str, name: str | None = None) -> KernelText:
    """The kernel called ``name``, or the first one, of an assembly text; source lines come from ``.loc``."""
    settings = {
        key: int(value, 0)
        for key, value in re.findall(r"^\s*\.amdhsa_(\w+)\s+(\S+)", text, re.MULTILINE)
        if re.match(r"^-?(0x)?[0-9a-fA-F]+$", value)
    }
    declared = re.search(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.MULTILINE)
    files = {
        number: PurePosixPath(path).name
        for number, path in re.findall(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"', text, re.MULTILINE)
    }
    name = name or (str(declared[1]) if declared else "")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source, inside = "", not name
    for raw in text.split("\n"):
        line = re.split(r";|//", raw, maxsplit=1)[0].strip()
        if not line:
            continue
        if not inside:
            inside = line == f"{name}:"
        elif line.startswith((".Lfunc_end", ".section\t.rodata")):
            break
        elif m := re.match(r"^([.\w$]+):$", line):
            labels[m[1]] = len(instructions)
        elif line.startswith(".loc"):
            _, number, row = line.split()[:3]
            if row != "0":  # line 0 is code of the compiler's own: it stays with the line before
                source = f"{files.get(number, 'line')}:{row}"
        elif not line.startswith("."):
            instructions.append(Instruction(" ".join(line.split(None, 1)), source))
    return KernelText(name, instructions, labels, settings, _arguments(text))
