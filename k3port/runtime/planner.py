"""From a model config to the queries of the oracle. Without torch, so that plans can be made anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from k3port.model.config import ModelConfig
from k3port.model.shapes import rank_dims
from k3port.ops.catalog import OPS
from k3port.oracle.spec import OpQuery


@dataclass(frozen=True)
class Workload:
    """How a model is to be run: what the oracle asks kernels about, beside the model's own sizes.

    Attributes:
        dtype: name of the activation dtype.
        weight_format: how the routed experts are stored: ``mxfp4``, ``bfloat16`` or ``float32``.
        kv_dtype: dtype of the latent cache; empty: the activation dtype.
        state_dtype: dtype of the recurrent state.
        query_tokens: 1 + drafts per request that a decode step verifies.
        graph: whether decode steps are captured into graphs.
        rounds: roundings of expert activations that are allowed, such as ``mxfp8``.
    """

    dtype: str
    weight_format: str = "bfloat16"
    kv_dtype: str = ""
    state_dtype: str = "float32"
    tp: int = 1
    ep: int = 1
    nodes: int = 1
    query_tokens: int = 1
    graph: bool = False
    deterministic: bool = False
    rounds: frozenset[str] = frozenset()


_KV_OPS = frozenset({"mla", "mla_append", "mla_attend"})
_STATE_OPS = frozenset({"kda", "kda_core"})
_EXPERT_OPS = frozenset({"moe", "moe_experts"})


def model_queries(config: ModelConfig, work: Workload) -> list[OpQuery]:
    """One query per op and phase that the model calls, and per fine op that a composite of them may call.

    Raises:
        ConfigError: the model cannot be split over ``tp`` ranks.
    """
    direct = _direct_axes(config, work.tp, mxfp4=work.weight_format == "mxfp4")
    queries: dict[str, OpQuery] = {}
    for op, axes in direct.items():
        for part in (op, *OPS[op].parts):
            for phase in OPS[part].phases:
                query = OpQuery(
                    op=part,
                    phase=phase,
                    axes=axes,
                    dtype=work.dtype,
                    weight_format=work.weight_format if part in _EXPERT_OPS else "",
                    kv_dtype=(work.kv_dtype or work.dtype) if part in _KV_OPS else "",
                    state_dtype=work.state_dtype if part in _STATE_OPS else "",
                    tp=work.tp,
                    ep=work.ep,
                    nodes=work.nodes,
                    query_tokens=work.query_tokens,
                    graph=work.graph,
                    deterministic=work.deterministic,
                    rounds=work.rounds if part in _EXPERT_OPS else frozenset(),
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
