"""Kimi K3 and Kimi-Linear as one frozen record of switches and sizes. Without torch.

``model/config_file.py`` reads it from ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["situ", "silu"]
RouterActivation = Literal["sigmoid", "softmax"]


@dataclass(frozen=True)
class KdaConfig:
    """Kimi Delta Attention: head counts, convolution width, and the two gate switches."""

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    """None: softplus gate. A number in [-5, 0): bounded gate."""
    full_rank_gate: bool
    """True: one ``g_proj``. False: ``g_a_proj`` then ``g_b_proj``."""

    @property
    def width(self) -> int:
        """Channels of each of the q, k and v streams (heads x head_dim)."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention without positional encoding."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    """Plain extra content channels shared by all heads: they are not rotated."""
    v_dim: int
    output_gate: bool
    inner_norm_eps: float = 1e-6
    """Epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``: the official code leaves its class default, 1e-6."""

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """Numbers cached per token: the normed latent, then the shared key channels."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def scale(self) -> float:
        return self.qk_dim**-0.5


@dataclass(frozen=True)
class MoeConfig:
    """Routed and shared experts."""

    num_experts: int
    top_k: int
    num_shared: int
    width: int
    latent_dim: int | None
    """None: experts act on the hidden size directly."""
    latent_norm: bool
    router_activation: RouterActivation
    correction_bias: bool
    renormalize: bool
    scaling_factor: float
    num_groups: int
    top_k_groups: int
    first_dense_layers: int
    layer_freq: int

    @property
    def shared_width(self) -> int:
        """The shared experts are one merged MLP of this width."""
        return self.num_shared * self.width


@dataclass(frozen=True)
class ActivationConfig:
    """The gated activation of the dense MLP, the shared and the routed experts."""

    kind: Activation
    beta: float = 1.0
    linear_beta: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """One text model. ``family`` is only a label: behaviour follows the other fields."""

    family: Literal["kimi-k3", "kimi-linear"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    dense_width: int
    norm_eps: float
    max_context_tokens: int
    attn_res_block: int | None
    """Length of an Attention Residuals block in layers; None: an ordinary residual stream."""
    kda_layers: frozenset[int]
    """0-based ids of the KDA layers; every other layer is MLA."""
    kda: KdaConfig | None
    mla: MlaConfig | None
    moe: MoeConfig | None
    activation: ActivationConfig
    tie_embeddings: bool
    dtype: Literal["bfloat16", "float32"]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None
    has_vision: bool = False

    def is_kda(self, layer: int) -> bool:
        return layer in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        moe = self.moe
        return moe is not None and layer >= moe.first_dense_layers and layer % moe.layer_freq == 0

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers) if i not in self.kda_layers)

    @property
    def num_blocks(self) -> int:
        """Attention Residuals blocks that are banked over the whole depth."""
        return 0 if self.attn_res_block is None else -(-self.num_layers // self.attn_res_block)
