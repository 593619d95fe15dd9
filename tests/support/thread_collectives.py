"""Collectives between threads of one process: a stand-in for several devices. Kernels for the registry, and the runner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from k3port.hookspecs import hookimpl
from k3port.oracle.spec import KernelSpec

T = TypeVar("T")
_local = threading.local()


class Group:
    """Ranks that meet at every collective; one that fails breaks the barrier, so that no other waits for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots: list[torch.Tensor | None] = [None] * size
        self.calls = 0

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        self.slots[rank] = x
        self.barrier.wait(timeout=60)
        found = [slot.clone() for slot in self.slots if slot is not None]
        if rank == 0:
            self.calls += 1
        # Nobody goes on, and overwrites its tensor, before all have read.
        self.barrier.wait(timeout=60)
        return found


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """The sum in rank order: the same bits on every rank."""
    first, *others = _local.group.exchange(_local.rank, x)
    for other in others:
        first = first + other
    return first


def all_gather(x: torch.Tensor) -> torch.Tensor:
    return torch.cat(_local.group.exchange(_local.rank, x), dim=-1)


@hookimpl
def k3port_kernels() -> Sequence[KernelSpec]:
    return [
        KernelSpec(f"threads.{op}", op, f"thread_collectives:{op}", "between threads", priority=150)
        for op in ("all_reduce", "all_gather")
    ]


def run_ranks(group: Group, function: Callable[[int], T]) -> list[T]:
    """Runs ``function(rank)`` on one thread per rank; raises the first failure."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        _local.group, _local.rank = group, rank
        try:
            results[rank] = function(rank)
        except BaseException as error:
            failures.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(group.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(group.size)]
