"""KDA from FlashInfer and FlashKDA: fused decode, packed verification, recurrent decode, chunked prefill."""

from __future__ import annotations

from k3port.backends.limits import BLACKWELL, FUSED_KDA_DIMS, KDA_DIMS, head_builds
from k3port.ops.catalog import OPS
from k3port.oracle.spec import PRIORITY_VENDOR, KernelSpec, OpQuery, Requires, Target

_SOURCE = "FlashInfer 0.7.4"
_DECODE_HEADS = (8, 12, 16, 24, 32, 48, 64, 96)
_VERIFY_HEADS = (12, 24, 32, 48, 96)
_STATES = {"": "float32", "_bf16": "bfloat16"}
"""Name suffix by state dtype: a state has one dtype, so kernels that take both are declared once for each."""

_verify_heads = head_builds(_VERIFY_HEADS, "packed verification")


def _layouts(state: str) -> dict[str, str]:
    return {"kda_state": f"vk:{state}", "conv_state": "wp"}


def verify_only(query: OpQuery, target: Target) -> str | None:
    """Packed verification takes one to seven drafts per request, so two to eight new tokens."""
    if query.query_tokens < 2:
        return "verifies 1 to 7 drafts per request, this decode has none"
    return _verify_heads(query, target)


def _fused_decode(suffix: str, state: str) -> KernelSpec:
    return KernelSpec(
        name=f"cuda.flashinfer_kda_decode{suffix}",
        op="kda",
        load="",
        doc=f"fused_kda_decode: convolution, gate, recurrence and gated norm in one kernel, {state} state",
        phases=("decode",),
        requires=Requires(
            vendors=("nvidia",),
            archs=BLACKWELL,
            dtypes=("bfloat16",),
            state_dtypes=(state,),
            axes=FUSED_KDA_DIMS,
            query_tokens=1,
            packages=("flashinfer-python>=0.7",),
            runtime=("cuda>=12.8",),
        ),
        check=head_builds(_DECODE_HEADS, "fused decode"),
        priority=PRIORITY_VENDOR,
        layouts=_layouts(state),
        covers=OPS["kda"].parts,
        numerics="convolution taps and norm weight are float32",
        source=_SOURCE,
    )


def _verify(suffix: str, state: str) -> KernelSpec:
    return KernelSpec(
        name=f"cuda.flashinfer_kda_verify{suffix}",
        op="kda",
        load="",
        doc=f"packed_fused_kda_decode: one to seven drafts per request, {state} state",
        phases=("decode",),
        requires=Requires(
            vendors=("nvidia",),
            archs=BLACKWELL,
            dtypes=("bfloat16",),
            state_dtypes=(state,),
            axes=FUSED_KDA_DIMS,
            query_tokens=8,
            packages=("flashinfer-python>=0.7",),
            runtime=("cuda>=12.8",),
        ),
        check=verify_only,
        priority=PRIORITY_VENDOR,
        layouts=_layouts(state),
        covers=OPS["kda"].parts,
        source=_SOURCE,
    )


def prefill_heads(query: OpQuery, target: Target) -> str | None:
    """A float32 state takes the CuTe DSL and cuDNN routes up to 16 heads, the persistent one in eights beyond."""
    del target
    heads = query.axes.get("H")
    if query.state_dtype == "bfloat16" or heads is None or heads <= 16 or heads % 8 == 0:
        return None
    return f"H = {heads}, a float32 state needs at most 16 heads or a multiple of 8"


def _prefill(suffix: str, state: str, doc: str) -> KernelSpec:
    return KernelSpec(
        name=f"cuda.flashinfer_kda_prefill{suffix}",
        op="kda_core",
        load="",
        doc=f"recurrent_kda over whole sequences, gate and beta from raw numbers, {state} state: {doc}",
        phases=("prefill",),
        requires=Requires(
            vendors=("nvidia",),
            archs=BLACKWELL,
            dtypes=("bfloat16",),
            state_dtypes=(state,),
            axes=KDA_DIMS,
            packages=("flashinfer-python>=0.6.18",),
            runtime=("cuda>=12.8",),
        ),
        check=prefill_heads,
        priority=PRIORITY_VENDOR,
        layouts={"kda_state": f"vk:{state}"},
        # A plan of its cake route reads sequence lengths on the host.
        graph_safe=False,
        source=_SOURCE,
    )


def _flash_kda(suffix: str, state: str) -> KernelSpec:
    return KernelSpec(
        name=f"cuda.flash_kda_prefill{suffix}",
        op="kda",
        load="",
        doc=f"FlashKDA through fla-core: gate and recurrence in one kernel, {state} state",
        phases=("prefill",),
        requires=Requires(
            vendors=("nvidia",),
            archs=("sm_90", "sm_100", "sm_103", "sm_120", "sm_121"),
            dtypes=("bfloat16",),
            state_dtypes=(state,),
            axes=KDA_DIMS,
            packages=("flash-kda", "fla-core>=0.6.0"),
        ),
        priority=PRIORITY_VENDOR - 10,
        layouts=_layouts(state),
        parts=("short_conv", "gated_norm"),
        covers=("kda_core",),
        numerics="copies q, k, v and the gate to contiguous memory first",
        source="fla-core 0.6.0",
    )


KERNELS: tuple[KernelSpec, ...] = (
    *(_fused_decode(suffix, state) for suffix, state in _STATES.items()),
    *(_verify(suffix, state) for suffix, state in _STATES.items()),
    KernelSpec(
        name="cuda.flashinfer_kda_recurrent_bf16",
        op="kda_core",
        load="",
        doc="recurrent_kda, one token per request, gate and beta from raw numbers, bfloat16 state",
        phases=("decode",),
        requires=Requires(
            vendors=("nvidia",),
            archs=BLACKWELL,
            dtypes=("bfloat16",),
            state_dtypes=("bfloat16",),
            axes=KDA_DIMS,
            query_tokens=1,
            packages=("flashinfer-python>=0.6.18",),
            runtime=("cuda>=12.8",),
        ),
        priority=PRIORITY_VENDOR - 10,
        layouts={"kda_state": "vk:bfloat16"},
        source=_SOURCE,
    ),
    _prefill("", "float32", "CuTe DSL, persistent or cuDNN route"),
    _prefill("_bf16", "bfloat16", "small-batch, cuDNN or cake route"),
    *(_flash_kda(suffix, state) for suffix, state in _STATES.items()),
)
