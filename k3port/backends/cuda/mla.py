"""Latent attention from FlashInfer: five decode routes with their head rules, two prefill routes."""

from __future__ import annotations

from k3port.backends.limits import (
    AMPERE_AND_LATER,
    BLACKWELL,
    EXPANDED_DIMS,
    ITEM_BYTES,
    LATENT_DIMS,
    MIB,
    newer_than,
    round_up,
    step_tokens,
)
from k3port.oracle.spec import PRIORITY_VENDOR, AxisRule, KernelSpec, OpQuery, Padding, Requires, Target

_PACKAGE = "flashinfer-python"
_SOURCE = "FlashInfer 0.7.4"
_CACHE = {"mla_cache": "paged:latent"}
_MAJOR_10 = (*BLACKWELL, "sm_107")
_PACKED_HEADS = "0.6.17"
"""First release whose trtllm-gen kernels pack any head count up to 64 into padded tiles."""


def query_rounding(query: OpQuery, target: Target) -> str | None:
    """Query and cache have one type: a kernel without a mixed form takes fp8 in both or in none."""
    del target
    if ITEM_BYTES.get(query.kv_dtype) != 1:
        same = query.kv_dtype in ("", query.dtype)
        return None if same else f"a {query.dtype} query with a {query.kv_dtype} cache has no kernel"
    if "fp8_query" in query.rounds:
        return None
    return (
        f"a {query.dtype} query with a {query.kv_dtype} cache has no kernel; works: --kv-dtype "
        f"{query.dtype}, or queries rounded to {query.kv_dtype} as well: --fp8-queries"
    )


def trtllm_rule(query: OpQuery, target: Target) -> tuple[bool, str]:
    """Whether trtllm-gen takes this head count, and the rule that says so: it changed with FlashInfer 0.6.17."""
    heads = query.axes.get("H", 0)
    if newer_than(target, _PACKAGE, _PACKED_HEADS):
        rule = f"packed low-head rule of FlashInfer >= {_PACKED_HEADS}: up to 64 heads, or 128 and more"
        return not 64 < heads < 128, rule
    tile = 8 if heads <= 8 else 16 if heads <= 32 else 64
    rule = f"tile rule of FlashInfer < {_PACKED_HEADS}: a multiple of the tile of {tile} heads, or fewer than that"
    return heads % min(heads, tile) == 0, rule


def _trtllm_check(query: OpQuery, target: Target) -> str | None:
    if "H" in query.axes:
        fits, rule = trtllm_rule(query, target)
        if not fits:
            return f"H = {query.axes['H']} breaks the {rule}"
    return query_rounding(query, target)


def _trtllm_note(query: OpQuery, target: Target) -> str:
    return f"{query.axes['H']} heads pass the {trtllm_rule(query, target)[1]}" if "H" in query.axes else ""


def _trtllm_padding(query: OpQuery) -> Padding | None:
    heads = query.axes.get("H", 64)
    tile = next((tile for tile in (8, 16, 32, 64) if heads <= tile), heads)
    if tile == heads:
        return None
    return Padding(
        {"H": tile},
        f"{heads} heads in a tile of {tile}: {100 * (tile - heads) / heads:.0f}% of the tile's work is idle rows, "
        "nothing is stored for them",
    )


def _trtllm_workspace(query: OpQuery) -> int:
    """The general buffer, and the persistent counters of the kernels that share a long cache between blocks."""
    return 128 * MIB + round_up(step_tokens(query) * query.axes.get("H", 1), 8) * 4


def _cute_dsl_check(query: OpQuery, target: Target) -> str | None:
    if query.query_tokens >= 5 and not newer_than(target, _PACKAGE, "0.6.15"):
        return f"{query.query_tokens} new tokens per request need FlashInfer >= 0.6.15"
    return query_rounding(query, target)


def _cute_dsl_workspace(query: OpQuery) -> int:
    """Partial results of two splits: more are only used where few requests leave the device idle."""
    query_tiles = -(-query.query_tokens * query.axes.get("H", 128) // 128)
    requests = -(-step_tokens(query) // query.query_tokens)
    return requests * 128 * query_tiles * 2 * 513 * 4


def _decode(name: str, doc: str, requires: Requires, **fields: object) -> KernelSpec:
    spec: dict[str, object] = {
        "priority": PRIORITY_VENDOR,
        "phases": ("decode",),
        "layouts": _CACHE,
        "check": query_rounding,
        "source": _SOURCE,
        **fields,
    }
    return KernelSpec(name=f"cuda.flashinfer_mla_{name}", op="mla_attend", load="", doc=doc, requires=requires, **spec)  # type: ignore[arg-type]


KERNELS: tuple[KernelSpec, ...] = (
    _decode(
        "trtllm",
        "trtllm_batch_decode_with_kv_cache_mla, backend trtllm-gen",
        Requires(
            vendors=("nvidia",),
            archs=_MAJOR_10,
            dtypes=("bfloat16", "float16"),
            kv_dtypes=("bfloat16", "float16", "float8_e4m3fn"),
            axes=(*LATENT_DIMS, AxisRule("N", allowed=(64, 128, 192)), AxisRule("page", allowed=(32, 64))),
            packages=(f"{_PACKAGE}>=0.6",),
            runtime=("cuda>=12.8",),
        ),
        check=_trtllm_check,
        note=_trtllm_note,
        padding=_trtllm_padding,
        workspace_bytes=_trtllm_workspace,
        numerics="with an fp8 cache the scales of query and cache are folded into the softmax scale",
    ),
    _decode(
        "cute_dsl",
        "the same function, backend cute-dsl (monolithic)",
        Requires(
            vendors=("nvidia",),
            archs=_MAJOR_10,
            dtypes=("bfloat16", "float16"),
            kv_dtypes=("bfloat16", "float16", "float8_e4m3fn"),
            axes=(
                *LATENT_DIMS,
                AxisRule("H", minimum=1, maximum=128),
                AxisRule("page", allowed=(2, 4, 8, 16, 32, 64, 128)),
            ),
            packages=(f"{_PACKAGE}>=0.6",),
            runtime=("cuda>=12.8",),
        ),
        check=_cute_dsl_check,
        priority=PRIORITY_VENDOR - 5,
        workspace_bytes=_cute_dsl_workspace,
        numerics="float32 sums; compiled once per head count, query length, page and number of splits",
    ),
    _decode(
        "cake",
        "the same function, backend cake: a Kimi K3 kernel on an fp8 cache",
        Requires(
            vendors=("nvidia",),
            archs=BLACKWELL,
            dtypes=("bfloat16",),
            kv_dtypes=("float8_e4m3fn",),
            axes=(*LATENT_DIMS, AxisRule("page", allowed=(64,))),
            packages=(f"{_PACKAGE}>=0.7",),
            runtime=("cuda>=12.8",),
        ),
        priority=PRIORITY_VENDOR - 20,
        numerics="caches of 8192 tokens and more round probabilities to e4m3: absolute error up to 0.01",
    ),
    _decode(
        "xqa",
        "xqa_batch_decode_with_kv_cache_mla",
        Requires(
            vendors=("nvidia",),
            archs=("sm_120", "sm_121"),
            dtypes=("bfloat16",),
            kv_dtypes=("bfloat16", "float8_e4m3fn"),
            axes=(
                *LATENT_DIMS,
                AxisRule("H", allowed=(128,), why="built for 128 query heads only"),
                AxisRule("page", allowed=(16, 32, 64, 128)),
            ),
            query_tokens=1,
            packages=(f"{_PACKAGE}>=0.6",),
            runtime=("cuda>=12.8",),
        ),
        priority=PRIORITY_VENDOR - 10,
        workspace_bytes=lambda query: 128 * MIB,
    ),
    _decode(
        "wrapper",
        "BatchMLAPagedAttentionWrapper: fa3 on sm_90, fa2 elsewhere",
        Requires(
            vendors=("nvidia",),
            archs=AMPERE_AND_LATER,
            dtypes=("bfloat16", "float16"),
            kv_dtypes=("bfloat16", "float16"),
            axes=LATENT_DIMS,
            packages=(f"{_PACKAGE}>=0.6",),
        ),
        priority=PRIORITY_VENDOR - 30,
        workspace_bytes=lambda query: 128 * MIB,
        numerics="its plan copies lengths to the host before each step; graphs need four fixed index buffers",
    ),
    KernelSpec(
        name="cuda.flashinfer_mla_prefill_trtllm",
        op="mla_attend",
        load="",
        doc="trtllm_ragged_attention_deepseek on keys and values expanded per head",
        phases=("prefill",),
        requires=Requires(
            vendors=("nvidia",),
            archs=_MAJOR_10,
            dtypes=("bfloat16", "float16"),
            kv_dtypes=("bfloat16", "float16", "float8_e4m3fn"),
            axes=EXPANDED_DIMS,
            packages=(f"{_PACKAGE}>=0.6",),
            runtime=("cuda>=12.8",),
        ),
        priority=PRIORITY_VENDOR,
        layouts=_CACHE,
        workspace_bytes=lambda query: 394 * MIB,
        numerics="latents of an fp8 cache are expanded to the activation dtype; log-sum-exp comes in base 2",
        source=_SOURCE,
    ),
    KernelSpec(
        name="cuda.flashinfer_mla_prefill_cutlass",
        op="mla_attend",
        load="",
        doc="BatchPrefillWithRaggedKVCacheWrapper, backend cutlass",
        phases=("prefill",),
        requires=Requires(
            vendors=("nvidia",),
            archs=_MAJOR_10,
            dtypes=("bfloat16", "float16"),
            kv_dtypes=("bfloat16", "float16", "float8_e4m3fn"),
            axes=EXPANDED_DIMS,
            packages=(f"{_PACKAGE}>=0.6",),
            runtime=("cuda>=12.8",),
        ),
        priority=PRIORITY_VENDOR - 10,
        layouts=_CACHE,
        workspace_bytes=lambda query: 394 * MIB,
        numerics="its plan copies lengths to the host",
        source=_SOURCE,
    ),
)
