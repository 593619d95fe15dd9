"""Collectives that need no particular link: gloo, through host memory."""

from __future__ import annotations

from k3port.backends.limits import several_ranks
from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec

_DOC = "gloo through torch.distributed; GPUs copy through host memory"

KERNELS: tuple[KernelSpec, ...] = tuple(
    KernelSpec(
        name=f"portable.gloo_{op}",
        op=op,
        load="",
        doc=_DOC,
        check=several_ranks,
        priority=PRIORITY_PORTABLE - 50,
        # The copy to the host waits for the device, which no graph can.
        graph_safe=False,
        source="PyTorch 2.14",
    )
    for op in ("all_reduce", "all_gather")
)
