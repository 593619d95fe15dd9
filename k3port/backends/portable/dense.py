"""Dense ops that both vendors share: products through torch's BLAS, norms, AttnRes, sampling, patches, in Triton."""

from __future__ import annotations

from k3port.backends.portable.base import triton_kernel, triton_requires
from k3port.backends.portable.sample_scratch import sample_workspace
from k3port.oracle.spec import PRIORITY_PORTABLE, AxisRule, KernelSpec, Requires

_GPU = Requires(vendors=("nvidia", "amd"))
_PRODUCT = (
    "as torch is set; by default float32 is not rounded to TF32, and the parts of a sum that the library splits may be "
    "rounded to bfloat16"
)


def _torch(op: str, module: str, doc: str, numerics: str = "") -> KernelSpec:
    return KernelSpec(
        name=f"portable.{op}",
        op=op,
        load=f"k3port.backends.portable.kernels.{module}:{op}",
        doc=doc,
        requires=_GPU,
        priority=PRIORITY_PORTABLE,
        numerics=numerics,
        source="PyTorch 2.14",
    )


KERNELS: tuple[KernelSpec, ...] = (
    _torch("linear", "dense", "torch.nn.functional.linear: cuBLASLt or hipBLASLt", _PRODUCT),
    _torch("logits", "dense", "the same product, then float32", _PRODUCT),
    _torch("embed", "dense", "rows of the vocabulary shard, one gather"),
    _torch(
        "vision_patch",
        "vision_patch",
        "the patch convolution as one product: stride equals kernel, so it is exact",
        _PRODUCT,
    ),
    triton_kernel(
        "rms_norm",
        "rms_norm",
        "one pass, whole rows in registers",
        load="k3port.backends.portable.kernels.rms_norm:rms_norm",
        requires=triton_requires(axes=(AxisRule("D", maximum=16384, why="a row stays in registers"),)),
    ),
    triton_kernel(
        "gated_norm",
        "gated_norm",
        "norm and gate per head, many heads per program",
        load="k3port.backends.portable.kernels.gated_norm:gated_norm",
        requires=triton_requires(axes=(AxisRule("V", maximum=1024, why="a head is held in registers"),)),
    ),
    triton_kernel(
        "attn_res",
        "attn_res",
        "pending add, block write, mixture and norm in one pass, any number of blocks",
        load="k3port.backends.portable.kernels.attn_res:attn_res",
        requires=triton_requires(axes=(AxisRule("D", maximum=16384, why="a token is held in registers"),)),
    ),
    triton_kernel(
        "sample",
        "sample",
        "top-k, top-p, min-p and the draw without a sort",
        load="k3port.backends.portable.kernels.sample:sample",
        numerics="the reference's uniform numbers, float64 sums: the same ids, save where p or a uniform number meets "
        "a sum of probabilities to the last bits, or where unequal logits have equal probabilities",
        workspace_bytes=sample_workspace,
    ),
)
