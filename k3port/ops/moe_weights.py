"""Routed experts of one layer: as stored, and as one dense stack. A MoE kernel packs them into its own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3port.ops.quant import Mxfp4Tensor

ExpertMatrix = Mxfp4Tensor | torch.Tensor


@dataclass(frozen=True)
class StoredExperts:
    """This rank's slice of every routed expert of a layer, as the checkpoint stores it. One entry per expert.

    The tensors may be read-only views of the mapped file: never write to them.
    """

    gate: Sequence[ExpertMatrix]
    """w1 ``[I, L]``: MXFP4, or a plain tensor of the stored type."""
    up: Sequence[ExpertMatrix]
    """w3 ``[I, L]``."""
    down: Sequence[ExpertMatrix]
    """w2 ``[L, I]``."""

    @property
    def num_experts(self) -> int:
        return len(self.gate)

    @property
    def width(self) -> int:
        """I of this rank."""
        return self.gate[0].shape[0]

    @property
    def latent(self) -> int:
        """L, the width of an expert's input and output."""
        return self.gate[0].shape[1]

    @property
    def is_mxfp4(self) -> bool:
        return isinstance(self.gate[0], Mxfp4Tensor)

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrices in (self.gate, self.up, self.down) for matrix in matrices)


@dataclass(frozen=True)
class DenseExperts:
    """All routed experts of a layer in the compute type."""

    gate_up: torch.Tensor
    """``[E, 2I, L]``: the I gate rows of an expert, then its I up rows."""
    down: torch.Tensor
    """``[E, L, I]``."""

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


def keep_stored(stored: StoredExperts, dtype: torch.dtype) -> StoredExperts:
    """Packs nothing: the kernel reads the stored form, and plain experts keep their type whatever ``dtype`` is."""
    del dtype
    return stored


def stack_dense(stored: StoredExperts, dtype: torch.dtype) -> DenseExperts:
    """Expands every expert to ``dtype``, one matrix at a time: never more than the result and one expanded matrix."""
    width, latent = stored.width, stored.latent
    first = stored.gate[0]
    device = first.packed.device if isinstance(first, Mxfp4Tensor) else first.device
    gate_up = torch.empty(stored.num_experts, 2 * width, latent, dtype=dtype, device=device)
    down = torch.empty(stored.num_experts, latent, width, dtype=dtype, device=device)
    for expert, (gate, up, out) in enumerate(zip(stored.gate, stored.up, stored.down, strict=True)):
        gate_up[expert, :width] = _dense(gate, dtype)
        gate_up[expert, width:] = _dense(up, dtype)
        down[expert] = _dense(out, dtype)
    return DenseExperts(gate_up, down)


def _dense(matrix: ExpertMatrix, dtype: torch.dtype) -> torch.Tensor:
    return matrix.dequantize(dtype) if isinstance(matrix, Mxfp4Tensor) else matrix
