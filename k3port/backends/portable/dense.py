"""Dense ops that both vendors share: products through torch's BLAS, norms, AttnRes, sampling, patches, in Triton."""

from __future__ import annotations

from k3port.backends.portable.base import triton_kernel
from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, Requires

_GPU = Requires(vendors=("nvidia", "amd"))


def _torch(name: str, op: str, doc: str) -> KernelSpec:
    return KernelSpec(
        name=f"portable.{name}",
        op=op,
        load="",
        doc=doc,
        requires=_GPU,
        priority=PRIORITY_PORTABLE,
        source="PyTorch 2.14",
    )


KERNELS: tuple[KernelSpec, ...] = (
    _torch("linear", "linear", "torch.nn.functional.linear: cuBLASLt or hipBLASLt"),
    _torch("logits", "logits", "the same product, then float32"),
    _torch("embed", "embed", "rows of the vocabulary shard, one gather"),
    _torch(
        "vision_patch", "vision_patch", "the patch convolution as one product: stride equals kernel, so it is exact"
    ),
    triton_kernel("rms_norm", "rms_norm", "one pass per row"),
    triton_kernel("gated_norm", "gated_norm", "norm and gate per head"),
    triton_kernel("attn_res", "attn_res", "scores and mixture in one pass, any number of blocks"),
    triton_kernel(
        "sample",
        "sample",
        "temperature, top-k, top-p, min-p and the draw",
        numerics="uses the reference's uniform numbers: the same ids",
    ),
)
