"""The model: embedding, layers with or without Attention Residuals, final norm, logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3port.model.config import ModelConfig
from k3port.model.kda import KdaAttention
from k3port.model.mla import MlaAttention
from k3port.model.mlp import DenseMlp, LatentMoe
from k3port.model.params import ParamReader
from k3port.model.shapes import rank_dims
from k3port.model.step import ModelState, Probe, Step
from k3port.ops.table import OpTable

Mixing = tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
"""Norm and projection of one mixture's sources; None without Attention Residuals."""


def _mixing(config: ModelConfig, params: ParamReader, name: str) -> Mixing:
    if config.attn_res_block is None:
        return None, None
    return params.tensor(f"{name}.norm"), params.tensor(f"{name}.proj")


class Layer:
    """One layer's sublayers, norms and mixtures; how their outputs are added up is the model's business."""

    __slots__ = (
        "attention",
        "attn_res",
        "index",
        "input_norm",
        "is_kda",
        "mlp",
        "mlp_res",
        "post_norm",
        "starts_block",
    )

    def __init__(self, index: int, config: ModelConfig, dims: Any, params: ParamReader, table: OpTable) -> None:
        self.index = index
        self.is_kda = config.is_kda(index)
        self.starts_block = config.attn_res_block is not None and index % config.attn_res_block == 0
        self.input_norm, self.post_norm = params.tensor("input_norm"), params.tensor("post_norm")
        self.attn_res, self.mlp_res = _mixing(config, params, "attn_res"), _mixing(config, params, "mlp_res")
        self.attention: KdaAttention | MlaAttention
        if self.is_kda:
            assert config.kda is not None
            self.attention = KdaAttention(config.kda, dims, config.norm_eps, params.below("kda."), table)
        else:
            assert config.mla is not None
            self.attention = MlaAttention(config.mla, dims, params.below("mla."), table)
        self.mlp: DenseMlp | LatentMoe
        if config.is_moe(index):
            assert config.moe is not None
            self.mlp = LatentMoe(config.moe, config.activation, config.norm_eps, params.below("moe."), table)
        else:
            self.mlp = DenseMlp(config.activation, params.below("mlp."), table)


class K3Model:
    """Kimi K3 or Kimi-Linear on one rank.

    Args:
        config: the model.
        params: one rank's parameters by the names of ``model/weights.py``.
        table: bound ops; read on every step, never changed.
        tp_rank, tp_size: this rank.

    Raises:
        KeyError: a parameter is missing.
        ValueError: a parameter was given that the model does not use.
    """

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Any], table: OpTable, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        reader = ParamReader(params)
        # The loader has refused a split that the experts' storage does not allow; the dims are the same for all.
        dims = rank_dims(config, tp_rank, tp_size, mxfp4=False)
        self.config, self.table = config, table
        self.embed = reader.tensor("embed.weight")
        self.first_id = tp_rank * dims.vocab
        self.layers = [Layer(i, config, dims, reader.below(f"layers.{i}."), table) for i in range(config.num_layers)]
        self.output_res = _mixing(config, reader, "output_attn_res")
        self.norm = reader.tensor("norm.weight")
        self.lm_head = reader.tensor("lm_head.weight")
        if reader.unread():
            raise ValueError(f"parameters that the model does not use: {reader.unread()[:5]}")

    def forward(self, step: Step, state: ModelState, probe: Probe | None = None) -> torch.Tensor:
        """One step.

        Args:
            step: tokens and requests; states and caches in ``state`` are updated in place.
            probe: an observer, for comparisons.

        Returns:
            float32 logits ``[R, V]`` of the rows ``step.logit_rows``, the whole vocabulary on every rank.
        """
        table, eps = self.table, self.config.norm_eps
        p_TD = table.all_reduce(table.embed(step.token_ids, self.embed, self.first_id))
        # One slot per block and none for the running sum, which must not be overwritten by the last block.
        bank_RTD = p_TD.new_empty(self.config.num_blocks, *p_TD.shape)
        # What a sublayer gives is added by the mixture that follows it; until then it is pending.
        pending_TD: torch.Tensor | None = None
        num_blocks = 0
        for layer in self.layers:
            start = layer.starts_block
            h_TD = table.attn_res(p_TD, pending_TD, bank_RTD, num_blocks, start, *layer.attn_res, layer.input_norm, eps)
            y_TD = self._attention(layer, h_TD, step, state, probe)
            if start:
                # The block before is finished and in the bank: the attention's output begins the new one.
                num_blocks += 1
                p_TD, pending_TD = y_TD, None
            else:
                pending_TD = y_TD
            h_TD = table.attn_res(p_TD, pending_TD, bank_RTD, num_blocks, False, *layer.mlp_res, layer.post_norm, eps)
            pending_TD = self._mlp(layer, h_TD, probe)
            if probe is not None:
                probe.residual(layer.index, p_TD + pending_TD)
        # No information crosses tokens any more: only the rows that need logits go on.
        assert pending_TD is not None
        rows = step.logit_rows
        last = (p_TD[rows], pending_TD[rows], bank_RTD[:, rows], num_blocks, False, *self.output_res)
        if probe is None:
            x_RD = table.attn_res(*last, self.norm, eps)
        else:
            mix_RD = table.attn_res(*last, None, eps)
            probe.final_mix(mix_RD)
            x_RD = table.rms_norm(mix_RD, self.norm, eps)
        return table.all_gather(table.logits(x_RD, self.lm_head))

    def _attention(
        self, layer: Layer, h_TD: torch.Tensor, step: Step, state: ModelState, probe: Probe | None
    ) -> torch.Tensor:
        if isinstance(layer.attention, KdaAttention):
            y_TD = layer.attention(h_TD, state.kda[layer.index], step.segments)
        else:
            y_TD = layer.attention(h_TD, state.mla[layer.index], step.segments)
        y_TD = self.table.all_reduce(y_TD)
        if probe is not None:
            probe.sublayer(layer.index, "attention", y_TD)
        return y_TD

    def _mlp(self, layer: Layer, h_TD: torch.Tensor, probe: Probe | None) -> torch.Tensor:
        z_TD = layer.mlp(h_TD)
        if probe is not None:
            probe.sublayer(layer.index, "mlp", z_TD)
        return z_TD
