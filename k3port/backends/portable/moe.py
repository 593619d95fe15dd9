"""Routing and routed experts in Triton; MXFP4 weights are expanded tile by tile, so every GPU can run them."""

from __future__ import annotations

from k3port.backends.limits import NATIVE_MXFP4, expert_bytes, pad_experts
from k3port.backends.portable.base import triton_kernel, triton_requires
from k3port.oracle.spec import OpQuery, Target


def dequantise_note(query: OpQuery, target: Target) -> str:
    """What expanding on the fly costs here; empty for plain weights."""
    if query.weight_format != "mxfp4":
        return ""
    arch = target.device.arch
    packed, plain = expert_bytes(query.axes, query.ep), expert_bytes(query.axes, query.ep, bits=16)
    why = "" if arch in NATIVE_MXFP4 else f"{arch} has no native MXFP4: "
    cost = (
        f"{why}expands tiles to {query.dtype} on the fly; weights stay {packed} bytes per layer and rank "
        f"(a {query.dtype} copy would take {plain}), products run at the {query.dtype} rate"
    )
    if arch == "gfx942":
        # The distance between whole-matrix emulation and a native kernel, from a public report; ours is not measured.
        cost += "; reported for emulation on MI325X: 4.27 tokens/s against 99.67 with a native kernel"
    return cost


KERNELS = (
    triton_kernel("moe_route", "moe_route", "scores, biased top-k, ties to the lowest expert, any number of experts"),
    triton_kernel(
        "moe_experts",
        "moe_experts",
        "grouped products on MXFP4 or plain weights, expanded per tile",
        requires=triton_requires(weight_formats=("mxfp4", "bfloat16")),
        layouts={"experts": "stored"},
        padding=pad_experts(32, 32),
        note=dequantise_note,
        numerics="activations are not rounded beyond their dtype",
    ),
    triton_kernel(
        "situ_mul",
        "situ_mul",
        "SiTU or SwiGLU in one pass",
        load="k3port.backends.portable.kernels.situ_mul:situ_mul",
    ),
)
