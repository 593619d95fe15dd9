"""The shapes fit their contracts, and answers that do not come from a contract's reference agree with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from k3port.ops.contract import mutated, relative_rms
from k3port.testing.bench.gate import answer_of
from k3port.testing.bench.suite import make_args
from k3port.testing.bench.workload import Answer, Case, Workload, contract_args
from k3port.testing.bench.workloads import (
    WORKLOADS,
    attn_res,
    kda_block,
    kda_commit,
    kda_core,
    norms,
    sample,
    short_conv,
    vision_patch,
)

CPU = torch.device("cpu")
SMALL = {
    "kda_core_prefill": kda_core.case("prefill", 2, 140, 3, dim=16),
    "kda_core_decode": kda_core.case("decode", 3, 3, 2, dim=16),
    "kda_prefill": kda_block.case("prefill", 2, 40, 1),
    "kda_decode": kda_block.case("decode", 2, 2, 1),
    "kda_commit": kda_commit.case(2, 3, 4, 2, dim=16),
    "attn_res": attn_res.case(3, 5, dim=64),
    "rms_norm": norms.rms_case(3, 32),
    "gated_norm": norms.gated_case(3, 2, 16),
    "situ_mul": norms.situ_case(3, 16),
    "short_conv_prefill": short_conv.case("prefill", 2, 14, 24),
    "short_conv_decode": short_conv.case("decode", 3, 3, 24),
    "vision_patch": vision_patch.case(5, 8),
    "sample": sample.case(3, sample.KINDS[1], 100),
}
DRAFTS = {
    "kda_core_decode": kda_core.case("decode", 3, 12, 2, dim=16),
    "kda_decode": kda_block.case("decode", 2, 6, 1),
    "short_conv_decode": short_conv.case("decode", 3, 15, 24),
}
EACH = [(w, SMALL[w.slot]) for w in WORKLOADS] + [(w, DRAFTS[w.slot]) for w in WORKLOADS if w.slot in DRAFTS]


def each(found: Iterable[tuple[Workload, Case]] = EACH) -> Any:
    return pytest.mark.parametrize(
        ("workload", "case"), [pytest.param(w, case, id=f"{w.slot} {case.name}") for w, case in found]
    )


def test_the_table_has_every_op_that_is_to_be_fast() -> None:
    slots = [workload.slot for workload in WORKLOADS]
    assert sorted(slots) == sorted(SMALL)
    assert len(slots) == len(set(slots))


@each()
def test_cases_give_what_the_contract_takes(workload: Workload, case: Case) -> None:
    args = make_args(case, CPU)
    assert list(args) == list(workload.contract.inputs)
    answer = answer_of(workload, args)
    assert len(answer.outputs) == len(workload.contract.outputs)
    assert set(answer.updated) == set(mutated(workload.contract, args))
    again = make_args(case, CPU)
    first = next(name for name, value in args.items() if isinstance(value, torch.Tensor))
    assert torch.equal(args[first], again[first]), "the same numbers every time"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.slot)
def test_costs_grow_with_the_cases(workload: Workload) -> None:
    costs = [workload.cost(case) for case in workload.cases]
    assert all(cost.bytes > 0 and cost.flops > 0 for cost in costs)
    assert len({case.name for case in workload.cases}) == len(workload.cases)
    assert any(case.quick for case in workload.cases)
    largest = max(range(len(costs)), key=lambda i: costs[i].bytes)
    assert costs[largest].bytes > 2 * min(cost.bytes for cost in costs)


@each((w, case) for w, case in EACH if w.reference)
def test_own_answers_agree_with_the_contract(workload: Workload, case: Case) -> None:
    args = make_args(case, CPU)
    assert workload.reference is not None
    mine = workload.reference(args)
    theirs: Answer = answer_of(Workload(workload.op, workload.phase, workload.cases), args)
    for a, b in zip(mine.outputs, theirs.outputs, strict=True):
        assert a.dtype == torch.float64
        # The contract's reference rounds decays and results to float64 in another order, no more.
        assert relative_rms(a, b) < 1e-12
    assert set(mine.updated) == set(theirs.updated)
    for path, b in theirs.updated.items():
        assert relative_rms(mine.updated[path], b) < 1e-12


def test_the_host_knows_what_its_requests_ask_for() -> None:
    flags = {}
    for kind in sample.KINDS:
        params = make_args(sample.case(2, kind, 10), CPU)["params"]
        flags[kind.name] = (params.all_greedy, params.any_filter)
    filtered = {"top-p": (False, True), "top-k, top-p, min-p": (False, True)}
    assert flags == {"greedy": (True, False), "min-p": (False, False), **filtered}


def test_arguments_come_from_data_or_from_defaults() -> None:
    contract = dataclasses.replace(WORKLOADS[0].contract, inputs={"a": "", "b": ""}, reference=lambda a, b=5: None)
    assert contract_args(contract, {"a": 1, "more": 2}) == {"a": 1, "b": 5}
    with pytest.raises(KeyError, match="no data for its argument a"):
        contract_args(contract, {"b": 1})


def test_a_wrong_answer_would_be_seen() -> None:
    """The same comparison with one token's decay changed."""
    args = make_args(SMALL["kda_core_prefill"], CPU)
    right = kda_core.core_answer(args)
    other = args["gate_raw"].clone()
    other[70] -= 1
    wrong = kda_core.core_answer({**args, "gate_raw": other})
    assert relative_rms(wrong.outputs[0], right.outputs[0]) > 1e-3
