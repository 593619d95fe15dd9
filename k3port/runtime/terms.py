"""What one rank holds, kind by kind: a constant, so much per request, so much per cached token. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from k3port.errors import K3Error
from k3port.model.config import ModelConfig
from k3port.model.shapes import RankDims, kda_in_proj_rows, mla_in_proj_rows, rank_dims
from k3port.model.vision_tensors import vision_tensors
from k3port.oracle.spec import KernelSpec, OpQuery
from k3port.runtime.groups import (
    Group,
    end_bytes,
    expert_storage,
    layer_bytes,
    local_experts,
    split_layers,
)

PAGE_TOKENS = 64
"""Rows of one page of the latent cache."""
GRAPH_BYTES = 1 << 30
"""Set aside for captured graphs and their private pools where decode is captured. An allowance, not a measurement.

It comes beside ``usable_share`` of a profile, which leaves room for the driver, libraries and fragmentation only.
"""

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1}


def item_bytes(dtype: str) -> int:
    """Bytes of one number; every 8-bit float takes one.

    Raises:
        K3Error: an unknown dtype.
    """
    if dtype.startswith(("float8", "fp8")):
        return 1
    if dtype not in _ITEM_BYTES:
        raise K3Error(f"unknown dtype {dtype!r}", hint=f"dtypes: {', '.join(_ITEM_BYTES)}, float8_e4m3fn")
    return _ITEM_BYTES[dtype]


@dataclass(frozen=True)
class Serving:
    """What a group serves at once.

    Attributes:
        context_tokens: prompt and answer of one request.
        concurrency: requests at once, over the whole group.
        prefill_chunk_tokens: most prompt tokens of one step.
        query_tokens: 1 + drafts that a decode step verifies per request.
        snapshots: keep one recurrent state per verified token, instead of one state and a record to replay.
        graphs: decode steps are captured.
    """

    context_tokens: int
    concurrency: int
    prefill_chunk_tokens: int = 1024
    query_tokens: int = 1
    snapshots: bool = False
    graphs: bool = False


@dataclass(frozen=True)
class Storage:
    """How numbers are stored, by dtype name."""

    activations: str
    experts: str
    cache: str
    state: str = "float32"

    @property
    def mxfp4(self) -> bool:
        return self.experts == "mxfp4"


Chosen = Sequence[tuple[KernelSpec, OpQuery]]
"""Kernels that a plan chose (or would choose), each with the query it was chosen for."""


@dataclass(frozen=True)
class Term:
    """One kind of memory: ``fixed + requests * per_request + tokens * per_token`` bytes."""

    kind: str
    arithmetic: str
    fixed: int = 0
    per_request: int = 0
    per_token: int = 0


def gib(size: int | float) -> str:
    """``12.3 GiB``, or a smaller unit below a tenth of one."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale / 10:
            return f"{size / scale:,.1f} {unit}"
    return f"{int(size)} B"


def vision_bytes(vision: Mapping[str, Any], hidden: int) -> int:
    """Bytes of the vision tower and projector of a ``vision_config``; every rank holds them whole.

    Raises:
        ConfigError: keys that give the shapes are missing.
    """
    return sum(spec.num_bytes for spec in vision_tensors({**vision, "text_hidden_size": hidden}).values())


def cache_bytes_per_token(config: ModelConfig, dtype: str, layers: int | None = None) -> int:
    """Latent cache of one token in all MLA layers (or in ``layers`` of them); the same on every rank."""
    count = len(config.mla_layers) if layers is None else layers
    return count * config.mla.cache_dim * item_bytes(dtype) if config.mla else 0


def state_bytes_per_request(config: ModelConfig, tp: int, dtype: str = "float32", layers: int | None = None) -> int:
    """One copy of the recurrent state of one request in all KDA layers (or in ``layers`` of them) on one rank."""
    count = len(config.kda_layers) if layers is None else layers
    if config.kda is None:
        return 0
    return count * (config.kda.num_heads // tp) * config.kda.head_dim**2 * item_bytes(dtype)


def expert_layer_bytes(config: ModelConfig, group: Group, weight_format: str, chosen: Chosen = ()) -> int:
    """Routed experts of one layer on one rank, with the padding of the chosen kernels."""
    experts, width, latent, _ = _expert_axes(config, group, chosen)
    return _expert_bytes(experts * 3 * width * latent, weight_format)


def _expert_bytes(numbers: int, weight_format: str) -> int:
    bits, per_scale, _ = expert_storage(weight_format)
    return numbers * bits // 8 + (numbers // per_scale if per_scale else 0)


def _expert_axes(config: ModelConfig, group: Group, chosen: Chosen) -> tuple[int, int, int, str]:
    """Experts, their width and latent size as the chosen kernels store them, and the kernel that rounds up."""
    experts, width = local_experts(config, group)
    latent = (config.moe.latent_dim or config.hidden_size) if config.moe else 0
    padded, by = (width, latent), ""
    for spec, query in chosen:
        if spec.padding is None or query.op not in ("moe", "moe_experts"):
            continue
        axes = {**query.axes, "I": width, "L": latent}
        padding = spec.padding(replace(query, axes=axes, tp=group.tp, ep=group.ep))
        if padding is not None:
            larger = (max(padded[0], padding.axes.get("I", 0)), max(padded[1], padding.axes.get("L", 0)))
            padded, by = larger, spec.name if larger != padded else by
    return experts, *padded, by


def rank_terms(
    config: ModelConfig, group: Group, serving: Serving, storage: Storage, chosen: Chosen = (), vision: int = 0
) -> list[Term]:
    """The terms of the fullest rank: all ranks of a stage hold the same, so of the fullest stage."""
    dims = rank_dims(config, 0, group.tp, mxfp4=storage.mxfp4)
    item = item_bytes(storage.activations)
    weights = layer_bytes(
        config,
        group,
        item,
        lambda g: expert_layer_bytes(config, g, storage.experts, chosen),
        mxfp4=storage.mxfp4,
    )
    embedding, head = end_bytes(config, group.tp, item, storage.mxfp4)
    if config.tie_embeddings and group.pp > 1:
        head += embedding
    requests, tokens = local_load(group, serving)
    state = _state_terms(config, dims, serving, storage, 1)
    per_kda = sum(term.per_request for term in state) * (requests + 1)
    per_mla = cache_bytes_per_token(config, storage.cache, 1) * tokens * requests
    costs = [
        w.model + w.float32 + w.experts + (per_kda if config.is_kda(layer) else per_mla)
        for layer, w in enumerate(weights)
    ]
    costs[0] += embedding + vision
    costs[-1] += head
    stages = split_layers(costs, group.pp)
    number, stage = max(enumerate(stages, start=1), key=lambda item: sum(costs[i] for i in item[1]))
    kda = sum(config.is_kda(layer) for layer in stage)
    moe = sum(config.is_moe(layer) for layer in stage)
    first, last = 0 in stage, config.num_layers - 1 in stage
    where = f"{kda} KDA + {len(stage) - kda} MLA layers"
    if group.pp > 1:
        where = f"stage {number} of {group.pp}, layers {stage.start}..{stage.stop - 1}: {where}"
    ends = [name for name, here in (("embedding", first), ("head", last)) if here]
    dense = sum(weights[i].model for i in stage) + embedding * first + head * last
    share = f"1/{group.tp} of the split matrices, the rest whole" if group.tp > 1 else "whole"
    terms = [
        Term("dense weights", f"{', '.join([where, *ends])}; {share}; {storage.activations}", dense),
        Term(
            "float32 weights",
            f"routers, gates, convolutions and norms that stay float32 in {len(stage)} layers",
            sum(weights[i].float32 for i in stage),
        ),
        _expert_term(config, group, storage, chosen, moe, sum(weights[i].experts for i in stage)),
        Term("vision", "tower and projector, whole on every rank of the first stage", vision * first),
        Term(
            "latent cache",
            f"{len(stage) - kda} MLA layers x {config.mla.cache_dim if config.mla else 0} x "
            f"{item_bytes(storage.cache)} B per token, on every tp rank; {{requests}} requests x {{tokens}} tokens",
            per_token=cache_bytes_per_token(config, storage.cache, len(stage) - kda),
        ),
        *_state_terms(config, dims, serving, storage, kda),
        *_step_terms(config, dims, group, serving, item),
    ]
    terms.append(_workspace_term(chosen, requests, serving))
    if serving.graphs:
        terms.append(Term("graphs", "allowance for captured decode steps", GRAPH_BYTES))
    return terms


def _expert_term(config: ModelConfig, group: Group, storage: Storage, chosen: Chosen, layers: int, total: int) -> Term:
    experts, width, latent, by = _expert_axes(config, group, chosen)
    _, plain_width = local_experts(config, group)
    plain_latent = (config.moe.latent_dim or config.hidden_size) if config.moe else 0
    text = f"{layers} layers x {experts} experts x 3 x {width} x {latent} x {expert_storage(storage.experts)[2]}"
    if (width, latent) != (plain_width, plain_latent):
        extra = width * latent / (plain_width * plain_latent) - 1
        text += f"; {by} rounds {plain_width} x {plain_latent} up to {width} x {latent}, +{extra:.0%}"
    return Term("routed experts", text, total)


def _state_terms(config: ModelConfig, dims: RankDims, serving: Serving, storage: Storage, layers: int) -> list[Term]:
    """Recurrent states and convolution tails. One slot more than requests: the null slot of padding rows."""
    if config.kda is None:
        return []
    one = state_bytes_per_request(config, dims.tp_size, storage.state, layers)
    head = dims.kda_head_dim
    text = (
        f"{layers} KDA layers x {dims.kda_heads} heads x {head} x {head} x {item_bytes(storage.state)} B = {gib(one)} "
        "per request; {requests} requests + 1 null slot"
    )
    drafts = serving.query_tokens - 1
    copies, record = 1, 0
    if drafts and serving.snapshots:
        copies = serving.query_tokens
        text += f"; {copies} copies for {drafts} drafts (replay would keep 1)"
    elif drafts:
        # k, g and u of every verified token: what a replay needs to reach the state after any of them.
        record = layers * serving.query_tokens * dims.kda_heads * 3 * head * 4
        text += f"; {drafts} drafts by replay: 1 copy + {gib(record)} of records (snapshots would keep "
        text += f"{serving.query_tokens} copies, {gib(one * serving.query_tokens)} per request)"
    columns = dims.conv_width - 1 + drafts
    tail = layers * columns * 3 * dims.kda_width * item_bytes(storage.activations)
    tail_text = (
        f"{layers} KDA layers x {columns} x 3 x {dims.kda_width} x {item_bytes(storage.activations)} B = {gib(tail)} "
        "per request"
    )
    per_request = one * copies + record
    return [
        Term("KDA state", text, per_request, per_request),
        Term("convolution tails", tail_text, tail, tail),
    ]


def _step_terms(config: ModelConfig, dims: RankDims, group: Group, serving: Serving, item: int) -> list[Term]:
    """What one step holds: a prefill chunk, and one decode row per request and verified token."""
    chunk, rows = serving.prefill_chunk_tokens, serving.query_tokens
    terms = []
    if config.attn_res_block is not None:
        bank = config.num_blocks * config.hidden_size * item
        text = f"{config.num_blocks} blocks x {config.hidden_size} x {item} B = {bank} B per token of a step"
        terms.append(Term("AttnRes bank", f"{text}; {chunk} + {{requests}} x {rows}", chunk * bank, rows * bank))
    width = _activation_width(config, dims, group)
    terms.append(
        Term(
            "activations",
            f"widest layer, {width} numbers x {item} B per token of a step; an estimate",
            chunk * width * item,
            rows * width * item,
        )
    )
    logits = (config.vocab_size + (dims.vocab if group.tp > 1 else 0)) * 4 * rows
    columns = f"({config.vocab_size} + this rank's {dims.vocab})" if group.tp > 1 else str(config.vocab_size)
    terms.append(Term("logits", f"{rows} x {columns} x 4 B per request; {{requests}} requests", 0, logits))
    return terms


def _workspace_term(chosen: Chosen, requests: int, serving: Serving) -> Term:
    """The largest scratch memory of a kernel, for the largest step that this load has, not for any step at all."""
    decode = requests * serving.query_tokens
    largest = {"decode": decode, "prefill": serving.prefill_chunk_tokens, None: serving.prefill_chunk_tokens + decode}
    found = (0, "", 0)
    for spec, query in chosen:
        (first, last), most = query.tokens, largest[query.phase]
        if spec.workspace_bytes is not None and first <= most:
            tokens = most if last is None else min(last, most)
            sized = replace(query, tokens=(first, tokens), axes={"B": requests, **query.axes})
            found = max(found, (spec.workspace_bytes(sized), spec.name, tokens))
    return Term("workspaces", f"largest one, of {found[1]} in a step of {found[2]} tokens", found[0])


def _activation_width(config: ModelConfig, dims: RankDims, group: Group) -> int:
    """Numbers per token that live at once in the widest layer, counted from the shapes of its projections."""
    widths = [2 * dims.dense_width]
    if config.kda is not None:
        widths.append(sum(kda_in_proj_rows(dims).values()) + 6 * dims.kda_width)
    if config.mla is not None:
        expanded = dims.mla_heads * (2 * dims.qk_dim + 2 * dims.v_dim)
        widths.append(sum(mla_in_proj_rows(dims).values()) + expanded)
    if config.moe is not None:
        _, width = local_experts(config, group)
        widths.append(config.moe.top_k * (2 * dims.latent + 3 * width) + 3 * dims.shared_width)
    return 4 * config.hidden_size + max(widths)


def local_load(group: Group, serving: Serving) -> tuple[int, int]:
    """Requests on one rank, and cached tokens of one request in whole pages."""
    return -(-serving.concurrency // group.attention_groups), -(-serving.context_tokens // PAGE_TOKENS) * PAGE_TOKENS
