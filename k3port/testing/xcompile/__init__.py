"""Compiles Triton kernels for GPUs that are not here, at production shapes, and says what the code takes.

An author declares nothing for it: the launches of a kernel's own host code are recorded on CPU tensors. Nothing is run,
so this proves that a kernel compiles and fits, not that it is right or fast.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import triton

from k3port.oracle.spec import KernelSpec
from k3port.testing.launches import PortableLaunch
from k3port.testing.production import TPS
from k3port.testing.subject import is_triton
from k3port.testing.targets import TARGETS, platform_target, shared_limit
from k3port.testing.xcompile.cache import Cache, default_cache_dir
from k3port.testing.xcompile.compiler import Compiled, compile_launch, compile_portable
from k3port.testing.xcompile.jobs import Job, gather
from k3port.testing.xcompile.report import CompileReport, CompileRow

__all__ = [
    "TPS",
    "CompileReport",
    "CompileRow",
    "compile_all",
    "compile_kernel",
    "default_cache_dir",
    "triton_kernels",
]


CRASHED = "the compiler crashed and took its process with it"


def triton_kernels(specs: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    """The built kernels whose records ask for Triton; a composite's parts are kernels of their own."""
    return tuple(spec for spec in specs if spec.is_built and not spec.parts and is_triton(spec))


def compile_kernel(
    spec: KernelSpec,
    *,
    targets: Sequence[str] = TARGETS,
    tps: Sequence[int] = (8,),
    all_configs: bool = False,
    jobs: int = 2,
    cache_dir: Path | None = None,
) -> CompileReport:
    """Compiles one kernel: see :func:`compile_all`."""
    return compile_all([spec], targets=targets, tps=tps, all_configs=all_configs, jobs=jobs, cache_dir=cache_dir)


def compile_all(
    specs: Iterable[KernelSpec],
    *,
    targets: Sequence[str] = TARGETS,
    tps: Sequence[int] = (8,),
    all_configs: bool = False,
    jobs: int = 2,
    cache_dir: Path | None = None,
) -> CompileReport:
    """Compiles every launch that kernels make at production shapes of the published Kimi K3.

    Args:
        specs: built kernels, without composites.
        targets: architectures, such as ``sm_90`` and ``gfx950``.
        tps: tensor-parallel sizes whose shapes are taken.
        all_configs: every tuned configuration that fits architecture and sizes, and every one of an autotuner, instead
            of the chosen one.
        jobs: processes that compile; 1 compiles here.
        cache_dir: None takes :func:`default_cache_dir`.

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
    gathered = [gather(spec, targets, tps, all_configs=all_configs) for spec in specs]
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
    for key, compiled in _compile(missing, jobs):
        # A process that died may have been killed for want of memory: that is not kept.
        if compiled.error != CRASHED:
            cache.put(key, compiled)
        ready[key] = compiled
    return CompileReport(
        rows=tuple(_row(job, ready, job.key not in missing) for job in found),
        silent=tuple(s.name for s, one in zip(specs, gathered, strict=True) if not one.launched and not one.jobs),
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


def _compile(missing: dict[str, Job], jobs: int) -> Iterator[tuple[str, Compiled]]:
    """Compiles in fresh processes; here what they could not import, or where one process is asked for."""
    sendable: dict[str, PortableLaunch] = {}
    for key, job in missing.items():
        assert job.launch is not None
        try:
            if jobs > 1:
                sendable[key] = PortableLaunch.of(job.launch)
        except ValueError:
            pass
        if key not in sendable:
            yield key, compile_launch(job.launch)
    if not sendable:
        return
    # Spawned: a fork would copy Triton's and torch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(sendable)), mp_context=context) as pool:
        futures = {key: pool.submit(compile_portable, launch) for key, launch in sendable.items()}
        for key, future in futures.items():
            try:
                found = future.result()
            except BrokenProcessPool:
                break
            del sendable[key]
            yield key, found
    # A compiler that crashes takes its process with it: one process per launch tells which one it was.
    for key, launch in sendable.items():
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                yield key, pool.submit(compile_portable, launch).result()
            except BrokenProcessPool:
                yield key, Compiled(CRASHED, (), 0, 0, None, 0.0)
