"""CPU threads per step: a short step is done before a second thread has taken its share."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from k3port.model.step import Step
from k3port.runtime.loader import Weights

SHARED_WORK = 100_000_000_000
"""Tokens times weight bytes from which a step is shared between threads. Below, an idle machine gains a third at best,
and on a busy one the threads wait for each other: a 512-token prefill of a 5 MB model then took five times as long."""


@dataclass
class PhaseThreads:
    """Threads of long steps (``prefill``) and of a decode step of one request (``decode``)."""

    prefill: int
    decode: int
    shared_tokens: int
    """Steps of at least so many tokens are long."""
    _before: int | None = field(default=None, repr=False)

    @classmethod
    def choose(cls, weights: Weights, threads: int | None = None, *, longest_step: int) -> PhaseThreads:
        """All cores for long steps and one thread for short ones, or ``threads`` for every step.

        Args:
            longest_step: most tokens of a step; where even that is short, every step gets one thread.
        """
        if threads is not None:
            return cls(threads, threads, 0)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        shared_tokens = -(-SHARED_WORK // max(sum(weights.bytes_by_kind.values()), 1))
        return cls(
            prefill=cores if shared_tokens <= longest_step else 1,
            decode=cores if shared_tokens <= 1 else 1,
            shared_tokens=shared_tokens,
        )

    def describe(self) -> str:
        """``prefill/decode`` threads."""
        return f"{self.prefill}/{self.decode}"

    def apply(self, step: Step) -> None:
        """Sets the thread count for a step."""
        wanted = self.prefill if step.token_ids.shape[0] >= self.shared_tokens else self.decode
        current = torch.get_num_threads()
        if self._before is None:
            self._before = current
        if current != wanted:
            torch.set_num_threads(wanted)

    def restore(self) -> None:
        """Gives the process its own thread count back."""
        if self._before is not None:
            torch.set_num_threads(self._before)
            self._before = None
