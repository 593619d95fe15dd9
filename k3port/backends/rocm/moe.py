"""Routed experts in MXFP4 with SiTU from AITER, one kernel per activation form.

The order of gate and up rows in the packed weight belongs to the form: ``a8w4`` reads them interleaved, ``a16w4`` and
``a4w4`` one after the other. The layout tag carries it, so weights packed for one cannot reach another.
"""

from __future__ import annotations

from k3port.backends.limits import pad_experts
from k3port.oracle.spec import PRIORITY_VENDOR, KernelSpec, Requires

SEPARATED = "aiter:separated"
INTERLEAVED = "aiter:interleaved"


def _experts(form: str, doc: str, layout: str, **fields: object) -> KernelSpec:
    return KernelSpec(
        name=f"rocm.aiter_moe_{form}",
        op="moe_experts",
        load="",
        doc=f"aiter.fused_moe.fused_moe with Situv2, {doc}",
        requires=Requires(
            vendors=("amd",),
            archs=("gfx950",),
            dtypes=("bfloat16",),
            weight_formats=("mxfp4",),
            packages=("amd-aiter>=0.1.24", "flydsl>=0.2.4"),
        ),
        layouts={"experts": layout},
        padding=pad_experts(128, 128),
        source="AITER e4048607 (2026-08-22), vLLM 0.33.0",
        **fields,  # type: ignore[arg-type]
    )


KERNELS: tuple[KernelSpec, ...] = (
    _experts(
        "a8w4",
        "activations in MXFP8, gate and up rows interleaved",
        INTERLEAVED,
        priority=PRIORITY_VENDOR,
        rounds="mxfp8",
        numerics="rounds activations to MXFP8 before both products",
    ),
    _experts(
        "a16w4",
        "activations in bfloat16, gate before up rows",
        SEPARATED,
        priority=PRIORITY_VENDOR - 5,
    ),
    _experts(
        "a4w4",
        "activations in MXFP4, gate before up rows",
        SEPARATED,
        # Behind the others even where it is allowed: the least accurate form is never a silent default.
        priority=PRIORITY_VENDOR - 10,
        rounds="mxfp4",
        numerics="rounds activations to MXFP4 before both products",
    ),
)
