"""Norms and Attention Residuals from AITER."""

from __future__ import annotations

from k3port.backends.limits import TRITON_AMD
from k3port.oracle.spec import PRIORITY_VENDOR, AxisRule, KernelSpec, Requires

_SOURCE = "AITER e4048607 (2026-08-22)"

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="rocm.aiter_rms_norm",
        op="rms_norm",
        load="",
        doc="aiter.rms_norm",
        # Other AMD architectures are known to crash in it.
        requires=Requires(
            vendors=("amd",), archs=TRITON_AMD, dtypes=("bfloat16", "float16"), packages=("amd-aiter>=0.1.7",)
        ),
        priority=PRIORITY_VENDOR,
        source=_SOURCE,
    ),
    KernelSpec(
        name="rocm.aiter_attn_res",
        op="attn_res",
        load="",
        doc="aiter.ops.triton.fusions.attn_res.attn_res_fwd",
        requires=Requires(
            vendors=("amd",),
            archs=TRITON_AMD,
            dtypes=("bfloat16", "float16"),
            axes=(AxisRule("D", multiple_of=16), AxisRule("R", minimum=1, why="mixes blocks")),
            packages=("amd-aiter>=0.1.20", "triton>=3.4"),
            symbols=("aiter.ops.triton.fusions.attn_res:attn_res_fwd",),
        ),
        priority=PRIORITY_VENDOR,
        source=_SOURCE,
    ),
)
