"""What one forward step works on: the tokens, the requests' states and caches, and an optional observer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from k3port.ops.kda import KdaState
from k3port.ops.segment import Segment


@dataclass(frozen=True, slots=True)
class Step:
    """One batch of tokens, at most one segment per phase.

    Attributes:
        token_ids: int64 ``[T]``, the segments one after the other.
        segments: which rows belong to which requests.
        logit_rows: int64 rows of ``token_ids`` that need logits.
    """

    token_ids: torch.Tensor
    segments: tuple[Segment, ...]
    logit_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelState:
    """What a model carries between steps, for all requests: one entry per KDA layer and one per MLA layer."""

    kda: Mapping[int, KdaState]
    """By 0-based layer."""
    mla: Mapping[int, torch.Tensor]
    """Paged latent cache ``[pages, page_size, C + R]`` by 0-based layer."""


class Probe(Protocol):
    """Watches a forward pass, for comparisons and tests; a run without one pays a single test per sublayer.

    What it sees may be overwritten later in the step: it clones what it keeps.
    """

    def sublayer(self, layer: int, name: str, value: torch.Tensor) -> None:
        """Sees ``attention`` and ``mlp`` outputs ``[T, D]`` before they are added to the residual stream."""

    def residual(self, layer: int, value: torch.Tensor) -> None:
        """Sees the running sum ``[T, D]`` after each layer (with Attention Residuals: of the current block)."""

    def final_mix(self, value: torch.Tensor) -> None:
        """Sees the input ``[R, D]`` of the last norm, for the rows that need logits."""
