"""Collectives of NVIDIA ranks, each for the message sizes where it is known to work or to win."""

from __future__ import annotations

from collections.abc import Mapping

from k3port.backends.limits import KIB, MIB, message_window, several_ranks
from k3port.oracle.spec import PRIORITY_PORTABLE, PRIORITY_VENDOR, KernelSpec, OpQuery, Requires, Target, Tokens

_TORCH_SYMMETRIC: Mapping[str, Mapping[int, int]] = {
    "sm_90": {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB},
    "sm_100": {2: 8 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB},
    "sm_103": {2: 4 * MIB, 4: 32 * MIB, 6: 32 * MIB, 8: 64 * MIB},
}
_FUSED: Mapping[str, Mapping[int, int]] = {
    "sm_90": {2: 64 * MIB, 4: 2 * MIB, 8: MIB // 2},
    "sm_100": {2: 64 * MIB, 4: 32 * MIB, 8: MIB, 16: 64 * MIB},
    "sm_103": {2: 64 * MIB, 4: 64 * MIB, 8: 4 * MIB, 16: 64 * MIB},
}
_MNNVL: Mapping[tuple[str, int, int], int] = {
    ("sm_100", 8, 1): 128 * MIB,
    ("sm_100", 8, 2): 128 * MIB,
    # Not tuned there: the limit of the fused form, which 16 ranks can only reach through this backend.
    ("sm_100", 16, 4): 64 * MIB,
    ("sm_103", 8, 1): 128 * MIB,
    ("sm_103", 8, 2): 128 * MIB,
    ("sm_103", 4, 1): 80 * MIB,
    ("sm_103", 16, 4): 8 * MIB,
}
# NCCL's symmetric kernels win on small and on large messages; between them others do.
_SYMMETRIC_SMALL = 16 * KIB
_SYMMETRIC_LARGE: Mapping[int, int] = {4: 512 * KIB, 8: 128 * KIB}


def _table_check(table: Mapping[str, Mapping[int, int]], query: OpQuery, target: Target) -> str | None:
    sizes = table.get(target.device.arch, {})
    if query.tp in sizes:
        return None
    return f"serves {', '.join(map(str, sizes))} ranks on {target.device.arch}, asked for {query.tp}"


def _table_window(table: Mapping[str, Mapping[int, int]], query: OpQuery, target: Target) -> Tokens:
    return message_window(query, 0, table.get(target.device.arch, {}).get(query.tp, 0))


def torch_symmetric_check(query: OpQuery, target: Target) -> str | None:
    return _table_check(_TORCH_SYMMETRIC, query, target)


def torch_symmetric_window(query: OpQuery, target: Target) -> Tokens:
    return _table_window(_TORCH_SYMMETRIC, query, target)


def fused_check(query: OpQuery, target: Target) -> str | None:
    return _table_check(_FUSED, query, target)


def fused_window(query: OpQuery, target: Target) -> Tokens:
    return _table_window(_FUSED, query, target)


def mnnvl_check(query: OpQuery, target: Target) -> str | None:
    arch = target.device.arch
    if (arch, query.tp, query.nodes) in _MNNVL:
        return None
    known = ", ".join(f"{ranks} on {nodes}" for a, ranks, nodes in _MNNVL if a == arch)
    return f"sizes are known for ranks on nodes: {known}; asked for {query.tp} on {query.nodes}"


def mnnvl_window(query: OpQuery, target: Target) -> Tokens:
    return message_window(query, 0, _MNNVL.get((target.device.arch, query.tp, query.nodes), 0))


def symmetric_small_window(query: OpQuery, target: Target) -> Tokens:
    del target
    return message_window(query, 0, _SYMMETRIC_SMALL)


def symmetric_large_window(query: OpQuery, target: Target) -> Tokens:
    del target
    return message_window(query, _SYMMETRIC_LARGE.get(query.tp, 0))


def symmetric_check(query: OpQuery, target: Target) -> str | None:
    if query.nodes == 1 or "mnnvl" in target.features:
        return None
    return f"needs all ranks in one NVLink domain, asked for {query.nodes} nodes without one"


def _symmetric(suffix: str, window: object, doc: str) -> KernelSpec:
    return KernelSpec(
        name=f"cuda.nccl_symmetric_all_reduce{suffix}",
        op="all_reduce",
        load="",
        doc=f"NCCL on buffers of ncclMemAlloc, {doc}",
        requires=Requires(vendors=("nvidia",), tp=(4, 8, 16), features=("nvlink",)),
        check=symmetric_check,
        priority=PRIORITY_VENDOR - 20,
        tokens=window,  # type: ignore[arg-type]
        numerics="copies into a registered buffer; its allocator is compiled on first use",
        source="vLLM 0.33.0",
    )


KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="cuda.flashinfer_mnnvl_all_reduce",
        op="all_reduce",
        load="",
        doc="flashinfer.comm allreduce_fusion, backend mnnvl, within one NVLink domain",
        requires=Requires(
            vendors=("nvidia",),
            archs=("sm_100", "sm_103"),
            dtypes=("bfloat16", "float16"),
            tp=(4, 8, 16),
            packages=("flashinfer-python>=0.6",),
            features=("mnnvl",),
        ),
        check=mnnvl_check,
        priority=PRIORITY_VENDOR,
        tokens=mnnvl_window,
        numerics="a row's sum depends on the size of its step",
        source="vLLM 0.33.0, FlashInfer 0.7.4",
    ),
    KernelSpec(
        name="cuda.flashinfer_all_reduce",
        op="all_reduce",
        load="",
        doc="flashinfer.comm allreduce_fusion, backend trtllm, on one node",
        requires=Requires(
            vendors=("nvidia",),
            archs=tuple(_FUSED),
            dtypes=("bfloat16", "float16"),
            tp=(2, 4, 8, 16),
            max_nodes=1,
            packages=("flashinfer-python>=0.6",),
            features=("nvlink",),
        ),
        check=fused_check,
        priority=PRIORITY_VENDOR - 5,
        tokens=fused_window,
        numerics="may take the residual sum and RMSNorm that follow into one kernel, which then skips a rounding; "
        "a row's sum depends on the size of its step",
        source="vLLM 0.33.0, FlashInfer 0.7.4",
    ),
    KernelSpec(
        name="cuda.torch_symmetric_all_reduce",
        op="all_reduce",
        load="",
        doc="torch.distributed._symmetric_memory, in the switch where it can multicast",
        requires=Requires(
            vendors=("nvidia",),
            archs=tuple(_TORCH_SYMMETRIC),
            dtypes=("bfloat16",),
            tp=(2, 4, 6, 8),
            max_nodes=1,
            features=("multicast",),
        ),
        check=torch_symmetric_check,
        priority=PRIORITY_VENDOR - 10,
        tokens=torch_symmetric_window,
        source="vLLM 0.33.0",
    ),
    _symmetric("_small", symmetric_small_window, "messages up to 16 KiB"),
    _symmetric("", symmetric_large_window, "messages from 512 KiB (4 ranks) or 128 KiB (8 ranks) on"),
    KernelSpec(
        name="cuda.nccl_all_reduce",
        op="all_reduce",
        load="",
        doc="NCCL through torch.distributed",
        requires=Requires(vendors=("nvidia",)),
        check=several_ranks,
        priority=PRIORITY_PORTABLE,
        source="PyTorch 2.14",
    ),
    KernelSpec(
        name="cuda.nccl_all_gather",
        op="all_gather",
        load="",
        doc="NCCL through torch.distributed",
        requires=Requires(vendors=("nvidia",)),
        check=several_ranks,
        priority=PRIORITY_PORTABLE,
        source="PyTorch 2.14",
    ),
)
