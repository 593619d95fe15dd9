"""The runtime's parameters: name, rank-local shape, number type, and the stored tensors each one is made of.

``model/text_tensors.py`` describes what a checkpoint stores; this file says what the model consumes. The loader follows
it, the model reads the names, plans add up its bytes. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from k3port.model.config import ModelConfig, MoeConfig
from k3port.model.shapes import (
    EXPERT_GROUP,
    RankDims,
    kda_in_proj_rows,
    mla_in_proj_rows,
    published_mxfp4,
    rank_dims,
)
from k3port.model.text_tensors import layer_prefix

EXPERTS = "moe.experts"
"""Name inside a layer of the packed routed experts: an object made by the chosen MoE kernel, not a :class:`Param`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of one stored tensor and where it goes.

    ``axis`` 0: the stored tensor, reshaped to ``[-1, *param.shape[1:]]`` (which flattens ``A_log`` and drops the
    middle 1 of a convolution), gives its rows ``start:stop``. ``axis`` 1: its columns ``start:stop``.
    """

    source: str
    """Normalised name."""
    start: int
    stop: int
    row: int = 0
    """First destination row."""
    axis: Literal[0, 1] = 0
    replicated: bool = False
    """The same slice on every rank."""


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor of the running model on one rank. Rows that no piece covers are zero."""

    name: str
    shape: tuple[int, ...]
    kind: Literal["model", "float32"]
    """``model``: the compute type. ``float32``: float32 whatever the compute type is."""
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def runtime_params(
    config: ModelConfig, tp_rank: int = 0, tp_size: int = 1, *, mxfp4: bool | None = None
) -> list[Param]:
    """Every parameter of one rank: embedding, layers in order, head. Routed experts are not among them (``EXPERTS``).

    With tied embeddings there is no ``lm_head.weight``: the loader shares ``embed.weight``.

    Args:
        mxfp4: how routed experts are stored, which limits the legal sizes; None: as published.

    Raises:
        ConfigError: the model cannot be split over ``tp_size`` ranks.
        UsageError: ``tp_rank`` does not exist.
    """
    dims = rank_dims(config, tp_rank, tp_size, mxfp4=mxfp4)
    params = embedding_params(dims)
    for layer in range(config.num_layers):
        params += layer_params(config, layer, dims)
    return params + head_params(config, dims)


def embedding_params(dims: RankDims) -> list[Param]:
    """``embed.weight`` [V/tp, D]."""
    return [_rows("embed.weight", [_split("embed_tokens.weight", dims, dims.vocab)], dims.hidden)]


def head_params(config: ModelConfig, dims: RankDims) -> list[Param]:
    """Final mix, final norm, and ``lm_head.weight`` [V/tp, D] unless embeddings are tied."""
    params = []
    if config.attn_res_block is not None:
        params.append(_vector("output_attn_res.norm", "output_attn_res_norm.weight", dims.hidden))
        params.append(_vector("output_attn_res.proj", "output_attn_res_proj.weight", dims.hidden))
    params.append(_vector("norm.weight", "norm.weight", dims.hidden))
    if not config.tie_embeddings:
        params.append(_rows("lm_head.weight", [_split("lm_head.weight", dims, dims.vocab)], dims.hidden))
    return params


def layer_params(config: ModelConfig, layer: int, dims: RankDims) -> list[Param]:
    """Parameters of one layer, without its routed experts; names start with ``layers.{layer}.``"""
    params = [
        _vector("input_norm", "input_layernorm.weight", dims.hidden),
        _vector("post_norm", "post_attention_layernorm.weight", dims.hidden),
    ]
    if config.attn_res_block is not None:
        for name, source in (("attn_res", "self_attention_res"), ("mlp_res", "mlp_res")):
            params.append(_vector(f"{name}.norm", f"{source}_norm.weight", dims.hidden))
            params.append(_vector(f"{name}.proj", f"{source}_proj.weight", dims.hidden))
    params += _kda_params(dims) if config.is_kda(layer) else _mla_params(dims)
    if config.is_moe(layer) and config.moe is not None:
        params += _moe_params(config.moe, dims)
    else:
        params += _gated_mlp_params("mlp.", "mlp.", dims, dims.dense_width)
    prefix = layer_prefix(layer)
    return [_prefixed(param, prefix) for param in params]


def expert_columns(dims: RankDims) -> tuple[int, int]:
    """The slice ``start, stop`` of every routed expert's width on this rank: rows of w1 and w3, columns of w2."""
    start = dims.tp_rank * dims.expert_width
    return start, start + dims.expert_width


def runtime_bytes(
    config: ModelConfig, tp_size: int, model_itemsize: int, *, mxfp4: bool | None = None
) -> dict[str, int]:
    """Bytes that one rank holds after loading, by kind: ``model``, ``float32`` and ``experts`` (as stored).

    Every rank holds the same number. The loader's ``bytes_by_kind`` agrees with it for experts kept as stored.

    Args:
        model_itemsize: bytes of one number of the compute type.
    """
    quantised = published_mxfp4(config) if mxfp4 is None else mxfp4
    dims = rank_dims(config, 0, tp_size, mxfp4=quantised)
    totals = {"model": 0, "float32": 0, "experts": 0}
    for param in runtime_params(config, 0, tp_size, mxfp4=quantised):
        totals[param.kind] += param.num_elements * (model_itemsize if param.kind == "model" else 4)
    num_moe_layers = sum(config.is_moe(layer) for layer in range(config.num_layers))
    numbers = num_moe_layers * dims.num_experts * 3 * dims.expert_width * dims.latent
    if quantised:
        totals["experts"] = numbers // 2 + numbers // EXPERT_GROUP
    else:
        totals["experts"] = numbers * (4 if config.dtype == "float32" else 2)
    return totals


def _kda_params(dims: RankDims) -> list[Param]:
    width, head_dim = dims.kda_width, dims.kda_head_dim
    parts = {
        part: _whole(f"self_attn.{part}_proj.weight", rows)
        if part in ("f_a", "g_a")
        else _split(f"self_attn.{part}_proj.weight", dims, rows)
        for part, rows in kda_in_proj_rows(dims).items()
        if part != "pad"
    }
    params = [
        _rows("kda.in_proj", parts.values(), dims.hidden, pad=kda_in_proj_rows(dims)["pad"]),
        _rows(
            "kda.conv",
            [_split(f"self_attn.{stream}_conv1d.weight", dims, width) for stream in "qkv"],
            dims.conv_width,
            kind="float32",
        ),
        _rows("kda.f_b", [_split("self_attn.f_b_proj.weight", dims, width)], head_dim),
    ]
    if not dims.full_rank_gate:
        params.append(_rows("kda.g_b", [_split("self_attn.g_b_proj.weight", dims, width)], head_dim))
    return [
        *params,
        # The rank's slice is counted in heads: what a file stores beyond the last head is padding.
        _rows("kda.A_log", [_split("self_attn.A_log", dims, dims.kda_heads)], kind="float32"),
        _rows("kda.dt_bias", [_split("self_attn.dt_bias", dims, width)], kind="float32"),
        _vector("kda.o_norm", "self_attn.o_norm.weight", head_dim, kind="float32"),
        _columns("kda.o_proj", "self_attn.o_proj.weight", dims, width),
    ]


def _mla_params(dims: RankDims) -> list[Param]:
    rows = mla_in_proj_rows(dims)
    parts = []
    if dims.q_lora_rank:
        parts.append(_whole("self_attn.q_a_proj.weight", rows["q_a"]))
    else:
        parts.append(_split("self_attn.q_proj.weight", dims, rows["q"]))
    parts.append(_whole("self_attn.kv_a_proj_with_mqa.weight", rows["kv_a"]))
    if dims.output_gate:
        parts.append(_split("self_attn.g_proj.weight", dims, rows["g"]))
    params = [_rows("mla.in_proj", parts, dims.hidden, pad=rows["pad"])]
    if dims.q_lora_rank:
        params.append(_vector("mla.q_a_norm", "self_attn.q_a_layernorm.weight", dims.q_lora_rank))
        params.append(_rows("mla.q_b", [_split("self_attn.q_b_proj.weight", dims, dims.q_width)], dims.q_lora_rank))
    kv_b_rows = dims.mla_heads * (dims.nope_dim + dims.v_dim)
    return [
        *params,
        _vector("mla.kv_a_norm", "self_attn.kv_a_layernorm.weight", dims.kv_lora_rank),
        _rows("mla.kv_b", [_split("self_attn.kv_b_proj.weight", dims, kv_b_rows)], dims.kv_lora_rank),
        _columns("mla.o_proj", "self_attn.o_proj.weight", dims, dims.v_width),
    ]


def _moe_params(moe: MoeConfig, dims: RankDims) -> list[Param]:
    source = "block_sparse_moe."
    params = [_rows("moe.router", [_whole(source + "gate.weight", dims.num_experts)], dims.hidden, kind="float32")]
    if moe.correction_bias:
        bias = source + "gate.e_score_correction_bias"
        params.append(_vector("moe.correction_bias", bias, dims.num_experts, kind="float32"))
    if moe.latent_dim is not None:
        down, up = source + "routed_expert_down_proj.weight", source + "routed_expert_up_proj.weight"
        params.append(_rows("moe.latent_down", [_whole(down, dims.latent)], dims.hidden))
        if moe.latent_norm:
            params.append(_vector("moe.latent_norm", source + "routed_expert_norm.weight", dims.latent))
        params.append(_rows("moe.latent_up", [_whole(up, dims.hidden)], dims.latent))
    if moe.num_shared:
        params += _gated_mlp_params("moe.shared_", source + "shared_experts.", dims, dims.shared_width)
    return params


def _gated_mlp_params(name: str, source: str, dims: RankDims, width: int) -> list[Param]:
    halves = [_split(f"{source}{half}_proj.weight", dims, width) for half in ("gate", "up")]
    return [
        _rows(f"{name}gate_up", halves, dims.hidden),
        _columns(f"{name}down", f"{source}down_proj.weight", dims, width),
    ]


def _split(source: str, dims: RankDims, rows: int) -> Piece:
    """This rank's ``rows`` rows of a tensor that is split evenly."""
    return Piece(source, dims.tp_rank * rows, (dims.tp_rank + 1) * rows)


def _whole(source: str, rows: int) -> Piece:
    return Piece(source, 0, rows, replicated=True)


def _vector(name: str, source: str, length: int, kind: Literal["model", "float32"] = "model") -> Param:
    return Param(name, (length,), kind, (_whole(source, length),))


def _rows(
    name: str, parts: Iterable[Piece], *columns: int, kind: Literal["model", "float32"] = "model", pad: int = 0
) -> Param:
    """Row blocks one after the other, then ``pad`` zero rows."""
    pieces, row = [], 0
    for part in parts:
        pieces.append(Piece(part.source, part.start, part.stop, row, replicated=part.replicated))
        row += part.stop - part.start
    return Param(name, (row + pad, *columns), kind, tuple(pieces))


def _columns(name: str, source: str, dims: RankDims, width: int) -> Param:
    """This rank's columns of an output projection ``[D, ...]``."""
    piece = Piece(source, dims.tp_rank * width, (dims.tp_rank + 1) * width, axis=1)
    return Param(name, (dims.hidden, width), "model", (piece,))


def _prefixed(param: Param, prefix: str) -> Param:
    pieces = tuple(
        Piece(prefix + piece.source, piece.start, piece.stop, piece.row, piece.axis, piece.replicated)
        for piece in param.pieces
    )
    return Param(prefix + param.name, param.shape, param.kind, pieces)
