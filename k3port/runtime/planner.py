"""From a model config to the queries of the oracle. Without torch, so that plans can be made anywhere."""

from __future__ import annotations

from collections.abc import Mapping

from k3port.model.config import ModelConfig
from k3port.model.shapes import rank_dims
from k3port.ops.catalog import OPS
from k3port.oracle.spec import OpQuery


def model_queries(config: ModelConfig, *, dtype: str, tp: int = 1, weight_format: str = "bfloat16") -> list[OpQuery]:
    """One query per op and phase that the model calls, and per fine op that a composite of them may call.

    Args:
        dtype: name of the activation dtype.
        weight_format: how the routed experts are stored: ``mxfp4``, ``bfloat16`` or ``float32``.

    Raises:
        ConfigError: the model cannot be split over ``tp`` ranks.
    """
    direct = _direct_axes(config, tp, mxfp4=weight_format == "mxfp4")
    queries: dict[str, OpQuery] = {}
    for op, axes in direct.items():
        for part in (op, *OPS[op].parts):
            for phase in OPS[part].phases:
                query = OpQuery(
                    op=part,
                    phase=phase,
                    axes=axes,
                    dtype=dtype,
                    weight_format=weight_format if part in ("moe", "moe_experts") else "",
                    tp=tp,
                    direct=part in direct,
                )
                if part == op or part not in direct:
                    queries.setdefault(query.slot, query)
    return list(queries.values())


def _direct_axes(config: ModelConfig, tp: int, *, mxfp4: bool) -> dict[str, Mapping[str, int]]:
    """The ops that the model itself calls, with their sizes per rank."""
    dims = rank_dims(config, 0, tp, mxfp4=mxfp4)
    hidden = {"D": config.hidden_size}
    ops: dict[str, Mapping[str, int]] = {
        "embed": {**hidden, "V": dims.vocab},
        "linear": hidden,
        "rms_norm": hidden,
        "logits": {**hidden, "V": dims.vocab},
        "all_reduce": {**hidden, "ranks": tp},
        "all_gather": {"V": dims.vocab, "ranks": tp},
        "sample": {"V": config.vocab_size},
        "dense_mlp": {**hidden, "I": dims.dense_width or dims.shared_width},
    }
    if config.attn_res_block is not None:
        ops["attn_res"] = {**hidden, "R": config.num_blocks}
    if config.kda is not None:
        ops["kda"] = {"H": dims.kda_heads, "K": dims.kda_head_dim, "V": dims.kda_head_dim, "W": dims.conv_width}
    if config.mla is not None:
        ops["mla"] = {
            "H": dims.mla_heads,
            "C": dims.kv_lora_rank,
            "N": dims.nope_dim,
            "R": dims.rope_dim,
            "V": dims.v_dim,
        }
    if config.moe is not None:
        ops["moe"] = {
            **hidden,
            "E": dims.num_experts,
            "X": config.moe.top_k,
            "I": dims.expert_width,
            "L": dims.latent,
        }
    return ops
