"""An MLA layer: projections around the ``mla`` op."""

from __future__ import annotations

import torch

from k3port.model.config import MlaConfig
from k3port.model.params import ParamReader
from k3port.model.shapes import RankDims, mla_in_proj_rows
from k3port.ops.mla import MlaParams
from k3port.ops.segment import Segment
from k3port.ops.table import OpTable


class MlaAttention:
    """Multi-head latent attention of one layer on one rank; the result still needs the sum over ranks."""

    __slots__ = (
        "has_gate",
        "in_proj",
        "inner_eps",
        "num_heads",
        "o_proj",
        "params",
        "q_a_norm",
        "q_b",
        "splits",
        "table",
    )

    def __init__(self, config: MlaConfig, dims: RankDims, params: ParamReader, table: OpTable) -> None:
        self.table = table
        self.in_proj = params.tensor("in_proj")
        self.splits = list(mla_in_proj_rows(dims).values())
        self.has_gate = config.output_gate
        low_rank = config.q_lora_rank is not None
        self.q_a_norm = params.tensor("q_a_norm") if low_rank else None
        self.q_b = params.tensor("q_b") if low_rank else None
        self.o_proj = params.tensor("o_proj")
        self.num_heads = dims.mla_heads
        self.inner_eps = config.inner_norm_eps
        self.params = MlaParams(
            kv_a_norm=params.tensor("kv_a_norm"),
            kv_b=params.tensor("kv_b").unflatten(0, (dims.mla_heads, -1)),
            nope_dim=config.nope_dim,
            latent_dim=config.kv_lora_rank,
            scale=config.scale,
            norm_eps=config.inner_norm_eps,
        )

    def __call__(self, h_TD: torch.Tensor, cache: torch.Tensor, segments: tuple[Segment, ...]) -> torch.Tensor:
        """``[T, D]`` to this rank's share of ``[T, D]``; appends to the requests' caches."""
        table = self.table
        parts = table.linear(h_TD, self.in_proj).split(self.splits, dim=-1)
        q, kv, gate = parts[0], parts[1], parts[2] if self.has_gate else None
        if self.q_b is not None:
            q = table.linear(table.rms_norm(q, self.q_a_norm, self.inner_eps), self.q_b)
        q_THE = q.unflatten(-1, (self.num_heads, -1))
        outs = []
        for segment in segments:
            mla = table.mla_prefill if segment.phase == "prefill" else table.mla_decode
            rows = segment.rows
            gate_rows = None if gate is None else gate[rows]
            outs.append(mla(q_THE[rows], kv[rows], gate_rows, self.params, cache, segment))
        return table.linear(outs[0] if len(outs) == 1 else torch.cat(outs), self.o_proj)
