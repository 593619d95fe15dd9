"""CPU threads per phase: a decode step of a small model is too short to share."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from k3port.model.config import ModelConfig
from k3port.model.step import Step
from k3port.runtime.loader import Weights

SHARED_DECODE_BYTES = 64 << 20
"""Weights from which a decode step is shared between threads: below, the hand-over costs more than it saves."""


@dataclass
class PhaseThreads:
    """Threads of each phase, and the setting of the caller that :meth:`restore` brings back."""

    prefill: int
    decode: int
    _before: int | None = field(default=None, repr=False)

    @classmethod
    def choose(cls, config: ModelConfig, weights: Weights, threads: int | None = None) -> PhaseThreads:
        """``threads`` for both phases; without it, all cores for prefill, and for decode all or one by model size."""
        if threads is not None:
            return cls(threads, threads)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        size = sum(weights.bytes_by_kind.values())
        return cls(prefill=cores, decode=cores if size >= SHARED_DECODE_BYTES else 1)

    def apply(self, step: Step) -> None:
        """Sets the thread count for a step; a step with any prefill counts as prefill."""
        wanted = self.prefill if any(s.phase == "prefill" for s in step.segments) else self.decode
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
