"""Records of a KDA layer: its parameters, its state, what verified drafts leave; and how keys are normalised."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from k3port.ops.segment import MAX_DRAFT, Segment

L2_EPS = 1e-6
"""Added to the *sum* of squares of q and k, not to their mean."""


@dataclass(frozen=True, slots=True)
class KdaParams:
    """What a KDA layer needs between its projections; one record per layer.

    ``conv`` float32 ``[3P, W]`` (rows q, k, v), ``A_log`` float32 ``[H]``, ``dt_bias`` float32 ``[P]``, ``o_norm``
    float32 ``[V]``; ``lower_bound`` None selects the softplus gate; P = H x K.
    """

    conv: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    o_norm: torch.Tensor
    num_heads: int
    head_dim: int
    lower_bound: float | None
    norm_eps: float


@dataclass(frozen=True, slots=True)
class KdaDrafts:
    """What a step that verifies drafts leaves for :func:`k3port.ops.kda_commit.kda_commit`, per layer and state slot.

    In the activation dtype ``x`` ``[S, N, 3P]``, raw inputs of the convolution, and ``k`` ``[S, N, H, K]``, keys after
    it, not yet normalised; float32 ``g`` ``[S, N, H, K]`` log decays and ``u`` ``[S, N, H, V]`` written rows; N
    is at most :data:`~k3port.ops.segment.MAX_DRAFT`. Row i belongs to the i-th token of the request; rows behind its
    last token hold anything.
    """

    x: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    u: torch.Tensor


@dataclass(frozen=True, slots=True)
class KdaState:
    """Per layer and state slot: ``conv`` ``[S, W-1, 3P]`` raw inputs, ``recurrent`` float32 ``[S, H, V, K]``.

    ``arrivals`` int32 ``[S, H]``, zero between calls: where programs that share a head count themselves. It belongs to
    the slot because one slot is never worked on twice at a time. None where no kernel needs it.
    ``drafts``: needed where drafts are verified, else None.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor
    arrivals: torch.Tensor | None = None
    drafts: KdaDrafts | None = None


def empty_drafts(state: KdaState, tokens: int = MAX_DRAFT) -> KdaDrafts:
    """A record for all slots of a state and up to ``tokens`` tokens per request. Its numbers are not set."""
    slots, heads, value_dim, key_dim = state.recurrent.shape
    wide = torch.promote_types(state.recurrent.dtype, torch.float32)

    def rows(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((slots, tokens, *sizes), dtype=dtype, device=state.conv.device)

    return KdaDrafts(
        x=rows(state.conv.shape[2], dtype=state.conv.dtype),
        k=rows(heads, key_dim, dtype=state.conv.dtype),
        g=rows(heads, key_dim, dtype=wide),
        u=rows(heads, value_dim, dtype=wide),
    )


def required_record(segment: Segment, drafts: KdaDrafts | None) -> KdaDrafts | None:
    """The record where the segment verifies drafts, else None.

    Raises:
        ValueError: the segment verifies drafts and there is no record, or one with too few rows: a rejected draft could
            not be taken back.
    """
    if not segment.draft:
        return None
    if drafts is None:
        raise ValueError("drafts are verified with a record of them: pass KdaState.drafts, see empty_drafts")
    if max(segment.lengths, default=0) > drafts.k.shape[1]:
        raise ValueError(
            f"the record holds {drafts.k.shape[1]} tokens per request, the segment has up to {max(segment.lengths)}"
        )
    return drafts


def normalize_qk(q: torch.Tensor, k: torch.Tensor, acc: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """``x / sqrt(sum(x²) + 1e-6)`` over the last axis, and q times K^-0.5."""
    q, k = q.to(acc), k.to(acc)
    q = q * torch.rsqrt(q.square().sum(dim=-1, keepdim=True) + L2_EPS) * q.shape[-1] ** -0.5
    return q, k * torch.rsqrt(k.square().sum(dim=-1, keepdim=True) + L2_EPS)
