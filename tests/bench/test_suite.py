"""From kernels and cases to rows: who is measured, who is not and why, and which times are compared."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bench_parts import CEILINGS, cpu_bench, right, rms_workload, toy_kernel

from k3port.ops.contract import Cost
from k3port.oracle.spec import KernelSpec, Requires
from k3port.plugins import make_registry
from k3port.testing.bench.ceilings import bound, measure_ceilings
from k3port.testing.bench.clock import CpuClock
from k3port.testing.bench.peers.parts import parts_peer
from k3port.testing.bench.receipt import Row, Skipped
from k3port.testing.bench.suite import ratio, run_case
from k3port.testing.bench.timing import Settings, summarize
from k3port.testing.bench.workload import Answer, Peer, PeerAbsent, copy_peer

KERNELS = make_registry(entry_points=False).kernels
RIGHT = toy_kernel("toy.right", "right")
WRONG = toy_kernel("toy.wrong", "off_by_a_percent")


def run(kernels: list[KernelSpec], *names: str, peers: list[Peer] | None = None) -> list[Row | Skipped]:
    workload = rms_workload(peers or ())
    return list(run_case(cpu_bench(kernels, *names), workload, workload.cases[0]))


def test_a_row_has_everything() -> None:
    (row,) = run([RIGHT])
    assert isinstance(row, Row)
    assert (row.op, row.phase, row.case, row.kernel, row.dtype) == ("rms_norm", "", "T5", "toy.right", "bfloat16")
    assert row.bytes == (2 * 5 + 1) * 32 * 2
    assert row.bound == pytest.approx(row.bytes / 4e12 * 1e6)
    assert 0 < row.relative_rms < row.tolerance
    assert row.eager.median > 0
    # The bound belongs to captured runs, and a CPU has none.
    assert (row.captured, row.percent_of_bound, row.not_captured) == (None, None, "the CPU has no graphs")


def test_a_wrong_kernel_is_not_timed() -> None:
    skipped, row = run([WRONG, RIGHT])
    assert isinstance(skipped, Skipped)
    assert skipped.failed
    assert "relative RMS error" in skipped.reason
    assert isinstance(row, Row)
    assert row.kernel == "toy.right"


def test_a_kernel_that_cannot_be_loaded_is_said_to_have_failed() -> None:
    (skipped,) = run([toy_kernel("toy.gone", "gone")])
    assert isinstance(skipped, Skipped)
    assert skipped.failed
    assert "toy.gone cannot be loaded" in skipped.reason


def test_an_op_without_kernels_is_told() -> None:
    (skipped,) = run([dataclasses.replace(RIGHT, load="")])
    assert skipped == Skipped("rms_norm", "", "T5", "-", "no kernel is built for this GPU")
    (skipped,) = run([RIGHT], "toy.other")
    assert skipped.kernel == "-"
    assert not skipped.failed


def test_a_shape_that_is_too_large_does_not_cost_the_others() -> None:
    def too_large(args: object) -> Answer:
        raise MemoryError("CUDA out of memory.\n  Tried to allocate")

    workload = dataclasses.replace(rms_workload(), reference=too_large)
    (skipped,) = run_case(cpu_bench([RIGHT]), workload, workload.cases[0])
    assert isinstance(skipped, Skipped)
    assert skipped.failed
    assert skipped.reason == "no reference: MemoryError: CUDA out of memory. Tried to allocate"


def test_a_kernel_that_fails_while_it_is_timed_is_told() -> None:
    class Broken(CpuClock):
        def elapsed(self, run: object) -> float:
            raise RuntimeError("an illegal memory access")

    workload = rms_workload()
    (skipped,) = run_case(cpu_bench([RIGHT], clock=Broken()), workload, workload.cases[0])
    assert isinstance(skipped, Skipped)
    assert skipped.failed
    assert skipped.reason == "timing failed: RuntimeError: an illegal memory access"


def test_limits_of_kernels_are_told() -> None:
    small = toy_kernel("toy.small", "right", requires=Requires(dtypes=("float32",)))
    (skipped,) = run([small])
    assert isinstance(skipped, Skipped)
    assert not skipped.failed
    assert skipped.reason.startswith("DTYPE: needs float32")


def test_without_names_references_and_other_vendors_stay_out() -> None:
    workload = rms_workload(dtype=torch.float32)
    for names, measured in (((), "cpu.rms_norm"), (("reference.rms_norm",), "reference.rms_norm")):
        (row,) = run_case(cpu_bench(KERNELS, *names), workload, workload.cases[0])
        assert isinstance(row, Row)
        assert row.kernel == measured


def copying() -> Peer:
    return Peer("same", lambda args: lambda: right(**args))


def test_peers_are_timed_beside() -> None:
    (row,) = run([RIGHT], peers=[copying(), copy_peer(Cost(4096, 1))])
    assert isinstance(row, Row)
    same, copy = row.peers
    assert (same.name, same.status, copy.name, copy.status) == ("same", "measured", "copy", "measured")
    assert same.error is not None
    assert same.error < 5e-3
    assert copy.error is None
    assert same.eager is not None
    assert same.eager_ratio == pytest.approx(same.eager.median / row.eager.median)
    assert same.captured_ratio is None


def test_absent_wrong_and_failing_peers_are_listed() -> None:
    def absent(args: object) -> object:
        raise PeerAbsent("fla-core cannot be imported")

    def failing(args: object) -> object:
        raise RuntimeError("no kernel image")

    peers = [
        Peer("absent", absent),  # type: ignore[arg-type]
        Peer("broken", failing),  # type: ignore[arg-type]
        Peer("other", lambda args: lambda: 2 * right(**args)),
    ]
    (row,) = run([RIGHT], peers=peers)
    assert isinstance(row, Row)
    found = {peer.name: (peer.status, peer.eager, peer.eager_ratio) for peer in row.peers}
    assert found == {
        "absent": ("absent", None, None), "broken": ("failed", None, None), "other": ("differs", None, None),
    }  # fmt: skip
    assert "fla-core" in row.peers[0].note
    assert "no kernel image" in row.peers[1].note


def test_peers_can_be_left_out() -> None:
    workload = rms_workload([copying()])
    (row,) = run_case(cpu_bench([RIGHT], peers=False), workload, workload.cases[0])
    assert isinstance(row, Row)
    assert row.peers == ()


def test_buffers_rotate_below_the_cold_size() -> None:
    workload = rms_workload()
    bytes_of_a_call = 2 * (5 * 32 * 2) + 32 * 2
    bench = dataclasses.replace(cpu_bench([RIGHT]), cold_bytes=10 * bytes_of_a_call)
    (row,) = run_case(bench, workload, workload.cases[0])
    assert isinstance(row, Row)
    assert row.copies == 11
    (row,) = run_case(dataclasses.replace(bench, cold_bytes=bytes_of_a_call), workload, workload.cases[0])
    assert isinstance(row, Row)
    assert row.copies == 1


def test_ratios_need_both_times() -> None:
    fast, slow = summarize([1e-6]), summarize([3e-6])
    assert ratio(slow, fast) == pytest.approx(3)
    assert ratio(None, fast) is None
    assert ratio(slow, None) is None


def test_the_bound_is_the_larger_of_memory_and_matrix() -> None:
    memory, matrix = bound(Cost(4_000_000, 7), CEILINGS), bound(Cost(4, 7 * 10**9), CEILINGS)
    assert (memory.limit, memory.microseconds) == ("memory", pytest.approx(1.0))
    assert (matrix.limit, matrix.microseconds) == ("matrix", pytest.approx(10.0))
    assert memory.percent(2.0) == pytest.approx(50)


def test_ceilings_count_what_was_read_and_written() -> None:
    found = measure_ceilings(CpuClock(), Settings(rounds=2, sample_seconds=1e-5), copy_bytes=4096, matmul_size=32)
    assert (found.copy_bytes, found.matmul_size) == (4096, 32)
    assert found.copy_bytes_per_second > 0
    assert found.matmul_flops_per_second > 0


def test_parts_are_our_own_kernels() -> None:
    """The peer of a fused kernel is the composite over portable kernels, and absent while one is not built."""
    load = {"short_conv": "conv:short_conv", "kda_core": "kda:kda_core"}
    ours = [toy_kernel(f"portable.{op}", "unused", op) for op in ("short_conv", "kda_core", "gated_norm")]
    ours = [dataclasses.replace(k, load=f"k3port.ops.{load.get(k.op, 'norm:gated_norm')}", priority=100) for k in ours]
    references = [k for k in KERNELS if k.is_reference]
    from k3port.testing.bench.workloads.kda_data import block_args

    args = block_args("decode", 2, 2, 2, torch.device("cpu"), torch.Generator().manual_seed(0))
    with pytest.raises(PeerAbsent, match="no portable kernel of gated_norm is built"):
        parts_peer("kda", "decode", [*ours[:2], *references]).prepare(args)
    peer = parts_peer("kda", "decode", [*ours, *references])
    assert peer.prepare(args)().shape == (2, 256)
    assert peer.note() == "portable.short_conv, portable.kda_core, portable.gated_norm"
