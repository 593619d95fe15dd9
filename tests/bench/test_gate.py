"""The gate lets right results through, and refuses everything else before a time is taken."""

from __future__ import annotations

from typing import Any

import bench_parts
import pytest
import torch
from bench_parts import rms_workload

from k3port.errors import ExitCode
from k3port.ops.conv import short_conv
from k3port.testing.bench.gate import GateError, GateReport, answer_of, pass_gate, peer_error
from k3port.testing.bench.suite import make_args
from k3port.testing.bench.workload import Workload
from k3port.testing.bench.workloads.short_conv import case as conv_case


def gate(workload: Workload, function: Any) -> GateReport:
    args = make_args(workload.cases[0], torch.device("cpu"))
    return pass_gate("toy", function, workload, workload.cases[0].name, args, answer_of(workload, args))


def test_a_right_result_passes_with_its_error() -> None:
    report = gate(rms_workload(), bench_parts.right)
    assert 0 < report.relative_rms < report.tolerance == 5e-3
    assert report.checked == ("y",)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bench_parts.off_by_a_percent, "relative RMS error 9.93e-03"),
        (bench_parts.one_wrong, "relative RMS error"),
        (bench_parts.with_a_hole, "32 of 160 numbers are not finite"),
        (bench_parts.beside, "1 elements outside it were overwritten"),
        (bench_parts.failing, "RuntimeError: out of shared memory"),
        (lambda **args: bench_parts.right(**args)[:, :-1], r"y is \(5, 31\), expected \(5, 32\)"),
        (lambda **args: None, "0 outputs, the contract has"),
    ],
)
def test_wrong_results_are_refused(function: Any, message: str) -> None:
    with pytest.raises(GateError, match=message) as caught:
        gate(rms_workload(), function)
    assert caught.value.exit_code == ExitCode.NUMERICS
    assert "nothing is timed" in caught.value.message
    assert caught.value.hint == "k3port kernels check toy"


def conv_workload() -> Workload:
    return Workload("short_conv", "decode", (conv_case("decode", 3, 3, channels=16),))


def test_states_are_compared_where_they_change() -> None:
    report = gate(conv_workload(), short_conv)
    assert report.checked == ("y", "tail")

    def forgets_its_state(**args: Any) -> torch.Tensor:
        return short_conv(**{**args, "tail": args["tail"].clone()})

    with pytest.raises(GateError, match="tail: relative RMS error"):
        gate(conv_workload(), forgets_its_state)


def test_other_slots_must_stay() -> None:
    def touches_the_null_slot(**args: Any) -> torch.Tensor:
        y = short_conv(**args)
        args["tail"][0] += 1
        return y

    with pytest.raises(GateError, match="tail: rows that the op must not touch changed"):
        gate(conv_workload(), touches_the_null_slot)


def test_what_the_op_only_reads_must_stay() -> None:
    def writes_its_input(**args: Any) -> torch.Tensor:
        y = bench_parts.right(**args)
        args["weight"][3] = 7
        return y

    with pytest.raises(GateError, match="weight changed, which the op must leave as it is"):
        gate(rms_workload(), writes_its_input)


def test_the_inputs_stay_for_the_timing() -> None:
    workload = conv_workload()
    args = make_args(workload.cases[0], torch.device("cpu"))
    before = args["tail"].clone()
    pass_gate("toy", short_conv, workload, "B3", args, answer_of(workload, args))
    assert torch.equal(args["tail"], before)


def test_errors_of_peers() -> None:
    workload = rms_workload()
    args = make_args(workload.cases[0], torch.device("cpu"))
    answer = answer_of(workload, args)
    y = bench_parts.right(**args)
    assert peer_error(lambda: y, answer) < 5e-3
    assert peer_error(lambda: y.flatten(), answer) < 5e-3
    assert peer_error(lambda: y * 2, answer) == pytest.approx(1, rel=1e-2)
    for nothing in (y[:-1], None):
        error = peer_error(lambda nothing=nothing: nothing, answer)
        assert error != error
