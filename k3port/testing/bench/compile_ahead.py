"""Compiles a tuner's configurations before they are tried, several at once, in processes of their own.

Each process makes one call of a configuration; what that compiles stays in Triton's cache on disk, where the trial
finds it. A configuration that fails here fails again in its trial, which says why.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

import torch

from k3port.oracle.spec import KernelSpec
from k3port.testing.bench import workloads
from k3port.testing.bench.suite import make_args
from k3port.testing.bench.workload import Case, Workload
from k3port.testing.harness import build_kernel

MOST_BYTES = 8 << 30
"""Arguments of all processes together. Larger shapes compile when they are tried; smaller ones before them have mostly
compiled the same."""

Configs = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class _Task:
    """One call, by names that another process can look up."""

    kernel: str
    op: str
    phase: str | None
    case: str
    configs: Configs
    device: str


class CompileAhead:
    """A pool of compiling processes; a context manager.

    Args:
        jobs: how many. With one there are none, and every configuration is compiled when it is tried.
    """

    def __init__(self, jobs: int, device: torch.device) -> None:
        self.jobs, self.device = jobs, device
        # A forked process could not use the GPU.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(jobs, mp_context=context) if jobs > 1 else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def compile(self, spec: KernelSpec, workload: Workload, case: Case, configs: Sequence[Configs], size: int) -> int:
        """Calls a kernel with each of several configurations; how many calls ended well.

        Args:
            size: bytes of the arguments of one call.
        """
        if self._pool is None or len(configs) < 2 or size * self.jobs > MOST_BYTES:
            return 0
        place = (spec.name, workload.op, workload.phase, case.name)
        tasks = [_Task(*place, dict(config), str(self.device)) for config in configs]
        try:
            return sum(self._pool.map(_call, tasks))
        except BrokenProcessPool:
            # One call took its process down: the trials, in this one, will say what it is.
            self._pool = None
            return 0


@torch.no_grad()
def _call(task: _Task) -> bool:
    from k3port.backends.portable.launch import force_config
    from k3port.plugins import default_registry

    try:
        kernels = default_registry().kernels
        spec = next(spec for spec in kernels if spec.name == task.kernel)
        workload = next(w for w in workloads.WORKLOADS if (w.op, w.phase) == (task.op, task.phase))
        case = next(case for case in workload.cases if case.name == task.case)
        function = build_kernel(spec, kernels, workload.phase)
        device = torch.device(task.device)
        with ExitStack() as stack:
            for name, config in task.configs.items():
                stack.enter_context(force_config(name, config))
            function(**make_args(case, device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        # Whatever it is, the trial of this configuration meets it again.
        return False
    return True
