"""``--dry-run``: the checks and the plan of a run from configuration and file headers alone, without torch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3port.oracle.profile import get_profile
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import Plan
from k3port.plugins import Registry, default_registry
from k3port.runtime.planner import Workload, model_queries
from k3port.runtime.preflight import Checkpoint, check_checkpoint


@dataclass(frozen=True)
class Preview:
    """What a run would use."""

    checkpoint: Checkpoint
    plan: Plan
    registry: Registry


def make_preview(model: str | Path, *, platform: str, dtype: str | None, kernels: Mapping[str, str]) -> Preview:
    """The checks and choices that :meth:`k3port.Runtime.load` makes before it loads weights.

    Raises:
        K3Error: as there.
    """
    profile = get_profile(platform)
    checkpoint = check_checkpoint(model)
    registry = default_registry()
    weight_format = "mxfp4" if checkpoint.mxfp4 else checkpoint.config.dtype
    work = Workload(dtype or profile.activations, weight_format)
    plan = resolve(model_queries(checkpoint.config, work), registry.kernels, profile.target(), pins=kernels)
    return Preview(checkpoint, plan, registry)


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
