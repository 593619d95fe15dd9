"""Copies of a call's buffers that take turns, so that no call finds its operands in the cache."""

from __future__ import annotations

import math
from typing import Any

import torch

from k3port.ops.contract import map_tensors

COLD_BYTES = 100_000_000
"""What the copies hold together at least: twice the 50 MB of L2 of an H200."""
MAX_COPIES = 256


def tensor_bytes(*values: Any) -> int:
    """Bytes of all distinct memory under the tensors of nested values; overlapping views count once."""
    seen: dict[tuple[str, int], int] = {}

    def add(tensor: torch.Tensor) -> torch.Tensor:
        place = (str(tensor.device), tensor.untyped_storage().data_ptr())
        span = tensor.numel() * tensor.element_size()
        seen[place] = min(seen.get(place, 0) + span, tensor.untyped_storage().nbytes())
        return tensor

    for value in values:
        map_tensors(value, add)
    return sum(seen.values())


def copies_needed(working_set: int, cold_bytes: int = COLD_BYTES) -> int:
    """How many copies a call needs: one where its own buffers are large enough, :data:`MAX_COPIES` at most."""
    if working_set >= cold_bytes:
        return 1
    return max(1, min(MAX_COPIES, math.ceil(cold_bytes / max(working_set, 1)) + 1))
