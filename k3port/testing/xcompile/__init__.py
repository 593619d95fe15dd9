"""Compiles Triton kernels for GPUs that are not here, at production shapes, and says what the code takes.

An author declares nothing for it: the launches of a kernel's own host code are recorded on CPU tensors. Nothing is run,
so this proves that a kernel compiles and fits, not that it is right or fast.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import triton

from k3port.oracle.spec import KernelSpec
from k3port.testing.kernel_code import PART_S
from k3port.testing.subject import triton_kernels
from k3port.testing.targets import TARGETS, TPS, platform_target, shared_limit
from k3port.testing.xcompile.cache import Cache, default_cache_dir
from k3port.testing.xcompile.compiler import Compiled
from k3port.testing.xcompile.jobs import Job, gather
from k3port.testing.xcompile.report import CompileReport, CompileRow
from k3port.testing.xcompile.workers import compile_jobs

__all__ = [
    "TPS",
    "CompileReport",
    "CompileRow",
    "compile_all",
    "compile_kernel",
    "default_cache_dir",
    "triton_kernels",
]


def compile_kernel(
    spec: KernelSpec,
    *,
    targets: Sequence[str] = TARGETS,
    tps: Sequence[int] = (8,),
    all_configs: bool = False,
    jobs: int = 2,
    cache_dir: Path | None = None,
    timeout_s: float = PART_S,
) -> CompileReport:
    """Compiles one kernel: see :func:`compile_all`."""
    return compile_all(
        [spec], targets=targets, tps=tps, all_configs=all_configs, jobs=jobs, cache_dir=cache_dir, timeout_s=timeout_s
    )


def compile_all(
    specs: Iterable[KernelSpec],
    *,
    targets: Sequence[str] = TARGETS,
    tps: Sequence[int] = (8,),
    all_configs: bool = False,
    jobs: int = 2,
    cache_dir: Path | None = None,
    timeout_s: float = PART_S,
) -> CompileReport:
    """Compiles every launch that kernels make at production shapes of the published Kimi K3.

    Args:
        specs: built kernels, without composites.
        targets: architectures, such as ``sm_90`` and ``gfx950``.
        tps: tensor-parallel sizes whose shapes are taken.
        all_configs: every tuned configuration that fits architecture and sizes, and every one of an autotuner, instead
            of the chosen one.
        jobs: processes that compile; 1 compiles here.
        cache_dir: None takes :func:`default_cache_dir`. Where it cannot be written, a note on stderr says so.
        timeout_s: seconds for the host code of one kernel.

    Raises:
        ValueError: an unknown target, a kernel without adapter, a composite, or fewer than one job.
    """
    specs = list(specs)
    if jobs < 1:
        raise ValueError(f"{jobs} jobs; at least 1 is needed")
    for spec in specs:
        if not spec.is_built or spec.parts:
            what = "is a composite: compile its parts" if spec.parts else "has no adapter: nothing can be compiled"
            raise ValueError(f"{spec.name} {what}")
    for target in targets:
        platform_target(target)
    cache = Cache(cache_dir or default_cache_dir())
    gathered = [gather(spec, targets, tps, all_configs=all_configs, timeout_s=timeout_s) for spec in specs]
    found = [job for one in gathered for job in one.jobs]
    ready: dict[str, Compiled] = {}
    missing: dict[str, Job] = {}
    for job in found:
        if job.launch is not None and job.key not in ready and job.key not in missing:
            old = cache.get(job.key)
            if old is None:
                missing[job.key] = job
            else:
                ready[job.key] = old
    kept = True
    for key, compiled in compile_jobs(missing, jobs):
        if compiled.lasting and kept:
            try:
                cache.put(key, compiled)
            except OSError as exc:
                kept = False
                print(f"note: compiled code is not kept: {cache.folder}: {exc.strerror or exc}", file=sys.stderr)
        ready[key] = compiled
    return CompileReport(
        rows=tuple(_row(job, ready, job.key not in missing) for job in found),
        silent=tuple(text for one in gathered for text in one.silent),
        left_out=tuple(text for one in gathered for text in one.left_out),
        triton=triton.__version__,
    )


def _row(job: Job, ready: dict[str, Compiled], cached: bool) -> CompileRow:
    return CompileRow(
        kernel=job.kernel,
        jit=job.launch.name if job.launch else "",
        target=job.target or "every target",
        tp=job.tp,
        config=job.config,
        case="; ".join(job.cases),
        compiled=ready[job.key] if job.launch else None,
        error=job.error,
        limit=shared_limit(job.target) if job.target else 0,
        cached=cached and job.launch is not None,
    )
