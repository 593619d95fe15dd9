"""KDA in Triton, fine and fused, and the kernels of fla-core, for a state in float32 or bfloat16."""

from __future__ import annotations

from k3port.backends.limits import newer_than
from k3port.backends.portable.base import triton_kernel, triton_requires
from k3port.backends.portable.kda_slabs import prefill_workspace
from k3port.ops.catalog import OPS
from k3port.oracle.spec import PRIORITY_PORTABLE, PRIORITY_REFERENCE, AxisRule, KernelSpec, OpQuery, Requires, Target

_DIMS = (AxisRule("K", maximum=128), AxisRule("V", maximum=128))
_CONV = {"conv_state": "wp"}
_FLA = ("fla-core>=0.6.0", "triton>=3.3", "torch>=2.7")


def _linkable(query: OpQuery, target: Target) -> str | None:
    """Triton 3.6 miscounts the registers that a kernel's arguments take on gfx1250, where there are many of them."""
    del query
    if target.device.arch != "gfx1250" or newer_than(target, "triton", "3.7"):
        return None
    return "on gfx1250 it needs Triton 3.7 or newer (pip install 'triton>=3.7'): what 3.6 compiles cannot be linked"


def _with_state(suffix: str, state: str) -> tuple[KernelSpec, ...]:
    """All kernels that touch the recurrent state, for one dtype of it."""
    layout = {"kda_state": f"vk:{state}"}
    own: Requires = triton_requires(state_dtypes=(state,), axes=_DIMS)
    # float16 cannot hold the factors of the chunked form.
    chunked: Requires = triton_requires(dtypes=("bfloat16", "float32"), state_dtypes=(state,), axes=_DIMS)
    fla: Requires = triton_requires(dtypes=("bfloat16", "float16"), state_dtypes=(state,), packages=_FLA)
    kept = (
        "sums in float32"
        if state == "float32"
        else "computes in float32 and rounds the state it keeps to bfloat16, in a long prompt after each slab"
    )
    return (
        triton_kernel(
            f"kda_core_chunk{suffix}",
            "kda_core",
            f"gate and chunked recurrence with bounded exponents, {state} state",
            load="k3port.backends.portable.kernels.kda_chunk:kda_core_chunk",
            phases=("prefill",),
            requires=chunked,
            layouts=layout,
            check=_linkable,
            workspace_bytes=prefill_workspace,
            numerics=kept,
        ),
        triton_kernel(
            f"kda_core_step{suffix}",
            "kda_core",
            f"gate and one step per request, or a few for drafts, any head count, {state} state",
            load="k3port.backends.portable.kernels.kda_step:kda_core_step",
            phases=("decode",),
            records_drafts=True,
            check=_linkable,
            requires=own,
            layouts=layout,
            numerics=kept,
        ),
        triton_kernel(
            f"kda_commit{suffix}",
            "kda_commit",
            f"replays accepted drafts and shifts the tail in one kernel, {state} state",
            load="k3port.backends.portable.kernels.kda_commit:kda_commit",
            requires=triton_requires(state_dtypes=(state,), axes=(*_DIMS, AxisRule("W", minimum=2, maximum=8))),
            layouts={**layout, **_CONV},
            numerics=kept,
        ),
        triton_kernel(
            f"kda_prefill{suffix}",
            "kda",
            f"convolution, chunked recurrence with the gate inside, gated norm, {state} state",
            load="k3port.backends.portable.kernels.kda_prefill:kda_prefill",
            phases=("prefill",),
            requires=triton_requires(
                dtypes=("bfloat16", "float32"),
                state_dtypes=(state,),
                axes=(*_DIMS, AxisRule("W", minimum=2, maximum=8)),
            ),
            layouts={**layout, **_CONV},
            covers=OPS["kda"].parts,
            check=_linkable,
            workspace_bytes=prefill_workspace,
            numerics=kept,
        ),
        triton_kernel(
            f"kda_decode_fused{suffix}",
            "kda",
            f"convolution, gate, recurrence and gated norm in one launch, or in three where tuned so, {state} state",
            load="k3port.backends.portable.kernels.kda_fused:kda_decode",
            phases=("decode",),
            records_drafts=True,
            check=_linkable,
            requires=triton_requires(state_dtypes=(state,), axes=(*_DIMS, AxisRule("W", minimum=2, maximum=4))),
            layouts={**layout, **_CONV},
            covers=OPS["kda"].parts,
            numerics=f"{kept}; where it takes three launches, values are rounded between them",
        ),
        triton_kernel(
            f"fla_kda_chunk{suffix}",
            "kda_core",
            f"fla.ops.kda.chunk_kda, gate and beta from raw numbers, {state} state",
            phases=("prefill",),
            requires=fla,
            layouts=layout,
            priority=PRIORITY_PORTABLE - 10,
            numerics=kept,
            source="fla-core 0.6.0",
        ),
        triton_kernel(
            f"fla_kda_recurrent{suffix}",
            "kda_core",
            f"fla.ops.kda.fused_recurrent_kda, gate and beta from raw numbers, {state} state",
            phases=("decode",),
            requires=fla,
            layouts=layout,
            priority=PRIORITY_PORTABLE - 10,
            numerics=kept,
            source="fla-core 0.6.0",
        ),
    )


KERNELS: tuple[KernelSpec, ...] = (
    triton_kernel(
        "short_conv",
        "short_conv",
        "depthwise convolution with its tail, both phases",
        load="k3port.backends.portable.kernels.short_conv:short_conv",
        records_drafts=True,
        requires=triton_requires(axes=(AxisRule("W", minimum=2, maximum=8),)),
        layouts=_CONV,
    ),
    *_with_state("", "float32"),
    *_with_state("_bf16", "bfloat16"),
    # The reference composite is tied to a float32 state; this one passes a bfloat16 state to its parts.
    triton_kernel(
        "kda_parts_bf16",
        "kda",
        "made of parts: KDA with a bfloat16 state",
        requires=triton_requires(state_dtypes=("bfloat16",), packages=()),
        priority=PRIORITY_REFERENCE + 10,
        records_drafts=True,
        layouts={"kda_state": "vk:bfloat16", **_CONV},
        parts=OPS["kda"].parts,
    ),
)
