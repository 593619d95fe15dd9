"""The patch convolution of the vision tower through MIOpen and AITER."""

from __future__ import annotations

from k3port.backends.limits import TRITON_AMD
from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, Requires

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="rocm.aiter_vision_patch",
        op="vision_patch",
        load="",
        doc="aiter.ops.triton.conv.conv2d.conv2d",
        requires=Requires(
            vendors=("amd",),
            archs=TRITON_AMD,
            dtypes=("bfloat16", "float16"),
            packages=("amd-aiter>=0.1.20", "triton>=3.4"),
            symbols=("aiter.ops.triton.conv.conv2d:conv2d",),
        ),
        # Below the product form: that is exact and needs no convolution library.
        priority=PRIORITY_PORTABLE - 10,
        source="AITER e4048607 (2026-08-22)",
    ),
    KernelSpec(
        name="rocm.miopen_vision_patch",
        op="vision_patch",
        load="",
        doc="torch.nn.functional.conv2d, which is MIOpen",
        requires=Requires(vendors=("amd",)),
        priority=PRIORITY_PORTABLE - 20,
        numerics="the first call may search for a kernel, and fails where MIOpen's database is missing",
        source="PyTorch 2.14",
    ),
)
