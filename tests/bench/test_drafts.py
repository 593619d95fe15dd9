"""Drafts and their commit: data, costs, faults that the gate must see, and what is tuned for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_parts import cpu_bench, toy_kernel

from k3port.ops.contract import Cost
from k3port.ops.conv import short_conv
from k3port.ops.kda import kda, kda_core
from k3port.ops.kda_commit import kda_commit
from k3port.plugins import make_registry
from k3port.testing.bench.gate import GateError, GateReport, answer_of, pass_gate, peer_error
from k3port.testing.bench.peers.parts import parts_peer
from k3port.testing.bench.receipt import Row, Skipped
from k3port.testing.bench.suite import make_args, run_case
from k3port.testing.bench.workload import Case, Workload
from k3port.testing.bench.workloads import WORKLOADS, kda_block
from k3port.testing.bench.workloads import kda_commit as commits
from k3port.testing.bench.workloads import kda_core as cores
from k3port.testing.bench.workloads import short_conv as convs

CPU = torch.device("cpu")
REQUESTS, TOKENS, HEADS, DIM = 2, 3, 2, 16
BLOCK = kda_block.case("decode", REQUESTS, REQUESTS * TOKENS, 1)
CORE = cores.case("decode", REQUESTS, REQUESTS * TOKENS, HEADS, dim=DIM)
CONV = convs.case("decode", REQUESTS, REQUESTS * TOKENS, 24)
COMMIT = commits.case(REQUESTS, 2, TOKENS, HEADS, dim=DIM)
KERNELS = make_registry(entry_points=False).kernels

Op = Callable[..., Any]


def workload_of(slot: str, *cases: Case) -> Workload:
    found = next(workload for workload in WORKLOADS if workload.slot == slot)
    return dataclasses.replace(found, cases=cases) if cases else found


def gate(slot: str, case: Case, function: Op) -> GateReport:
    workload, args = workload_of(slot, case), make_args(case, CPU)
    return pass_gate("toy", function, workload, case.name, args, answer_of(workload, args))


@pytest.mark.parametrize(
    ("slot", "case", "function", "checked"),
    [
        ("kda_decode", BLOCK, kda, ("y", "state.drafts.x", "state.drafts.k", "state.drafts.g", "state.drafts.u")),
        ("kda_core_decode", CORE, kda_core, ("o", "drafts.k", "drafts.g", "drafts.u")),
        ("short_conv_decode", CONV, short_conv, ("y", "record")),
        ("kda_commit", COMMIT, kda_commit, ("state.conv", "state.recurrent")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reference_passes(slot: str, case: Case, function: Op, checked: tuple[str, ...]) -> None:
    """States are compared too: drafts leave them, so that there is no error to report of them."""
    report = gate(slot, case, function)
    assert report.checked == checked
    assert report.relative_rms < report.tolerance


def test_names_and_sizes() -> None:
    assert [case.name for case in (BLOCK, CORE, CONV, COMMIT)] == ["H1 B2 x3", "H2 B2 x3", "B2 x3", "H2 B2 2 of 3"]
    assert (BLOCK.axes["T"], BLOCK.axes["B"]) == (6, 2)
    assert COMMIT.axes["T"] == 4, "of the record only what is accepted is read"
    assert kda_block.case("decode", 2, 2, 1).name == "H1 B2"
    for slot in ("kda_decode", "kda_core_decode"):
        names = [case.name for case in workload_of(slot).cases]
        assert {f"H{heads} B{n} x{tokens}" for heads in (96, 12) for n, tokens in cores.DRAFTS} < set(names)
    assert {"H96 B1 4 of 4", "H12 B128 5 of 8"} < {case.name for case in workload_of("kda_commit").cases}


@pytest.mark.parametrize("case", [BLOCK, CORE, CONV, COMMIT], ids=lambda case: case.name)
def test_segments_verify_drafts(case: Case) -> None:
    segment = make_args(case, CPU)["segment"]
    assert (segment.draft, segment.lengths, segment.slot_ids) == (True, (3, 3), (1, 2))


def writes_the_state(**args: Any) -> Any:
    y = kda(**args)
    args["state"].recurrent[1, 0, 0, 0] += 1
    return y


def moves_the_tail(**args: Any) -> Any:
    y = kda(**args)
    args["state"].conv[2] = args["state"].conv[2].roll(-1, 0)
    return y


def takes_them_for_good(**args: Any) -> Any:
    """As if all drafts were accepted at once: what a kernel without a record does."""
    return kda(**{**args, "segment": dataclasses.replace(args["segment"], draft=False)})


def records_nothing(**args: Any) -> Any:
    state = args["state"]
    return kda(**{**args, "state": dataclasses.replace(state, drafts=lost(state.drafts))})


def lost(drafts: Any) -> Any:
    return type(drafts)(*(getattr(drafts, name).clone() for name in ("x", "k", "g", "u")))


def records_keys_normalised(**args: Any) -> Any:
    o = kda_core(**args)
    k = args["drafts"].k
    k[1:] = torch.nn.functional.normalize(k[1:].float(), dim=-1).to(k.dtype)
    return o


def records_behind_the_last(**args: Any) -> Any:
    o = kda_core(**args)
    args["drafts"].u[1, TOKENS] = 0
    return o


def commits_one_more(**args: Any) -> None:
    kda_commit(**{**args, "counts": args["counts"] + 1})


def forgets_the_tail(**args: Any) -> None:
    state = args["state"]
    kda_commit(**{**args, "state": dataclasses.replace(state, conv=state.conv.clone())})


def reads_behind_the_last(**args: Any) -> None:
    kda_commit(**args)
    state = args["state"]
    state.recurrent[1] += 0 * state.drafts.u[1, TOKENS].unsqueeze(-1)


def records_no_inputs(**args: Any) -> Any:
    return short_conv(**{**args, "record": None})


@pytest.mark.parametrize(
    ("slot", "case", "function", "message"),
    [
        ("kda_decode", BLOCK, writes_the_state, "state.recurrent: rows that the op must not touch changed"),
        ("kda_decode", BLOCK, moves_the_tail, "state.conv: rows that the op must not touch changed"),
        ("kda_decode", BLOCK, takes_them_for_good, "state.recurrent: rows that the op must not touch changed"),
        ("kda_decode", BLOCK, records_nothing, "state.drafts.u: relative RMS error"),
        ("kda_core_decode", CORE, records_keys_normalised, "drafts.k: relative RMS error"),
        ("kda_core_decode", CORE, records_behind_the_last, "drafts.u: rows that the op must not touch changed"),
        ("kda_commit", COMMIT, commits_one_more, "state.recurrent: relative RMS error"),
        ("kda_commit", COMMIT, forgets_the_tail, "state.conv: relative RMS error"),
        ("kda_commit", COMMIT, reads_behind_the_last, "numbers are not finite"),
        ("short_conv_decode", CONV, records_no_inputs, "record: relative RMS error"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_faults_are_seen(slot: str, case: Case, function: Op, message: str) -> None:
    with pytest.raises(GateError) as caught:
        gate(slot, case, function)
    assert message in "; ".join(caught.value.reasons)


def size(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_costs_count_what_is_moved() -> None:
    """By the arguments themselves: what each request reads and writes of its slot, and its token rows."""
    cost = {
        case.name: workload_of(slot).cost(case) for slot, case in (("kda_decode", BLOCK), ("kda_core_decode", CORE))
    }
    args = make_args(CORE, CPU)
    drafts = [rows[1:, :TOKENS] for rows in (args["drafts"].k, args["drafts"].g, args["drafts"].u)]
    rows = [args[name] for name in ("q", "k", "v", "gate_raw")]
    # The result is as large as v.
    moved = size(*rows, args["v"], args["state"][1:], *drafts)
    plain = workload_of("kda_core_decode").contract.cost(CORE.axes, 2)
    assert cost[CORE.name] == Cost(moved, plain.flops)
    args = make_args(BLOCK, CPU)
    state = args["state"]
    drafts = [rows[1:, :TOKENS] for rows in (state.drafts.x, state.drafts.k, state.drafts.g, state.drafts.u)]
    rows = [args[name] for name in ("qkv", "gate_raw", "out_gate")]
    moved = size(*rows, args["out_gate"], state.recurrent[1:], state.conv[1:], *drafts)
    assert cost[BLOCK.name] == Cost(moved, workload_of("kda_decode").contract.cost(BLOCK.axes, 2).flops)
    args = make_args(CONV, CPU)
    moved = size(args["x"], args["x"], args["weight"], args["tail"][1:], args["record"][1:, :TOKENS])
    assert workload_of("short_conv_decode").cost(CONV).bytes == moved


def test_a_commit_reads_the_accepted_part_of_the_record() -> None:
    state, kept = make_args(COMMIT, CPU)["state"], 2
    read = size(*(rows[1:, :kept] for rows in (state.drafts.k, state.drafts.g, state.drafts.u)))
    # Each row of the new tail is read once, from the record or from the old one.
    moved = read + 2 * size(state.recurrent[1:], state.conv[1:])
    assert workload_of("kda_commit").cost(COMMIT).bytes == moved


def test_plain_calls_cost_what_the_contract_says() -> None:
    for workload in WORKLOADS:
        for case in workload.cases:
            plain = workload.contract.cost(case.axes, 2)
            assert (workload.cost(case) == plain) == (case.cost is None), f"{workload.slot} {case.name}"


def test_drafts_are_measured_beside_separate_kernels() -> None:
    sources = {"short_conv": "conv:short_conv", "kda_core": "kda:kda_core", "gated_norm": "norm:gated_norm"}
    parts = [
        dataclasses.replace(toy_kernel(f"portable.{op}", "unused", op, priority=100), load=f"k3port.ops.{place}")
        for op, place in sources.items()
    ]
    references = [kernel for kernel in KERNELS if kernel.is_reference]
    workload, args = workload_of("kda_decode", BLOCK), make_args(BLOCK, CPU)
    peer = parts_peer("kda", "decode", [*parts, *references])
    assert peer_error(peer.prepare(args), answer_of(workload, args)) < 2e-2


def test_only_kernels_with_a_record_are_measured() -> None:
    fields = {"op": "kda_core", "phases": ("decode",)}
    keeps = dataclasses.replace(
        toy_kernel("toy.keeps", "", **fields, records_drafts=True), load="k3port.ops.kda:kda_core"
    )
    without = dataclasses.replace(keeps, name="toy.without", records_drafts=False)
    workload = dataclasses.replace(workload_of("kda_core_decode", CORE), peers=lambda *_: ())
    skipped, row = run_case(cpu_bench([keeps, without]), workload, CORE)
    assert isinstance(skipped, Skipped) and "leaves no record of the drafts" in skipped.reason
    assert isinstance(row, Row) and row.kernel == "toy.keeps"
    assert (row.case, row.bytes) == (CORE.name, workload.cost(CORE).bytes)


def test_drafts_do_not_decide_for_steps() -> None:
    """Cases are tuned where their look-up is their own, or where they decide for the others."""
    tuned = {w.slot: {case.name for case in w.cases if case.tuned} for w in WORKLOADS}
    for slot in ("kda_core_decode", "short_conv_decode"):
        assert tuned[slot] and not [name for name in tuned[slot] if " x" in name]
    assert tuned["kda_decode"] == {case.name for case in workload_of("kda_decode").cases}
    assert tuned["kda_commit"] == {f"H{heads} B{n} 8 of 8" for heads in (96, 12) for n in commits.REQUESTS}
    for workload in WORKLOADS:
        assert any(case.tuned and case.quick for case in workload.cases), workload.slot


def test_what_calls_look_up_is_what_can_be_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, so nothing is looked up")
    from k3port.backends.portable import launch
    from k3port.backends.portable.kernels import kda_commit as commit_module
    from k3port.backends.portable.kernels import kda_fused, kda_step, kda_verify
    from k3port.testing.bench.tune import grids

    for module in (kda_fused, kda_verify, kda_step, commit_module):
        monkeypatch.setattr(module, "launch", lambda *args, **constants: None)
    step = kda_block.case("decode", REQUESTS, REQUESTS, 1)
    core_step = cores.case("decode", REQUESTS, REQUESTS, HEADS, dim=DIM)
    looked: dict[str, tuple[str, dict[str, int]]] = {}
    for what, function, case in (
        ("step", kda_fused.kda_decode, step),
        ("drafts", kda_fused.kda_decode, BLOCK),
        ("core step", kda_step.kda_core_step, core_step),
        ("core drafts", kda_step.kda_core_step, CORE),
        ("commit", commit_module.kda_commit, COMMIT),
    ):
        with launch.pretend_arch("sm_90"), launch.watch_tuned() as found:
            function(**make_args(case, CPU))
        (one,) = found
        looked[what] = one.name, dict(one.axes)
    assert looked["step"] == ("kda_fused", {"N": 2})
    assert looked["drafts"] == ("kda_verify", {"N": 2})
    # The same question: this is why only one of them is tuned for.
    assert looked["core step"] == looked["core drafts"] == ("kda_step", {"N": 4})
    assert looked["commit"] == ("kda_commit", {"N": 4})
    fused = next(kernel for kernel in KERNELS if kernel.name == "portable.kda_decode_fused")
    assert set(grids(fused)) == {looked[what][0] for what in ("step", "drafts")}
    assert set(grids(fused)["kda_verify"][0]) == {"launches", "block_v", "num_warps"}
