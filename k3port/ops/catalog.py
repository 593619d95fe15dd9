"""The list of ops: names, phases, and where each contract lives. Imports no torch, so plans can be made anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

MAX_DRAFT = 8
"""Most tokens of one request in a verification step: seven drafts after the last accepted token."""


@dataclass(frozen=True)
class OpInfo:
    """One op of the catalog.

    A *coarse* op is what the model calls; a kernel may implement it as a composite of finer ops (``parts``) or fuse
    them. A *fine* op can be called by the model too (``rms_norm``), or only by composites (``kda_core``).
    """

    name: str
    doc: str
    contracts: tuple[str, ...]
    """``module:attribute`` of each contract; an op whose phases take different arguments has one per phase."""
    phased: bool = False
    """Whether prefill and decode are chosen separately (they touch a state or a cache)."""
    parts: tuple[str, ...] = ()
    """Fine ops that the composite kernel of this op is made of."""
    records_drafts: bool = False
    """Whether a decode kernel that verifies drafts has to record them, so that the accepted ones can be replayed."""

    @property
    def phases(self) -> tuple[Phase | None, ...]:
        return PHASES if self.phased else (None,)

    @property
    def slots(self) -> tuple[str, ...]:
        """Attribute names in the ops table."""
        return tuple(slot_name(self.name, phase) for phase in self.phases)


def slot_name(op: str, phase: Phase | None) -> str:
    return op if phase is None else f"{op}_{phase}"


def _ops(*infos: OpInfo) -> dict[str, OpInfo]:
    return {info.name: info for info in infos}


OPS: dict[str, OpInfo] = _ops(
    OpInfo("embed", "token ids to rows of this rank's vocabulary shard", ("k3port.ops.linear:EMBED",)),
    OpInfo("linear", "x Wᵀ without bias", ("k3port.ops.linear:LINEAR",)),
    OpInfo("logits", "float32 scores of this rank's vocabulary shard", ("k3port.ops.linear:LOGITS",)),
    OpInfo("rms_norm", "root-mean-square normalisation", ("k3port.ops.norm:RMS_NORM",)),
    OpInfo("gated_norm", "per-head RMSNorm times a sigmoid gate", ("k3port.ops.norm:GATED_NORM",)),
    OpInfo(
        "attn_res",
        "between sublayers: pending add, block write, mixture of blocks and running sum, RMSNorm",
        ("k3port.ops.residual:ATTN_RES",),
    ),
    OpInfo("situ_mul", "gated activation: SiTU or SwiGLU", ("k3port.ops.activation:SITU_MUL",)),
    OpInfo(
        "short_conv",
        "causal depthwise convolution with SiLU and a cached tail",
        ("k3port.ops.conv:SHORT_CONV",),
        phased=True,
        records_drafts=True,
    ),
    OpInfo(
        "kda_core",
        "KDA's gate and its delta-rule recurrence on a per-request state",
        ("k3port.ops.kda:KDA_CORE",),
        phased=True,
        records_drafts=True,
    ),
    OpInfo(
        "kda",
        "KDA between its input and output projections",
        ("k3port.ops.kda:KDA",),
        phased=True,
        parts=("short_conv", "kda_core", "gated_norm"),
        records_drafts=True,
    ),
    OpInfo(
        "kda_commit",
        "replay accepted drafts from their record into KDA's state",
        ("k3port.ops.kda_commit:KDA_COMMIT",),
    ),
    OpInfo("mla_append", "norm the latent and write it to the paged cache", ("k3port.ops.mla:MLA_APPEND",)),
    OpInfo(
        "mla_attend",
        "attention over the paged latent cache: expanded in prefill, absorbed in decode",
        ("k3port.ops.mla:MLA_ATTEND_PREFILL", "k3port.ops.mla:MLA_ATTEND_DECODE"),
        phased=True,
    ),
    OpInfo(
        "mla",
        "MLA between its input and output projections",
        ("k3port.ops.mla:MLA",),
        phased=True,
        parts=("mla_append", "mla_attend"),
    ),
    OpInfo("moe_route", "scores, top-k experts and their weights", ("k3port.ops.moe:MOE_ROUTE",)),
    OpInfo("moe_experts", "the chosen experts' MLPs and their weighted sum", ("k3port.ops.moe:MOE_EXPERTS",)),
    OpInfo("moe", "routing and routed experts", ("k3port.ops.moe:MOE",), parts=("moe_route", "moe_experts")),
    OpInfo("dense_mlp", "gated MLP", ("k3port.ops.linear:DENSE_MLP",), parts=("linear", "situ_mul")),
    OpInfo("all_reduce", "sum over the tensor-parallel ranks", ("k3port.ops.collective:ALL_REDUCE",)),
    OpInfo(
        "all_gather", "concatenate the last axis over the tensor-parallel ranks", ("k3port.ops.collective:ALL_GATHER",)
    ),
    OpInfo("sample", "next token ids from logits", ("k3port.ops.sample:SAMPLE",)),
    OpInfo("vision_patch", "image patches to rows of the vision tower", ("k3port.ops.vision:VISION_PATCH",)),
)
