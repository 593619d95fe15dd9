"""Norms and Attention Residuals from FlashInfer."""

from __future__ import annotations

from k3port.backends.limits import AMPERE_AND_LATER, BLACKWELL
from k3port.oracle.spec import PRIORITY_VENDOR, AxisRule, KernelSpec, Requires

_SOURCE = "FlashInfer 0.7.4"


def _norm(name: str, op: str, doc: str) -> KernelSpec:
    return KernelSpec(
        name=f"cuda.flashinfer_{name}",
        op=op,
        load="",
        doc=doc,
        requires=Requires(
            vendors=("nvidia",),
            archs=AMPERE_AND_LATER,
            dtypes=("bfloat16", "float16"),
            packages=("flashinfer-python>=0.6",),
        ),
        priority=PRIORITY_VENDOR,
        source=_SOURCE,
    )


KERNELS: tuple[KernelSpec, ...] = (
    _norm("rms_norm", "rms_norm", "flashinfer.norm.rmsnorm"),
    _norm("gated_norm", "gated_norm", "flashinfer.norm.rmsnorm_sigmoid_gate"),
    KernelSpec(
        name="cuda.flashinfer_attn_res",
        op="attn_res",
        load="",
        doc="kimi_k3_attn_res",
        requires=Requires(
            vendors=("nvidia",),
            archs=BLACKWELL,
            dtypes=("bfloat16",),
            axes=(
                AxisRule("D", allowed=(7168,)),
                AxisRule("R", minimum=1, maximum=8, why="mixes one to eight blocks"),
            ),
            packages=("flashinfer-python>=0.7",),
            runtime=("cuda>=12.8",),
        ),
        priority=PRIORITY_VENDOR,
        source=_SOURCE,
    ),
)
