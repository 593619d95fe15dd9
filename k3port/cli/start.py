"""What a run starts from: its merged options, the checks before any weight, and its header line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3port import __version__
from k3port.cli.preview import kernel_counts
from k3port.oracle.spec import Plan
from k3port.runtime.request import SamplingParams

if TYPE_CHECKING:
    from k3port.runtime.prepare import Prepared


@dataclass(frozen=True)
class RunOptions:
    """Everything that a run needs to know, after command line and environment are merged."""

    model: Path
    model_name: str
    platform: str | None
    """None: this machine's GPU where it can run the model, else the CPU."""
    dtype: str | None
    kernels: Mapping[str, str]
    threads: int | None
    context_tokens: int | None
    sampling: SamplingParams
    plan: Plan | None = None
    profiles: tuple[Path, ...] = ()
    allow_reference: bool = False


def check(options: RunOptions) -> Prepared:
    """The checks and the plan of a run, before any weight is read.

    Raises:
        K3Error: whatever is wrong with the checkpoint, its tokenizer, the platform or the plan.
    """
    from k3port.runtime.planner import DEFAULT_CONTEXT
    from k3port.runtime.prepare import prepare

    return prepare(
        options.model,
        platform=options.platform,
        dtype=options.dtype,
        pins=options.kernels,
        saved=options.plan,
        kv_tokens=options.context_tokens or DEFAULT_CONTEXT,
        max_requests=1,
        profiles=options.profiles,
        need_text=True,
        allow_reference=options.allow_reference,
    )


def header(options: RunOptions, plan: Plan, *more: str) -> str:
    """The first line on stderr: version, model, platform, kernels."""
    parts = [
        f"k3port {__version__}",
        options.model_name,
        f"{plan.platform} ({plan.dtype})",
        f"kernels: {kernel_counts(plan)}",
        *more,
    ]
    return " · ".join(parts)
