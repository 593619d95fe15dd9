"""KDA from AITER: fused Gluon decode and verification, Gluon and Triton prefill. All of them keep float32 states."""

from __future__ import annotations

from k3port.backends.limits import CDNA, FUSED_KDA_DIMS, KDA_DIMS
from k3port.ops.catalog import OPS
from k3port.oracle.spec import PRIORITY_VENDOR, KernelSpec, OpQuery, Requires, Target

_GLUON_ARCHS = ("gfx950", "gfx1250")
_GLUON_SOURCE = "AITER after e4048607 (2026-08-22), which does not have it yet"
_SOURCE = "AITER e4048607 (2026-08-22)"
_STATE = {"kda_state": "vk:float32"}
_BOTH = {**_STATE, "conv_state": "wp"}


def verify_only(query: OpQuery, target: Target) -> str | None:
    del target
    return None if query.query_tokens > 1 else "verifies drafts, this decode has none"


def _gluon(symbol: str, axes: tuple, *, query_tokens: int | None = None) -> Requires:
    return Requires(
        vendors=("amd",),
        archs=_GLUON_ARCHS,
        dtypes=("bfloat16",),
        state_dtypes=("float32",),
        axes=axes,
        query_tokens=query_tokens,
        packages=("amd-aiter>=0.1.20", "triton>=3.6"),
        symbols=(f"aiter.ops.triton.attention.{symbol}",),
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="rocm.aiter_kda_decode",
        op="kda",
        load="",
        doc="fused_recurrent_kda_packed_decode: convolution, gate, recurrence and gated norm in one Gluon kernel",
        phases=("decode",),
        requires=_gluon("kda:fused_recurrent_kda_packed_decode", FUSED_KDA_DIMS, query_tokens=1),
        priority=PRIORITY_VENDOR,
        layouts=_BOTH,
        covers=OPS["kda"].parts,
        source=_GLUON_SOURCE,
    ),
    KernelSpec(
        name="rocm.aiter_kda_verify",
        op="kda_core",
        load="",
        doc="fused_recurrent_kda with accepted draft counts, gate and beta from raw numbers",
        phases=("decode",),
        requires=_gluon("kda:fused_recurrent_kda", KDA_DIMS),
        check=verify_only,
        priority=PRIORITY_VENDOR,
        layouts=_STATE,
        source=_GLUON_SOURCE,
    ),
    KernelSpec(
        name="rocm.aiter_kda_prefill",
        op="kda",
        load="",
        doc="chunk_kda: gate, chunks of 64 tokens and gated norm in Gluon",
        phases=("prefill",),
        requires=_gluon("chunk_kda:chunk_kda", KDA_DIMS),
        priority=PRIORITY_VENDOR,
        layouts=_BOTH,
        parts=("short_conv",),
        covers=("kda_core", "gated_norm"),
        graph_safe=False,
        source=_GLUON_SOURCE,
    ),
    KernelSpec(
        name="rocm.aiter_kda_chunk",
        op="kda_core",
        load="",
        doc="chunk_kimi_delta_attn in Triton, gate and beta from raw numbers",
        phases=("prefill",),
        requires=Requires(
            vendors=("amd",),
            archs=CDNA,
            dtypes=("bfloat16",),
            state_dtypes=("float32",),
            axes=KDA_DIMS,
            packages=("amd-aiter>=0.1.20", "triton>=3.4"),
            symbols=("aiter.ops.triton.kimi_delta_attn.chunk_delta_attn:chunk_kimi_delta_attn",),
        ),
        priority=PRIORITY_VENDOR,
        layouts=_STATE,
        source=_SOURCE,
    ),
)
