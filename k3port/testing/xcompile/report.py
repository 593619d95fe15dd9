"""What cross-compilation found: one row per kernel, target, ranks, configuration and jit function; JSON and tables."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3port.testing.xcompile.compiler import Compiled
from k3port.testing.xcompile.measure import Resources

REPORT_VERSION = 2
CHOSEN = "chosen"
"""Name of the configuration that a launch takes by itself."""


@dataclass(frozen=True)
class CompileRow:
    """One compiled launch, or the failure to get one.

    Attributes:
        kernel: name of the kernel's record.
        jit: name of the jit function; empty where the host code failed before a launch.
        config: ``chosen``, or ``name: option=value ...`` of a configuration that was forced.
        case: the production calls that lead to this very launch.
        compiled: None where the host code failed; ``error`` then says why.
        limit: bytes of shared memory that a block may use on the target.
        cached: whether the result was on disk.
    """

    kernel: str
    jit: str
    target: str
    tp: int
    config: str
    case: str
    compiled: Compiled | None
    error: str
    limit: int
    cached: bool = False

    @property
    def where(self) -> str:
        return f"{self.kernel}{f' ({self.jit})' if self.jit else ''} on {self.target}, tp {self.tp}, {self.config}"

    @property
    def shared(self) -> int:
        return self.compiled.shared if self.compiled else 0

    @property
    def resources(self) -> Resources | None:
        return self.compiled.resources if self.compiled else None

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.compiled.warnings if self.compiled else ()

    @property
    def seconds(self) -> float:
        return self.compiled.seconds if self.compiled else 0.0

    @property
    def problems(self) -> tuple[str, ...]:
        """Why this row is a fault: no code, too much shared memory, an 8-bit float that the target does not have."""
        found = [text for text in (self.error, self.compiled.error if self.compiled else "") if text]
        if self.shared > self.limit:
            found.append(f"{self.shared} bytes of shared memory, the limit of {self.target} is {self.limit}")
        said = [f"warning about fp8: {text}" for text in self.warnings if "fp8" in text.lower()]
        found += said
        if not said and self.compiled is not None:
            found += [
                f"tl.dot of {kind}: {self.target} has no matrix instruction for this flavour here; it is widened"
                for kind in self.compiled.widened
            ]
        return tuple(found)

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class CompileReport:
    """All rows.

    Attributes:
        silent: ``kernel on target, tp n`` where its host code was called and launched nothing in Triton.
        left_out: ``kernel on target, tp n: reason`` where the kernel's own record refuses the call.
        triton: version of Triton.
    """

    rows: tuple[CompileRow, ...]
    silent: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    triton: str = ""

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence each, with kernel, target, ranks, configuration and the call."""
        return tuple(f"{row.where} ({_first(row.case)}): {text}" for row in self.rows for text in row.problems)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings that are no faults."""
        found = (f"{row.where}: {text}" for row in self.rows for text in row.warnings if "fp8" not in text.lower())
        return tuple(dict.fromkeys(found))

    @property
    def spilling(self) -> tuple[CompileRow, ...]:
        """Rows whose code spills registers: slow, but no fault."""
        return tuple(row for row in self.rows if (r := row.resources) is not None and r.spills + r.scalar_spills)

    def to_dict(self) -> dict[str, Any]:
        return {"version": REPORT_VERSION, "faults": list(self.faults), **dataclasses.asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> CompileReport:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: no report, or another version.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != REPORT_VERSION:
            raise ValueError(f"not a compile report of version {REPORT_VERSION}")
        return cls(tuple(map(_row_from, data["rows"])), tuple(data["silent"]), tuple(data["left_out"]), data["triton"])

    def lines(self) -> list[str]:
        """The report in Markdown: faults first, then a table per vendor, then warnings and what was left out."""
        compiled = [row for row in self.rows if row.compiled and not row.compiled.error]
        lines = [
            f"{len(compiled)} of {len(self.rows)} compiled by Triton {self.triton}, "
            f"{sum(row.cached for row in self.rows)} from the cache, {len(self.faults)} faults, "
            f"{len(self.spilling)} spill; {sum(row.seconds for row in self.rows if not row.cached):.0f} s of compiling."
        ]
        for title, found in (("Faults:", self.faults), ("Warnings:", self.warnings)):
            if found:
                lines += ["", title, "", *(f"- {_one_line(text)}" for text in found)]
        amd = [row for row in compiled if row.target.startswith("gfx")]
        nvidia = [row for row in compiled if not row.target.startswith("gfx")]
        if amd:
            lines += ["", *_table(AMD_HEAD, map(_amd_cells, amd))]
        if nvidia:
            lines += ["", *_table(NVIDIA_HEAD, map(_nvidia_cells, nvidia))]
        if self.silent:
            lines += ["", f"No Triton launch: {'; '.join(self.silent)}."]
        if self.left_out:
            lines += ["", "Left out, the record refuses the call:", "", *(f"- {text}" for text in self.left_out)]
        return lines


def _row_from(item: Mapping[str, Any]) -> CompileRow:
    compiled = item["compiled"]
    return CompileRow(**{**item, "compiled": None if compiled is None else Compiled.from_dict(compiled)})


_HEAD = ("kernel", "jit function", "target", "tp", "configuration", "call", "shared / limit")
AMD_HEAD = (*_HEAD, "VGPRs", "AGPRs", "SGPRs", "spills", "scratch", "waves/SIMD", "matrix", "loads")
NVIDIA_HEAD = (*_HEAD, "registers", "spill bytes", "stack", "matrix", "loads")


def _cells(row: CompileRow) -> tuple[str, ...]:
    shared = f"{row.shared} / {row.limit}"
    return (row.kernel, row.jit, row.target, str(row.tp), row.config, row.case.partition("; ")[0], shared)


def _amd_cells(row: CompileRow) -> tuple[str, ...]:
    found = row.resources
    assert found is not None
    vector = f"{found.spills} + {found.scalar_spills} s" if found.scalar_spills else str(found.spills)
    numbers = (found.registers, found.accumulators, found.scalars, vector, found.scratch_bytes, found.waves)
    return (*_cells(row), *map(str, numbers), *_instructions(found))


def _nvidia_cells(row: CompileRow) -> tuple[str, ...]:
    found = row.resources
    assert found is not None
    return (*_cells(row), *map(str, (found.registers, found.spills, found.scratch_bytes)), *_instructions(found))


def _instructions(found: Resources) -> tuple[str, str]:
    return _counts(found.matrix), _counts(found.loads)


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows that differ in nothing but the call are one line, with the first call and the number of others."""
    call = _HEAD.index("call")
    grouped: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        grouped.setdefault((*row[:call], *row[call + 1 :]), []).append(row[call])
    lines: list[Sequence[str]] = [head, ["---"] * len(head)]
    for cells, calls in grouped.items():
        others = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        lines.append((*cells[:call], f"{calls[0]}{others}", *cells[call:]))
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _first(case: str) -> str:
    first, *others = case.split("; ")
    return f"{first} and {len(others)} more" if others else first


def _one_line(text: str) -> str:
    return " ".join(text.split())
