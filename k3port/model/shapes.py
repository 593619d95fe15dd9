"""What one tensor-parallel rank holds: its dimensions, the legal sizes, and the rows of the merged projections.

Shape suffixes used across the project:

====  ==========================================================================================
T     tokens of a step
B     requests of a step
D     hidden size
L     latent size (MoE latent, or the MLA latent where the text says so)
H     attention heads of this rank
K, V  key and value dimensions of one head
E     routed experts
X     experts chosen per token (top-k)
R     Attention Residuals blocks (sources of a mix)
====  ==========================================================================================

The same numbers build the weights (``model/weights.py``) and split the outputs of the model, so they cannot disagree.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3port.errors import ConfigError, UsageError
from k3port.model.config import ModelConfig

TP_SIZES = (1, 2, 4, 8, 16)
ROW_ALIGNMENT = 16
"""Rows of a merged input projection are padded with zero rows to a multiple of this."""
EXPERT_GROUP = 32
"""MXFP4 scales cover 32 inputs: a rank's slice of the expert width must hold whole groups."""


@dataclass(frozen=True)
class RankDims:
    """Dimensions of one rank. Sizes of a part that the model does not have are 0."""

    tp_rank: int
    tp_size: int
    hidden: int
    """D, the same on every rank."""
    vocab: int
    """Rows of the embedding and of ``lm_head`` on this rank."""
    kda_heads: int
    kda_head_dim: int
    """K = V of KDA, and the width of the low-rank gate projections."""
    conv_width: int
    full_rank_gate: bool
    mla_heads: int
    q_lora_rank: int
    """0: one direct query projection."""
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    output_gate: bool
    dense_width: int
    num_experts: int
    """E, every expert lives on every rank (its width is split)."""
    expert_width: int
    shared_width: int
    latent: int
    """Input and output width of a routed expert: the MoE latent, or D."""

    @property
    def kda_width(self) -> int:
        """Channels of each of q, k and v on this rank (heads x head_dim)."""
        return self.kda_heads * self.kda_head_dim

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def q_width(self) -> int:
        """MLA query rows on this rank."""
        return self.mla_heads * self.qk_dim

    @property
    def v_width(self) -> int:
        """MLA value rows (and output gate rows) on this rank."""
        return self.mla_heads * self.v_dim


def rank_dims(config: ModelConfig, tp_rank: int = 0, tp_size: int = 1, *, mxfp4: bool | None = None) -> RankDims:
    """Dimensions of rank ``tp_rank`` of ``tp_size``.

    Args:
        mxfp4: whether routed experts are stored as MXFP4; None: as published (Kimi K3 yes, Kimi-Linear no).

    Raises:
        ConfigError: ``tp_size`` is not a legal size for this model; the reasons name what does not divide.
        UsageError: ``tp_rank`` is outside ``0..tp_size-1``.
    """
    faults = _size_faults(config, tp_size, mxfp4)
    if faults:
        legal = ", ".join(str(size) for size in legal_tp_sizes(config, mxfp4=mxfp4))
        raise ConfigError(
            f"this model cannot be split over {tp_size} ranks (tp = {tp_size})",
            reasons=faults,
            hint=f"legal tensor-parallel sizes for this model: {legal}",
        )
    if not 0 <= tp_rank < tp_size:
        raise UsageError(f"rank {tp_rank} does not exist: with tp = {tp_size} ranks are 0..{tp_size - 1}")
    kda, mla, moe = config.kda, config.mla, config.moe
    return RankDims(
        tp_rank=tp_rank,
        tp_size=tp_size,
        hidden=config.hidden_size,
        vocab=config.vocab_size // tp_size,
        kda_heads=kda.num_heads // tp_size if kda else 0,
        kda_head_dim=kda.head_dim if kda else 0,
        conv_width=kda.conv_width if kda else 0,
        full_rank_gate=kda.full_rank_gate if kda else False,
        mla_heads=mla.num_heads // tp_size if mla else 0,
        q_lora_rank=(mla.q_lora_rank or 0) if mla else 0,
        kv_lora_rank=mla.kv_lora_rank if mla else 0,
        nope_dim=mla.nope_dim if mla else 0,
        rope_dim=mla.rope_dim if mla else 0,
        v_dim=mla.v_dim if mla else 0,
        output_gate=mla.output_gate if mla else False,
        dense_width=config.dense_width // tp_size if _has_dense_layers(config) else 0,
        num_experts=moe.num_experts if moe else 0,
        expert_width=moe.width // tp_size if moe else 0,
        shared_width=moe.shared_width // tp_size if moe else 0,
        latent=(moe.latent_dim or config.hidden_size) if moe else 0,
    )


def legal_tp_sizes(config: ModelConfig, *, mxfp4: bool | None = None) -> tuple[int, ...]:
    """The sizes of ``TP_SIZES`` that this model can be split over (1 is always one of them)."""
    return tuple(size for size in TP_SIZES if not _size_faults(config, size, mxfp4))


def published_mxfp4(config: ModelConfig) -> bool:
    """Whether the published checkpoint of this family stores routed experts as MXFP4."""
    return config.family == "kimi-k3" and config.moe is not None


def kda_in_proj_rows(dims: RankDims) -> dict[str, int]:
    """Parts of ``kda.in_proj`` in row order with their widths; ``pad`` comes last and may be 0.

    ``q k v [g] f_a [g_a] b pad``: ``f_a`` and ``g_a`` are whole on every rank, the others are this rank's heads.
    """
    rows = {"q": dims.kda_width, "k": dims.kda_width, "v": dims.kda_width}
    if dims.full_rank_gate:
        rows["g"] = dims.kda_width
    rows["f_a"] = dims.kda_head_dim
    if not dims.full_rank_gate:
        rows["g_a"] = dims.kda_head_dim
    rows["b"] = dims.kda_heads
    return _padded(rows)


def mla_in_proj_rows(dims: RankDims) -> dict[str, int]:
    """Parts of ``mla.in_proj`` in row order with their widths; ``pad`` comes last and may be 0.

    ``q_a kv_a [g] pad`` with a low-rank query, else ``q kv_a [g] pad``: ``q_a`` and ``kv_a`` are whole on every rank.
    """
    rows = {"q_a": dims.q_lora_rank} if dims.q_lora_rank else {"q": dims.q_width}
    rows["kv_a"] = dims.kv_lora_rank + dims.rope_dim
    if dims.output_gate:
        rows["g"] = dims.v_width
    return _padded(rows)


def _padded(rows: dict[str, int]) -> dict[str, int]:
    return {**rows, "pad": -sum(rows.values()) % ROW_ALIGNMENT}


def _has_dense_layers(config: ModelConfig) -> bool:
    return not all(config.is_moe(layer) for layer in range(config.num_layers))


def _size_faults(config: ModelConfig, size: int, mxfp4: bool | None) -> list[str]:
    if size not in TP_SIZES:
        return [f"tp = {size} is not one of {', '.join(map(str, TP_SIZES))}"]
    kda, mla, moe = config.kda, config.mla, config.moe
    parts = [("vocab_size", config.vocab_size)]
    if kda:
        parts.append(("KDA heads", kda.num_heads))
    if mla:
        parts.append(("MLA heads", mla.num_heads))
    if _has_dense_layers(config):
        parts.append(("dense width", config.dense_width))
    if moe:
        parts.append(("shared expert width", moe.shared_width))
        parts.append(("expert width", moe.width))
    faults = [f"{what} {value} does not divide by {size}" for what, value in parts if value % size]
    quantised = published_mxfp4(config) if mxfp4 is None else mxfp4
    if moe and quantised and size > 1 and moe.width % size == 0 and moe.width // size % EXPERT_GROUP:
        faults.append(
            f"expert width {moe.width} / {size} = {moe.width // size} is not a multiple of {EXPERT_GROUP} "
            "(MXFP4 scale groups)"
        )
    return faults
