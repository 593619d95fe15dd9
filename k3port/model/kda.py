"""A KDA layer: projections around the ``kda`` op."""

from __future__ import annotations

import torch

from k3port.model.config import KdaConfig
from k3port.model.params import ParamReader
from k3port.model.shapes import RankDims, kda_in_proj_rows
from k3port.ops.kda import KdaParams, KdaState
from k3port.ops.segment import Segment
from k3port.ops.table import OpTable


class KdaAttention:
    """Kimi Delta Attention of one layer on one rank; the result still needs the sum over ranks."""

    __slots__ = ("f_b", "g_b", "in_proj", "o_proj", "params", "splits", "table")

    def __init__(self, config: KdaConfig, dims: RankDims, norm_eps: float, params: ParamReader, table: OpTable) -> None:
        self.table = table
        self.in_proj = params.tensor("in_proj")
        rows = kda_in_proj_rows(dims)
        low_rank = not config.full_rank_gate
        # q, k and v stay together for the convolution.
        self.splits = [3 * dims.kda_width, *([] if low_rank else [rows["g"]]), rows["f_a"]]
        self.splits += [rows["g_a"]] if low_rank else []
        self.splits += [rows["b"], rows["pad"]]
        self.f_b = params.tensor("f_b")
        self.g_b = params.tensor("g_b") if low_rank else None
        self.o_proj = params.tensor("o_proj")
        self.params = KdaParams(
            conv=params.tensor("conv"),
            A_log=params.tensor("A_log"),
            dt_bias=params.tensor("dt_bias"),
            o_norm=params.tensor("o_norm"),
            num_heads=dims.kda_heads,
            head_dim=dims.kda_head_dim,
            lower_bound=config.gate_lower_bound,
            norm_eps=norm_eps,
        )

    def __call__(self, h_TD: torch.Tensor, state: KdaState, segments: tuple[Segment, ...]) -> torch.Tensor:
        """``[T, D]`` to this rank's share of ``[T, D]``; updates the requests' states."""
        table = self.table
        parts = table.linear(h_TD, self.in_proj).split(self.splits, dim=-1)
        if self.g_b is None:
            qkv, out_gate, f_a, beta_logit, _ = parts
        else:
            qkv, f_a, g_a, beta_logit, _ = parts
            out_gate = table.linear(g_a, self.g_b)
        gate_raw = table.linear(f_a, self.f_b)
        outs = []
        for segment in segments:
            kda = table.kda_prefill if segment.phase == "prefill" else table.kda_decode
            rows = segment.rows
            outs.append(kda(qkv[rows], gate_raw[rows], beta_logit[rows], out_gate[rows], self.params, state, segment))
        return table.linear(outs[0] if len(outs) == 1 else torch.cat(outs), self.o_proj)
