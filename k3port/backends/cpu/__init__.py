"""Kernels in plain PyTorch, arranged for the CPU: few calls per step, chunked recurrence, batched decode."""

from __future__ import annotations

from collections.abc import Sequence

from k3port.hookspecs import hookimpl
from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, OpQuery, Requires, Target

_CPU = Requires(vendors=("cpu",))
_CACHE = {"mla_cache": "paged:latent"}
# Above this the experts of one layer stay as stored: a plain copy in float32 would be about 7.5 times their size.
MAX_DENSE_BYTES_PER_LAYER = 256 << 20


def dense_experts_fit(query: OpQuery, target: Target) -> str | None:
    """Refuses the plain copy of the experts where one layer of it would be large."""
    del target
    axes = query.axes
    size = 3 * axes["E"] * axes["I"] * axes["L"] * (2 if query.dtype == "bfloat16" else 4)
    if size <= MAX_DENSE_BYTES_PER_LAYER:
        return None
    limit = MAX_DENSE_BYTES_PER_LAYER >> 20
    return f"plain experts take {size / 2**20:.0f} MiB per layer, the limit is {limit} MiB"


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="cpu.linear",
        op="linear",
        load="torch.nn.functional:linear",
        doc="torch.nn.functional.linear",
        requires=_CPU,
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.logits",
        op="logits",
        load="k3port.backends.cpu.dense:logits",
        doc="torch linear, then float32",
        requires=_CPU,
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.rms_norm",
        op="rms_norm",
        load="k3port.backends.cpu.dense:rms_norm",
        doc="torch.nn.functional.rms_norm",
        requires=Requires(vendors=("cpu",), dtypes=("float32",)),
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.attn_res",
        op="attn_res",
        load="k3port.backends.cpu.dense:attn_res",
        doc="float32 without conversions, mixture as a product, torch rms_norm",
        requires=Requires(vendors=("cpu",), dtypes=("float32",)),
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.short_conv_chunk",
        op="short_conv",
        load="k3port.backends.cpu.conv:short_conv_chunk",
        doc="one sum over taps per request",
        phases=("prefill",),
        requires=_CPU,
        layouts={"conv_state": "wp"},
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.short_conv_step",
        op="short_conv",
        load="k3port.backends.cpu.conv:short_conv_step",
        doc="all requests of a decode step at once",
        phases=("decode",),
        requires=_CPU,
        layouts={"conv_state": "wp"},
        records_drafts=True,
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.kda_core_chunk",
        op="kda_core",
        load="k3port.backends.cpu.kda:kda_core_chunk",
        doc="chunks of 16 tokens in WY form, exponents never above zero",
        phases=("prefill",),
        requires=Requires(vendors=("cpu",), state_dtypes=("float32",)),
        layouts={"kda_state": "vk:float32"},
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.kda_core_step",
        op="kda_core",
        load="k3port.backends.cpu.kda:kda_core_step",
        doc="all requests of a decode step at once, drafts request by request",
        phases=("decode",),
        requires=Requires(vendors=("cpu",), state_dtypes=("float32",)),
        layouts={"kda_state": "vk:float32"},
        records_drafts=True,
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.mla_append",
        op="mla_append",
        load="k3port.backends.cpu.mla:mla_append",
        doc="one indexed copy",
        requires=_CPU,
        layouts=_CACHE,
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.mla_attend_sdpa",
        op="mla_attend",
        load="k3port.backends.cpu.mla:mla_attend_sdpa",
        doc="torch scaled_dot_product_attention on expanded keys and values",
        phases=("prefill",),
        requires=_CPU,
        layouts=_CACHE,
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.mla_attend_batched",
        op="mla_attend",
        load="k3port.backends.cpu.mla:mla_attend_batched",
        doc="latent attention of all requests in two batched products",
        phases=("decode",),
        requires=_CPU,
        layouts=_CACHE,
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.moe_experts_dense",
        op="moe_experts",
        load="k3port.backends.cpu.moe:moe_experts_dense",
        doc="experts expanded once to the activation dtype",
        requires=_CPU,
        check=dense_experts_fit,
        layouts={"experts": "dense"},
        pack="k3port.ops.moe_weights:stack_dense",
        priority=PRIORITY_PORTABLE,
    ),
    KernelSpec(
        name="cpu.sample_batched",
        op="sample",
        load="k3port.backends.cpu.sample:sample_batched",
        doc="argmax for all greedy rows at once, the reference for the others",
        requires=_CPU,
        priority=PRIORITY_PORTABLE,
    ),
)


@hookimpl
def k3port_kernels() -> Sequence[KernelSpec]:
    return KERNELS
