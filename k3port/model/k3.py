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


class Layer:
    """One layer's sublayers and norms; how their outputs are added up is the model's business."""

    __slots__ = ("attention", "attn_res", "index", "input_norm", "is_kda", "mlp", "mlp_res", "post_norm")

    def __init__(self, index: int, config: ModelConfig, dims: Any, params: ParamReader, table: OpTable) -> None:
        self.index = index
        self.is_kda = config.is_kda(index)
        self.input_norm, self.post_norm = params.tensor("input_norm"), params.tensor("post_norm")
        self.attn_res: tuple[torch.Tensor, torch.Tensor] | None = None
        self.mlp_res: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.attn_res_block is not None:
            self.attn_res = (params.tensor("attn_res.norm"), params.tensor("attn_res.proj"))
            self.mlp_res = (params.tensor("mlp_res.norm"), params.tensor("mlp_res.proj"))
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
        self.output_res: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.attn_res_block is not None:
            self.output_res = (reader.tensor("output_attn_res.norm"), reader.tensor("output_attn_res.proj"))
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
        table = self.table
        p_TD = table.all_reduce(table.embed(step.token_ids, self.embed, self.first_id))
        if self.config.attn_res_block is None:
            x_TD = self._residual_stream(p_TD, step, state, probe)
        else:
            x_TD = self._attention_residuals(p_TD, step, state, probe)
        if probe is not None:
            probe.final_mix(x_TD)
        x_RD = table.rms_norm(x_TD[step.logit_rows], self.norm, self.config.norm_eps)
        return table.all_gather(table.logits(x_RD, self.lm_head))

    def _residual_stream(self, p_TD: torch.Tensor, step: Step, state: ModelState, probe: Probe | None) -> torch.Tensor:
        """Ordinary pre-norm layers: each sublayer is added to one running sum."""
        for layer in self.layers:
            p_TD = p_TD + self._attention(layer, p_TD, step, state, probe)
            p_TD = p_TD + self._mlp(layer, p_TD, probe)
            if probe is not None:
                probe.residual(layer.index, p_TD)
        return p_TD

    def _attention_residuals(
        self, p_TD: torch.Tensor, step: Step, state: ModelState, probe: Probe | None
    ) -> torch.Tensor:
        """Each sublayer reads a mixture of the finished blocks and the running sum; a new block starts every
        ``attn_res_block`` layers, after that layer's first mixture and before its attention."""
        table, eps, block = self.table, self.config.norm_eps, self.config.attn_res_block
        assert block is not None
        # One slot per block and none for the running sum, which must not be overwritten by the last block.
        bank_RTD = p_TD.new_empty(self.config.num_blocks, *p_TD.shape)
        num_blocks = 0
        for layer in self.layers:
            assert layer.attn_res is not None
            assert layer.mlp_res is not None
            x_TD = table.attn_res(bank_RTD[:num_blocks], p_TD, *layer.attn_res, eps) if num_blocks else p_TD
            starts_block = layer.index % block == 0
            if starts_block:
                bank_RTD[num_blocks] = p_TD
                num_blocks += 1
            y_TD = self._attention(layer, x_TD, step, state, probe)
            p_TD = y_TD if starts_block else p_TD + y_TD
            x_TD = table.attn_res(bank_RTD[:num_blocks], p_TD, *layer.mlp_res, eps)
            p_TD = p_TD + self._mlp(layer, x_TD, probe)
            if probe is not None:
                probe.residual(layer.index, p_TD)
        assert self.output_res is not None
        return table.attn_res(bank_RTD[:num_blocks], p_TD, *self.output_res, eps)

    def _attention(
        self, layer: Layer, x_TD: torch.Tensor, step: Step, state: ModelState, probe: Probe | None
    ) -> torch.Tensor:
        h_TD = self.table.rms_norm(x_TD, layer.input_norm, self.config.norm_eps)
        if isinstance(layer.attention, KdaAttention):
            y_TD = layer.attention(h_TD, state.kda[layer.index], step.segments)
        else:
            y_TD = layer.attention(h_TD, state.mla[layer.index], step.segments)
        y_TD = self.table.all_reduce(y_TD)
        if probe is not None:
            probe.sublayer(layer.index, "attention", y_TD)
        return y_TD

    def _mlp(self, layer: Layer, x_TD: torch.Tensor, probe: Probe | None) -> torch.Tensor:
        z_TD = layer.mlp(self.table.rms_norm(x_TD, layer.post_norm, self.config.norm_eps))
        if probe is not None:
            probe.sublayer(layer.index, "mlp", z_TD)
        return z_TD
