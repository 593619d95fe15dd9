"""Compilers in processes of their own: side by side, and a crash costs one launch. An interrupt ends them at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import spawn
from typing import Any
from unittest import mock

from k3port.testing.launches import PortableLaunch
from k3port.testing.xcompile.compiler import Compiled, compile_launch, compile_portable
from k3port.testing.xcompile.jobs import Job

CRASHED = "the compiler crashed and took its process with it"


def compile_jobs(missing: dict[str, Job], jobs: int) -> Iterator[tuple[str, Compiled]]:
    """Compiles in fresh processes; here what they could not import, or where one process is asked for."""
    sendable: dict[str, PortableLaunch] = {}
    for key, job in missing.items():
        assert job.launch is not None
        with contextlib.suppress(ValueError):
            if jobs > 1:
                sendable[key] = PortableLaunch.of(job.launch)
        if key not in sendable:
            yield key, compile_launch(job.launch)
    if not sendable:
        return
    with _pool(min(jobs, len(sendable))) as pool:
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
        with _pool(1) as pool:
            try:
                found = pool.submit(compile_portable, launch).result()
            except BrokenProcessPool:
                # It may have been killed for want of memory.
                found = Compiled(CRASHED, (), 0, 0, None, 0.0, lasting=False)
        yield key, found


@contextlib.contextmanager
def _pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """Some processes; they and what they started are ended if the block does not end as it should."""
    # Spawned: a fork would copy Triton's and torch's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    with mock.patch.object(spawn, "get_preparation_data", _without_main):
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_lead_a_group)
        try:
            yield pool
        except BaseException:
            processes = list((pool._processes or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                _end(process.pid)
            raise
        pool.shutdown()


_preparation_data = spawn.get_preparation_data


def _without_main(name: str) -> dict[str, Any]:
    """What a new process is told, without the main module: launches never come from there, and importing a script that
    has no ``if __name__ == "__main__"`` would run it again."""
    return {key: value for key, value in _preparation_data(name).items() if not key.startswith("init_main")}


def _lead_a_group() -> None:
    """Ctrl-C on a terminal reaches a whole group: a worker has its own, with the assemblers that it starts."""
    os.setpgid(0, 0)


def _end(pid: int | None) -> None:
    if pid is None:
        return
    with contextlib.suppress(OSError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
