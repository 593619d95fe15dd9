"""The checkpoint as stored: name, shape and type of every text tensor that a model configuration calls for.

Preflight compares files with this table, the runtime view (``model/weights.py``) reads from these names, and the
synthetic checkpoints of ``testing/synthetic.py`` are written from it. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from k3port.model.config import KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3port.model.shapes import EXPERT_GROUP, published_mxfp4

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element of every type that a safetensors header may name."""

EXPERT_MATRICES = ("w1", "w2", "w3")
"""gate, down, up."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor: the published form, and the other forms that mean the same."""

    shape: tuple[int, ...]
    dtype: str
    """Published type, as safetensors names it."""
    dtypes: tuple[str, ...]
    """Every type that is accepted, the published one included."""
    alternatives: tuple[tuple[int, ...], ...] = ()
    """Other accepted shapes (same numbers, same order)."""
    heads: int = 0
    """``A_log`` only: one number per head, possibly followed by padding."""
    head_dim: int = 0
    required: bool = True

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BITS[self.dtype] // 8

    def accepts_shape(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or shape in self.alternatives or (self.heads > 0 and self._is_per_head(shape))

    def expected_shape(self) -> str:
        """The accepted shapes in words, for a message."""
        if self.heads:
            return f"[n] or [1, 1, n, 1] with n >= {self.heads}, one number per head and then padding"
        return " or ".join(str(list(shape)) for shape in (self.shape, *self.alternatives))

    def _is_per_head(self, shape: tuple[int, ...]) -> bool:
        if len(shape) == 4:
            if shape[0] != 1 or shape[1] != 1 or shape[3] != 1:
                return False
        elif len(shape) != 1:
            return False
        # heads x head_dim numbers are one per channel: another model, whatever a prefix of it would look like.
        per_channel = self.heads > 1 and self.head_dim > 1 and math.prod(shape) >= self.heads * self.head_dim
        return math.prod(shape) >= self.heads and not per_channel


@dataclass(frozen=True)
class Totals:
    """What a checkpoint holds. Packed bytes count as two parameters each, scales as none."""

    num_tensors: int = 0
    num_parameters: int = 0
    bytes_by_dtype: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


def normalise_name(name: str) -> str:
    """Strips ``language_model.`` and then ``model.``: one spelling for wrapper, text-only and shortened exports."""
    return name.removeprefix("language_model.").removeprefix("model.")


def layer_prefix(layer: int) -> str:
    """Prefix of a layer's tensors after :func:`normalise_name`."""
    return f"layers.{layer}."


def expert_prefix(expert: int) -> str:
    """Prefix of one routed expert's tensors inside its layer."""
    return f"block_sparse_moe.experts.{expert}."


def head_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """Tensors outside the layers, by normalised name. ``lm_head`` is optional when embeddings are tied."""
    vocab, hidden = config.vocab_size, config.hidden_size
    table = {
        "embed_tokens.weight": _plain(config, vocab, hidden),
        "lm_head.weight": _plain(config, vocab, hidden, required=not config.tie_embeddings),
        "norm.weight": _plain(config, hidden),
    }
    if config.attn_res_block is not None:
        table["output_attn_res_norm.weight"] = _plain(config, hidden)
        table["output_attn_res_proj.weight"] = _vector_row(config)
    return table


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Tensors of one layer without its routed experts, by name inside the layer (``self_attn.q_proj.weight``)."""
    hidden = config.hidden_size
    table = {
        "input_layernorm.weight": _plain(config, hidden),
        "post_attention_layernorm.weight": _plain(config, hidden),
    }
    if config.attn_res_block is not None:
        for name in ("self_attention_res", "mlp_res"):
            table[f"{name}_norm.weight"] = _plain(config, hidden)
            table[f"{name}_proj.weight"] = _vector_row(config)
    # `self_attn.g_proj` is the KDA output gate or the MLA output gate: only the layer type tells them apart.
    if config.is_kda(layer):
        assert config.kda is not None
        attention = _kda_tensors(config, config.kda)
    else:
        assert config.mla is not None
        attention = _mla_tensors(config, config.mla)
    table.update({f"self_attn.{name}": spec for name, spec in attention.items()})
    if config.is_moe(layer):
        assert config.moe is not None
        table.update({f"block_sparse_moe.{name}": spec for name, spec in _moe_tensors(config, config.moe).items()})
    else:
        table.update({f"mlp.{name}": spec for name, spec in _gated_mlp_tensors(config, config.dense_width).items()})
    return table


def expert_tensors(config: ModelConfig, mxfp4: bool) -> dict[str, TensorSpec]:
    """Tensors of one routed expert by name (``w1.weight_packed``), MXFP4 pairs or plain matrices."""
    if config.moe is None:
        return {}
    width, latent = config.moe.width, config.moe.latent_dim or config.hidden_size
    table = {}
    for matrix, (rows, columns) in zip(
        EXPERT_MATRICES, ((width, latent), (latent, width), (width, latent)), strict=True
    ):
        if mxfp4:
            table[f"{matrix}.weight_packed"] = TensorSpec((rows, columns // 2), "U8", ("U8",))
            table[f"{matrix}.weight_scale"] = TensorSpec((rows, columns // EXPERT_GROUP), "U8", ("U8",))
        else:
            table[f"{matrix}.weight"] = _plain(config, rows, columns)
    return table


def checkpoint_tensors(config: ModelConfig, mxfp4: bool | None = None) -> Iterator[tuple[str, TensorSpec]]:
    """Every text tensor with its normalised name, layers in order, head last (the order of the published files).

    Args:
        mxfp4: how routed experts are stored; None: as published.
    """
    experts = expert_tensors(config, published_mxfp4(config) if mxfp4 is None else mxfp4)
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        for name, spec in layer_tensors(config, layer).items():
            yield prefix + name, spec
        if config.is_moe(layer) and config.moe is not None:
            for expert in range(config.moe.num_experts):
                for name, spec in experts.items():
                    yield prefix + expert_prefix(expert) + name, spec
    yield from head_tensors(config).items()


def checkpoint_totals(config: ModelConfig, mxfp4: bool | None = None) -> Totals:
    """Tensors, parameters and bytes of the text part, computed without listing every expert."""
    quantised = published_mxfp4(config) if mxfp4 is None else mxfp4
    parts: list[tuple[str, TensorSpec, int]] = [
        (name, spec, 1)
        for name, spec in head_tensors(config).items()
        if spec.required  # a tied lm_head is not stored
    ]
    for layer in range(config.num_layers):
        parts += [(name, spec, 1) for name, spec in layer_tensors(config, layer).items()]
        if config.is_moe(layer) and config.moe is not None:
            parts += [(name, spec, config.moe.num_experts) for name, spec in expert_tensors(config, quantised).items()]
    return sum_totals(parts)


def sum_totals(parts: list[tuple[str, TensorSpec, int]]) -> Totals:
    """Adds up ``(name, spec, how many)``."""
    bytes_by_dtype: dict[str, int] = {}
    num_parameters = 0
    for name, spec, count in parts:
        bytes_by_dtype[spec.dtype] = bytes_by_dtype.get(spec.dtype, 0) + spec.num_bytes * count
        per_element = 2 if name.endswith(".weight_packed") else 0 if name.endswith(".weight_scale") else 1
        num_parameters += spec.num_elements * per_element * count
    return Totals(sum(count for _, _, count in parts), num_parameters, bytes_by_dtype)


def _plain(config: ModelConfig, *shape: int, required: bool = True) -> TensorSpec:
    if config.dtype == "float32":
        return TensorSpec(shape, "F32", ("F32", "BF16"), required=required)
    return TensorSpec(shape, "BF16", ("BF16",), required=required)


def _vector_row(config: ModelConfig) -> TensorSpec:
    """An AttnRes score vector: a Linear with one output, so stored with a leading 1."""
    base = _plain(config, 1, config.hidden_size)
    return TensorSpec(base.shape, base.dtype, base.dtypes, alternatives=((config.hidden_size,),))


def _island(config: ModelConfig, *shape: int, alternatives: tuple[tuple[int, ...], ...] = ()) -> TensorSpec:
    """Computed in float32 whatever the model's type is. K3 stores it so, Kimi-Linear stores the model's type."""
    dtype = "F32" if config.family == "kimi-k3" or config.dtype == "float32" else "BF16"
    return TensorSpec(shape, dtype, ("F32", "BF16"), alternatives)


def _kda_tensors(config: ModelConfig, kda: KdaConfig) -> dict[str, TensorSpec]:
    hidden, width, head_dim, heads = config.hidden_size, kda.width, kda.head_dim, kda.num_heads
    table = {f"{stream}_proj.weight": _plain(config, width, hidden) for stream in "qkv"}
    for stream in "qkv":
        table[f"{stream}_conv1d.weight"] = _island(
            config, width, 1, kda.conv_width, alternatives=((width, kda.conv_width),)
        )
    table["f_a_proj.weight"] = _plain(config, head_dim, hidden)
    table["f_b_proj.weight"] = _plain(config, width, head_dim)
    table["b_proj.weight"] = _plain(config, heads, hidden)
    # K3 pads to the head dimension (96 heads stored as 128 numbers), Kimi-Linear keeps a broadcastable 4-D tensor.
    a_log = (max(heads, head_dim),) if config.family == "kimi-k3" else (1, 1, heads, 1)
    table["A_log"] = TensorSpec(a_log, "F32", ("F32", "BF16"), heads=heads, head_dim=head_dim)
    table["dt_bias"] = TensorSpec((width,), "F32", ("F32", "BF16"))
    if kda.full_rank_gate:
        table["g_proj.weight"] = _plain(config, width, hidden)
    else:
        table["g_a_proj.weight"] = _plain(config, head_dim, hidden)
        table["g_b_proj.weight"] = _plain(config, width, head_dim)
    table["o_norm.weight"] = _island(config, head_dim)
    table["o_proj.weight"] = _plain(config, hidden, width)
    return table


def _mla_tensors(config: ModelConfig, mla: MlaConfig) -> dict[str, TensorSpec]:
    hidden, heads = config.hidden_size, mla.num_heads
    table = {}
    if mla.q_lora_rank is None:
        table["q_proj.weight"] = _plain(config, heads * mla.qk_dim, hidden)
    else:
        table["q_a_proj.weight"] = _plain(config, mla.q_lora_rank, hidden)
        table["q_a_layernorm.weight"] = _plain(config, mla.q_lora_rank)
        table["q_b_proj.weight"] = _plain(config, heads * mla.qk_dim, mla.q_lora_rank)
    table["kv_a_proj_with_mqa.weight"] = _plain(config, mla.cache_dim, hidden)
    table["kv_a_layernorm.weight"] = _plain(config, mla.kv_lora_rank)
    table["kv_b_proj.weight"] = _plain(config, heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank)
    if mla.output_gate:
        table["g_proj.weight"] = _plain(config, heads * mla.v_dim, hidden)
    table["o_proj.weight"] = _plain(config, hidden, heads * mla.v_dim)
    return table


def _moe_tensors(config: ModelConfig, moe: MoeConfig) -> dict[str, TensorSpec]:
    hidden = config.hidden_size
    table = {"gate.weight": _plain(config, moe.num_experts, hidden)}
    if moe.correction_bias:
        table["gate.e_score_correction_bias"] = _island(config, moe.num_experts)
    if moe.latent_dim is not None:
        table["routed_expert_down_proj.weight"] = _plain(config, moe.latent_dim, hidden)
        if moe.latent_norm:
            table["routed_expert_norm.weight"] = _plain(config, moe.latent_dim)
        table["routed_expert_up_proj.weight"] = _plain(config, hidden, moe.latent_dim)
    if moe.num_shared:
        shared = _gated_mlp_tensors(config, moe.shared_width)
        table.update({f"shared_experts.{name}": spec for name, spec in shared.items()})
    return table


def _gated_mlp_tensors(config: ModelConfig, width: int) -> dict[str, TensorSpec]:
    hidden = config.hidden_size
    return {
        "gate_proj.weight": _plain(config, width, hidden),
        "up_proj.weight": _plain(config, width, hidden),
        "down_proj.weight": _plain(config, hidden, width),
    }
