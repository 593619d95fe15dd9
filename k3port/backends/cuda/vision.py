"""The patch convolution of the vision tower through cuDNN."""

from __future__ import annotations

from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, Requires

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="cuda.cudnn_vision_patch",
        op="vision_patch",
        load="",
        doc="torch.nn.functional.conv2d, which is cuDNN",
        requires=Requires(vendors=("nvidia",)),
        # Below the product form: that is exact and needs no convolution library.
        priority=PRIORITY_PORTABLE - 10,
        source="PyTorch 2.14",
    ),
)
