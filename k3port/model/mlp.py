"""Feed-forward parts of a layer: the dense MLP, and the latent mixture of experts with its shared MLP."""

from __future__ import annotations

import torch

from k3port.model.config import ActivationConfig, MoeConfig
from k3port.model.params import ParamReader
from k3port.model.weights import EXPERTS
from k3port.ops.moe import RouterParams
from k3port.ops.table import OpTable


def activation_caps(config: ActivationConfig) -> tuple[float | None, float | None]:
    """``(beta, linear_beta)`` as the ops take them: beta None selects SwiGLU."""
    return (config.beta, config.linear_beta) if config.kind == "situ" else (None, None)


class DenseMlp:
    """The gated MLP of a dense layer on one rank, summed over ranks."""

    __slots__ = ("beta", "down", "gate_up", "linear_beta", "table")

    def __init__(self, activation: ActivationConfig, params: ParamReader, table: OpTable) -> None:
        self.table = table
        self.gate_up, self.down = params.tensor("gate_up"), params.tensor("down")
        self.beta, self.linear_beta = activation_caps(activation)

    def __call__(self, h_TD: torch.Tensor) -> torch.Tensor:
        table = self.table
        return table.all_reduce(table.dense_mlp(h_TD, self.gate_up, self.down, self.beta, self.linear_beta))


class LatentMoe:
    """Routed experts in a latent space plus the shared experts, which see the hidden state itself."""

    __slots__ = (
        "beta",
        "experts",
        "latent_down",
        "latent_norm",
        "latent_up",
        "linear_beta",
        "norm_eps",
        "router",
        "shared_down",
        "shared_gate_up",
        "table",
    )

    def __init__(
        self, config: MoeConfig, activation: ActivationConfig, norm_eps: float, params: ParamReader, table: OpTable
    ) -> None:
        self.table = table
        self.norm_eps = norm_eps
        self.beta, self.linear_beta = activation_caps(activation)
        has_latent = config.latent_dim is not None
        self.latent_down = params.tensor("latent_down") if has_latent else None
        self.latent_norm = params.tensor("latent_norm") if config.latent_norm else None
        self.latent_up = params.tensor("latent_up") if has_latent else None
        self.shared_gate_up = params.tensor("shared_gate_up") if config.num_shared else None
        self.shared_down = params.tensor("shared_down") if config.num_shared else None
        self.experts = params.any(EXPERTS.removeprefix("moe."))
        self.router = RouterParams(
            weight=params.tensor("router"),
            bias=params.tensor("correction_bias") if config.correction_bias else None,
            top_k=config.top_k,
            softmax=config.router_activation == "softmax",
            renormalize=config.renormalize,
            scaling_factor=config.scaling_factor,
            num_groups=config.num_groups,
            top_k_groups=config.top_k_groups,
        )

    def __call__(self, h_TD: torch.Tensor) -> torch.Tensor:
        table = self.table
        x_TL = h_TD if self.latent_down is None else table.linear(h_TD, self.latent_down)
        routed = table.moe(h_TD, x_TL, self.router, self.experts, self.beta, self.linear_beta)
        # The ranks' partial sums must be complete before the norm, which is not linear.
        routed = table.all_reduce(routed)
        if self.latent_norm is not None:
            routed = table.rms_norm(routed, self.latent_norm, self.norm_eps)
        if self.latent_up is not None:
            routed = table.linear(routed, self.latent_up)
        if self.shared_gate_up is None:
            return routed
        shared = table.dense_mlp(h_TD, self.shared_gate_up, self.shared_down, self.beta, self.linear_beta)
        return routed + table.all_reduce(shared)
