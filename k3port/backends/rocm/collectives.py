"""Collectives of AMD ranks."""

from __future__ import annotations

from k3port.backends.limits import CDNA, MIB, message_window, several_ranks
from k3port.oracle.spec import PRIORITY_PORTABLE, PRIORITY_VENDOR, KernelSpec, OpQuery, Requires, Target, Tokens

_CUSTOM_LARGEST = 64 * MIB


def custom_window(query: OpQuery, target: Target) -> Tokens:
    del target
    return message_window(query, 0, _CUSTOM_LARGEST)


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="rocm.aiter_all_reduce",
        op="all_reduce",
        load="",
        doc="AITER CustomAllreduce over xGMI on one node, messages up to 64 MiB",
        requires=Requires(
            vendors=("amd",),
            archs=CDNA,
            dtypes=("bfloat16", "float16", "float32"),
            tp=(2, 4, 6, 8),
            max_nodes=1,
            packages=("amd-aiter>=0.1.20",),
            features=("xgmi",),
        ),
        priority=PRIORITY_VENDOR,
        tokens=custom_window,
        workspace_bytes=lambda query: 128 * MIB,
        source="AITER e4048607 (2026-08-22)",
    ),
    KernelSpec(
        name="rocm.aiter_quick_all_reduce_int8",
        op="all_reduce",
        load="",
        doc="AITER QuickAllReduce: sends quantised blocks",
        requires=Requires(
            vendors=("amd",),
            archs=CDNA,
            dtypes=("bfloat16", "float16"),
            tp=(2, 4, 8),
            max_nodes=1,
            packages=("amd-aiter>=0.1.20",),
            features=("xgmi",),
        ),
        priority=PRIORITY_VENDOR + 10,
        rounds="int8_messages",
        numerics="rounds what ranks send to 8-bit integers",
        source="AITER e4048607 (2026-08-22), vLLM 0.33.0",
    ),
    KernelSpec(
        name="rocm.rccl_all_reduce",
        op="all_reduce",
        load="",
        doc="RCCL through torch.distributed",
        requires=Requires(vendors=("amd",)),
        check=several_ranks,
        priority=PRIORITY_PORTABLE,
        source="PyTorch 2.14",
    ),
    KernelSpec(
        name="rocm.rccl_all_gather",
        op="all_gather",
        load="",
        doc="RCCL through torch.distributed",
        requires=Requires(vendors=("amd",)),
        check=several_ranks,
        priority=PRIORITY_PORTABLE,
        source="PyTorch 2.14",
    ),
)
