"""The plan of a run as text and as JSON values, without torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from k3port.oracle.spec import Plan


def kernel_counts(plan: Plan) -> str:
    """Chosen kernels by backend: ``12 cpu, 9 reference``."""
    counts = Counter(s.kernel.partition(".")[0] for s in plan.selections if s.kernel)
    return ", ".join(f"{count} {backend}" for backend, count in counts.most_common())


def plan_lines(plan: Plan) -> list[str]:
    """One line per slot: op, phase, kernel and why."""
    rows = [(s.op, s.phase or "-", s.kernel or "-", s.reason) for s in plan.selections]
    rows.insert(0, ("op", "phase", "kernel", "why"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows]


def plan_summary(plan: Plan) -> dict[str, Any]:
    """The plan in a few JSON values."""
    kernels = {s.slot: s.kernel for s in plan.selections if s.kernel}
    return {"platform": plan.platform, "dtype": plan.dtype, "tp": plan.tp, "kernels": kernels}


def plan_record(plan: Plan) -> dict[str, Any]:
    """The whole plan as JSON values, rejections included."""
    return dataclasses.asdict(plan)
