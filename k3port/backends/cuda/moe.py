"""Routed experts in MXFP4 with SiTU from FlashInfer: trtllm-gen and CUTLASS, by activation form."""

from __future__ import annotations

from k3port.backends.limits import pad_experts
from k3port.oracle.spec import PRIORITY_VENDOR, KernelSpec, Requires

_SOURCE = "FlashInfer 0.7.4"
# The launch grid ends at 65535 rows of tiles of 8 tokens.
_CHUNKS = "calls above (65535 - E) * 8 / X tokens (32319 for Kimi K3) are cut into chunks"


def _experts(name: str, doc: str, archs: tuple[str, ...], layout: str, **fields: object) -> KernelSpec:
    spec: dict[str, object] = {"priority": PRIORITY_VENDOR, "source": _SOURCE, **fields}
    return KernelSpec(
        name=f"cuda.flashinfer_{name}",
        op="moe_experts",
        load="",
        doc=doc,
        requires=Requires(
            vendors=("nvidia",),
            archs=archs,
            dtypes=("bfloat16",),
            weight_formats=("mxfp4",),
            packages=("flashinfer-python>=0.6.18",),
        ),
        layouts={"experts": layout},
        **spec,  # type: ignore[arg-type]
    )


KERNELS: tuple[KernelSpec, ...] = (
    _experts(
        "trtllm_moe_mxfp8",
        "trtllm_fp4_block_scale_routed_moe, activations in MXFP8",
        ("sm_100", "sm_103"),
        "trtllm:shuffled",
        rounds="mxfp8",
        padding=pad_experts(128, 256),
        numerics=f"rounds activations to MXFP8 before both products; {_CHUNKS}",
    ),
    _experts(
        "trtllm_moe_bf16",
        "trtllm_fp4_block_scale_routed_moe, activations in bfloat16",
        # Known to fail on sm_103; sm_107 has no SiTU build.
        ("sm_100",),
        "trtllm:shuffled",
        priority=PRIORITY_VENDOR - 5,
        padding=pad_experts(128, 256),
        numerics=_CHUNKS,
    ),
    _experts(
        "cutlass_moe_mxfp8",
        "cutlass_fused_moe with use_mxfp8_act_scaling",
        ("sm_100", "sm_103", "sm_120", "sm_121"),
        "cutlass:swizzled",
        priority=PRIORITY_VENDOR - 10,
        rounds="mxfp8",
        padding=pad_experts(128, 128),
        numerics="rounds activations to MXFP8 before both products",
    ),
    _experts(
        "cutlass_moe_bf16",
        "cutlass_fused_moe with use_w4_group_scaling",
        ("sm_90",),
        "cutlass:w4a16",
        priority=PRIORITY_VENDOR - 10,
        padding=pad_experts(128, 128),
        numerics="expands MXFP4 in registers, products in bfloat16",
    ),
)
