"""Latent attention from AITER: assembly, Gluon and Triton decode, three prefill routes."""

from __future__ import annotations

from k3port.backends.limits import (
    CDNA,
    EXPANDED_DIMS,
    LATENT_DIMS,
    TRITON_AMD,
    fp8_dtype,
    pad_heads,
    readable_cache,
    round_up,
)
from k3port.oracle.spec import PRIORITY_VENDOR, AxisRule, KernelSpec, OpQuery, Requires, Target

_SOURCE = "AITER e4048607 (2026-08-22)"
_PACKAGE = "amd-aiter>=0.1.20"
"""First release whose decode takes ``causal``."""
_CACHE = {"mla_cache": "paged:latent"}
_FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")
_TILE = 16


def fp8_pair(query: OpQuery, target: Target) -> str | None:
    """Query and cache are both bfloat16, or both the architecture's own fp8: there is no mixed kernel."""
    if query.kv_dtype not in _FP8:
        return None
    arch = target.device.arch
    own = fp8_dtype(arch)
    if query.kv_dtype != own:
        return f"{arch} computes with {own}, the cache is {query.kv_dtype}: the same bits mean other numbers"
    if "fp8_query" in query.rounds:
        return None
    heads = query.axes.get("H", 0)
    padded = f" (heads padded to {round_up(heads, _TILE)})" if heads % _TILE else ""
    return (
        f"a {query.dtype} query with a {query.kv_dtype} cache has no kernel at {heads} heads on {arch}; nearest "
        f"settings that work: --kv-dtype {query.dtype}{padded}, or queries rounded to {own} as well: "
        f"--fp8-queries{padded}"
    )


def asm_check(query: OpQuery, target: Target) -> str | None:
    heads = query.axes.get("H", 0)
    if heads > 128 and heads % _TILE:
        return f"H = {heads}, above 128 heads it needs a multiple of {_TILE}"
    return fp8_pair(query, target)


def triton_check(query: OpQuery, target: Target) -> str | None:
    heads = query.axes.get("H", 0)
    if target.device.arch == "gfx942" and query.kv_dtype in _FP8 and heads > 64:
        return f"H = {heads}, an fp8 cache on gfx942 allows 64 heads: 64 KiB of LDS hold no more"
    return fp8_pair(query, target)


def _decode(name: str, doc: str, requires: Requires, **fields: object) -> KernelSpec:
    spec: dict[str, object] = {"layouts": _CACHE, "phases": ("decode",), "source": _SOURCE, **fields}
    return KernelSpec(name=f"rocm.aiter_mla_{name}", op="mla_attend", load="", doc=doc, requires=requires, **spec)  # type: ignore[arg-type]


def _prefill(name: str, doc: str, archs: tuple[str, ...], **fields: object) -> KernelSpec:
    return KernelSpec(
        name=f"rocm.aiter_mla_prefill_{name}",
        op="mla_attend",
        load="",
        doc=doc,
        phases=("prefill",),
        requires=Requires(
            vendors=("amd",),
            archs=archs,
            dtypes=("bfloat16", "float16"),
            kv_dtypes=("bfloat16", "float16", *_FP8),
            axes=EXPANDED_DIMS,
            packages=(_PACKAGE,),
        ),
        check=readable_cache,
        layouts=_CACHE,
        source=_SOURCE,
        **fields,  # type: ignore[arg-type]
    )


KERNELS: tuple[KernelSpec, ...] = (
    _decode(
        "asm",
        "aiter.mla.mla_decode_fwd: assembly in tiles of 16 heads",
        Requires(
            vendors=("amd",),
            archs=CDNA,
            dtypes=("bfloat16",),
            kv_dtypes=("bfloat16", *_FP8),
            axes=LATENT_DIMS,
            packages=(_PACKAGE,),
        ),
        check=asm_check,
        priority=PRIORITY_VENDOR,
        padding=pad_heads(_TILE),
        numerics="views the cache as pages of one token; reads no bfloat16 query against an fp8 cache",
    ),
    _decode(
        "gluon",
        "aiter.ops.triton.gluon.mla_gluon: tiles for small head counts",
        Requires(
            vendors=("amd",),
            archs=("gfx950",),
            dtypes=("bfloat16",),
            # Its fp8 form asserts one request per batch in some releases.
            kv_dtypes=("bfloat16",),
            axes=(*LATENT_DIMS, AxisRule("H", minimum=1, maximum=96)),
            packages=(_PACKAGE, "triton>=3.7"),
            symbols=("aiter.ops.triton.gluon.mla_gluon:mla_gluon",),
            min_lds_bytes=160 << 10,
        ),
        priority=PRIORITY_VENDOR - 10,
        numerics="the cache of one layer may not exceed 2 GiB: its loads are not masked beyond that",
    ),
    _decode(
        "triton",
        "aiter.ops.triton.attention.mla.mla_decode_fwd: segments of the cache, then one merge",
        Requires(
            vendors=("amd",),
            archs=TRITON_AMD,
            dtypes=("bfloat16",),
            kv_dtypes=("bfloat16", *_FP8),
            axes=(*LATENT_DIMS, AxisRule("page", allowed=(1, 2, 4, 8, 16, 32, 64, 128))),
            packages=(_PACKAGE, "triton>=3.4"),
            symbols=("aiter.ops.triton.attention.mla:mla_decode_fwd",),
        ),
        check=triton_check,
        priority=PRIORITY_VENDOR - 20,
    ),
    _prefill(
        "fa",
        "aiter.flash_attn_varlen_func on keys and values expanded per head",
        CDNA,
        priority=PRIORITY_VENDOR,
        numerics="latents of an fp8 cache are expanded to the activation dtype",
    ),
    _prefill(
        "fp8",
        "aiter.mla.mla_prefill_ps_fwd: persistent, in fp8",
        ("gfx950",),
        priority=PRIORITY_VENDOR + 10,
        rounds="fp8_query",
        padding=pad_heads(_TILE),
        numerics="rounds queries, keys and values to e4m3",
    ),
    _prefill(
        "triton",
        "aiter.ops.triton.attention.mha.flash_attn_varlen_func",
        CDNA,
        priority=PRIORITY_VENDOR - 10,
    ),
)
