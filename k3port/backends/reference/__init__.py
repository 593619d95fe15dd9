"""The references as kernels: they run everywhere and are what every other kernel is measured against."""

from __future__ import annotations

from collections.abc import Sequence

from k3port.hookspecs import hookimpl
from k3port.ops.catalog import OPS, Phase
from k3port.oracle.spec import PRIORITY_REFERENCE, KernelSpec, Requires

_ONE_RANK = Requires(tp=(1,))
_FLOAT32_STATE = Requires(state_dtypes=("float32",))
_COMPOSITES = "k3port.backends.reference.composites"
_STORED = {"experts": "stored"}
_STATE = {"kda_state": "vk:float32", "conv_state": "wp"}
_CACHE = {"mla_cache": "paged:latent"}


def _wrap(op: str, function: str, **fields: object) -> KernelSpec:
    """The reference function of an op, as it stands."""
    spec = KernelSpec(
        name=f"reference.{op}",
        op=op,
        load=f"k3port.ops.{function}",
        doc=f"reference: {OPS[op].doc}",
        priority=PRIORITY_REFERENCE,
        fallback=True,
    )
    return _with(spec, fields)


def _composite(op: str, factory: str, suffix: str = "", phases: tuple[Phase, ...] = (), **fields: object) -> KernelSpec:
    """An op made of its parts, whichever kernels those are."""
    spec = KernelSpec(
        name=f"reference.{op}{suffix}",
        op=op,
        load=f"{_COMPOSITES}:{factory}",
        doc=f"made of parts: {OPS[op].doc}",
        phases=phases,
        parts=OPS[op].parts,
        priority=PRIORITY_REFERENCE,
    )
    return _with(spec, fields)


def _with(spec: KernelSpec, fields: dict[str, object]) -> KernelSpec:
    from dataclasses import replace

    return replace(spec, **fields)  # type: ignore[arg-type]


KERNELS: tuple[KernelSpec, ...] = (
    _wrap("embed", "linear:embed"),
    _wrap("linear", "linear:linear"),
    _wrap("logits", "linear:logits"),
    _wrap("rms_norm", "norm:rms_norm"),
    _wrap("gated_norm", "norm:gated_norm"),
    _wrap("attn_res", "residual:attn_res"),
    _wrap("situ_mul", "activation:situ_mul"),
    _wrap("short_conv", "conv:short_conv", layouts={"conv_state": "wp"}, records_drafts=True),
    _wrap(
        "kda_core", "kda:kda_core", layouts={"kda_state": "vk:float32"}, requires=_FLOAT32_STATE, records_drafts=True
    ),
    _wrap("kda_commit", "kda_commit:kda_commit", layouts=_STATE, requires=_FLOAT32_STATE),
    _wrap("mla_append", "mla:mla_append", layouts=_CACHE),
    _wrap("moe_route", "moe:moe_route"),
    _wrap(
        "moe_experts",
        "moe:moe_experts",
        layouts=_STORED,
        pack="k3port.ops.moe_weights:keep_stored",
        requires=Requires(weight_formats=("mxfp4", "bfloat16", "float32")),
    ),
    # With one rank there is nothing to do: on a GPU too nothing could be faster.
    _wrap("all_reduce", "collective:all_reduce", requires=_ONE_RANK, fallback=False),
    _wrap("all_gather", "collective:all_gather", requires=_ONE_RANK, fallback=False),
    _wrap("sample", "sample:sample"),
    _wrap("vision_patch", "vision:vision_patch"),
    KernelSpec(
        name="reference.mla_attend_expanded",
        op="mla_attend",
        load="k3port.ops.mla:mla_attend_prefill",
        doc="reference: attention with keys and values expanded per head",
        phases=("prefill",),
        layouts=_CACHE,
        fallback=True,
    ),
    KernelSpec(
        name="reference.mla_attend_absorbed",
        op="mla_attend",
        load="k3port.ops.mla:mla_attend_decode",
        doc="reference: attention in latent space",
        phases=("decode",),
        layouts=_CACHE,
        fallback=True,
    ),
    _composite("kda", "make_kda", layouts=_STATE, requires=_FLOAT32_STATE, records_drafts=True),
    _composite("mla", "make_mla_expanded", "_expanded", ("prefill",), layouts=_CACHE),
    _composite("mla", "make_mla_absorbed", "_absorbed", ("decode",), layouts=_CACHE),
    _composite("moe", "make_moe"),
    _composite("dense_mlp", "make_dense_mlp"),
)


@hookimpl
def k3port_kernels() -> Sequence[KernelSpec]:
    return KERNELS
