"""Tuning: every candidate through the gate, the fastest right one wins, and it goes into the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_parts import CEILINGS, cpu_bench, rms_workload

pytest.importorskip("triton", reason="Triton is not installed, so there is nothing to tune")

import bench_toy

from k3port.backends.portable import launch
from k3port.errors import K3Error, UsageError
from k3port.oracle.spec import KernelSpec
from k3port.testing.bench import run as commands
from k3port.testing.bench import tune, workloads
from k3port.testing.bench.clock import CpuClock
from k3port.testing.bench.gate import GateError
from k3port.testing.bench.machine import describe
from k3port.testing.bench.observe import observed_configs
from k3port.testing.bench.timing import Settings
from k3port.testing.bench.tune import CaseResult, combinations, entries_of, grids, tune_case

TOY = KernelSpec("toy.norm", "rms_norm", "bench_toy:toy", "for tests")


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tune, "SCREENING", Settings(rounds=1, sample_seconds=1e-6, warmup_seconds=0))
    others = launch.entries
    monkeypatch.setattr(launch, "entries", lambda name: bench_toy.ENTRIES if name == "bench_toy" else others(name))
    with launch.pretend_arch("sm_90"):
        yield


def run(dim: int = 32) -> list[CaseResult]:
    workload = rms_workload(dim=dim)
    return tune_case(cpu_bench([TOY], "toy.norm"), TOY, workload, workload.cases[0], {})


def test_the_fastest_right_configuration_wins() -> None:
    (result,) = run()
    assert result.name == "bench_toy"
    assert result.axes == {"D": 32}
    assert result.in_use.config == {"num_warps": 4}
    assert result.best.config == {"num_warps": 2}
    assert result.best.microseconds is not None
    assert result.in_use.microseconds is not None
    assert result.best.microseconds < result.in_use.microseconds
    reasons = {trial.config["num_warps"]: trial.dropped for trial in result.trials}
    assert set(reasons) == {1, 2, 4, 8, 16}
    assert "relative RMS error" in reasons[8]
    assert "out of resource" in reasons[16]
    assert not reasons[1] + reasons[2] + reasons[4]


def test_dropped_configurations_are_never_timed() -> None:
    bench_toy.calls.clear()
    run()
    # Once each, for the gate.
    assert bench_toy.calls.count(8) == bench_toy.calls.count(16) == 1
    assert bench_toy.calls.count(2) > 3


def test_the_one_in_use_stays_where_the_gain_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "KEEP_MARGIN", 0.9)
    (result,) = run()
    assert result.best.config == result.in_use.config == {"num_warps": 4}


def test_a_kernel_that_is_wrong_as_it_is_cannot_be_tuned() -> None:
    with launch.force_config("bench_toy", {"num_warps": 8}), pytest.raises(GateError):
        run()


def test_a_case_that_the_kernel_does_not_serve_is_left_out() -> None:
    limited = dataclasses.replace(TOY, check=lambda query, target: "too small")
    workload = rms_workload()
    assert tune_case(cpu_bench([limited], "toy.norm"), limited, workload, workload.cases[0], {}) == []


def test_spills_drop_a_configuration_also_where_it_was_compiled_before() -> None:
    workload = rms_workload()
    known = {("bench_toy", (("num_warps", 2),)): 12}
    (result,) = tune_case(cpu_bench([TOY], "toy.norm"), TOY, workload, workload.cases[0], known)
    assert result.best.config == {"num_warps": 4}
    assert "12 registers spilled" in [trial.dropped for trial in result.trials]


def test_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    assert grids(TOY) == {"": ({"num_warps": (1, 2, 4, 8, 16)},)}
    monkeypatch.setattr(bench_toy, "CANDIDATES", {"bench_toy": {"num_warps": (1,)}, "other": {"num_warps": (2,)}})
    assert set(grids(TOY)) == {"bench_toy", "other"}
    assert [result.name for result in run()] == ["bench_toy"]
    for wrong in ({}, {"num_warps": ()}, {"num_warps": ("4",)}, {"a": {"num_warps": (1,)}, "num_warps": (1,)}):
        monkeypatch.setattr(bench_toy, "CANDIDATES", wrong)
        with pytest.raises(K3Error):
            grids(TOY)
    monkeypatch.delattr(bench_toy, "CANDIDATES")
    with pytest.raises(K3Error, match="nothing to tune"):
        grids(TOY)


def test_combinations_start_with_the_one_in_use_and_keep_other_keys() -> None:
    grid = {"BLOCK": (16, 32), "num_warps": (4, 8)}
    found = list(combinations((grid,), {"BLOCK": 32, "num_warps": 4, "tf32": 1}))
    assert found[0] == {"BLOCK": 32, "num_warps": 4, "tf32": 1}
    assert len(found) == 4
    assert all(config["tf32"] == 1 for config in found)


def test_grids_of_one_configuration_are_tried_one_after_the_other() -> None:
    several = ({"launches": (1,), "BLOCK": (16, 32)}, {"launches": (3,)})
    found = list(combinations(several, {"BLOCK": 32, "launches": 1}))
    assert found == [{"BLOCK": 32, "launches": 1}, {"BLOCK": 16, "launches": 1}, {"BLOCK": 32, "launches": 3}]


def test_configurations_in_use_are_seen() -> None:
    with observed_configs() as found:
        launch.tuned("bench_toy", D=7168)
        launch.tuned("bench_toy", D=7168)
    (request,) = found
    assert (request.name, request.axes, request.config) == ("bench_toy", (("D", 7168),), (("num_warps", 4),))
    with observed_configs() as found, launch.force_config("bench_toy", {"num_warps": 1}):
        launch.tuned("bench_toy", D=7168)
    assert found == []


def test_the_slower_one_of_two_cases_at_one_place_counts() -> None:
    (result,) = run()
    slow = dataclasses.replace(result, best=tune.Trial({"num_warps": 1}, 1e9))
    (entry,) = entries_of([result, slow])["bench_toy"]
    assert entry.config == {"num_warps": 1}


@pytest.fixture
def commands_here(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = dataclasses.replace(describe(torch.device("cpu")), arch="sm_90", device="a test")
    monkeypatch.setattr(commands, "prepare", lambda *_: commands.Device(CpuClock(), machine, CEILINGS))
    monkeypatch.setattr(workloads, "WORKLOADS", (rms_workload(),))


@pytest.mark.usefixtures("commands_here")
def test_what_was_found_goes_into_the_file(tmp_path: Path) -> None:
    report = commands.bench_tune([TOY], [TOY], quick=True)
    (tmp_path / "bench_toy.json").write_text(bench_toy.FILE)
    (path,) = commands.save_entries(report, tmp_path)
    data: dict[str, Any] = json.loads(path.read_text())
    first = data["entries"][0]
    assert (first["archs"], first["when"], first["config"]) == (["sm_90"], {"D": [17, 63]}, {"num_warps": 2})
    assert first["measured"]["device"] == "a test"
    assert {"torch", "triton", "date", "us"} <= set(first["measured"])
    assert data["entries"][1:] == json.loads(bench_toy.FILE)["entries"]


@pytest.mark.usefixtures("commands_here")
def test_candidates_that_nobody_asks_for_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"num_warps": (1, 2)}
    monkeypatch.setattr(bench_toy, "CANDIDATES", {"bench_toy": grid, "other": grid})
    with pytest.raises(K3Error, match="CANDIDATES names other, which no call looks up"):
        commands.bench_tune([TOY], [TOY], quick=True)


@pytest.mark.usefixtures("commands_here")
def test_a_kernel_that_serves_no_shape_is_an_error() -> None:
    limited = dataclasses.replace(TOY, check=lambda query, target: "too small")
    with pytest.raises(K3Error, match="no shape to tune on sm_90") as caught:
        commands.bench_tune([limited], [limited], quick=True)
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("commands_here")
def test_everything_that_needs_no_device_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any) -> commands.Device:
        raise AssertionError("the ceilings were measured first")

    monkeypatch.setattr(commands, "prepare", measured)
    other = dataclasses.replace(TOY, name="toy.sample", op="sample")
    with pytest.raises(UsageError, match=r"nothing to measure for toy\.sample"):
        commands.bench_tune([TOY, other], [TOY, other])
    with pytest.raises(UsageError, match=r"toy\.norm does not do kda"):
        commands.bench_tune([TOY], [TOY], ["kda"])


@pytest.mark.usefixtures("commands_here")
def test_what_was_found_before_a_failure_is_handed_over() -> None:
    wrong = dataclasses.replace(TOY, name="toy.wrong", load="bench_toy:wrong")
    seen: list[commands.TuneReport] = []
    with pytest.raises(GateError):
        commands.bench_tune([TOY, wrong], [TOY, wrong], quick=True, checkpoint=seen.append)
    assert len(seen) == 2
    assert [case["kernel"] for case in seen[-1].cases] == ["toy.norm"]
    assert [entry.config for entry in seen[-1].entries["bench_toy"]] == [{"num_warps": 2}]


@pytest.mark.usefixtures("commands_here")
def test_a_case_that_another_one_decides_for_is_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slower call with the same look-up, whose best configuration is another one, does not count."""
    workload = rms_workload()
    (case,) = workload.cases

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        bench_toy.SLEEP.update({1: 4e-3, 2: 8e-3, 4: 6e-3})
        return case.make(device, generator)

    for tuned, warps, cases in ((True, 1, ["T5", "slower"]), (False, 2, ["T5"])):
        slower = dataclasses.replace(case, name="slower", make=make, tuned=tuned)
        monkeypatch.setattr(workloads, "WORKLOADS", (dataclasses.replace(workload, cases=(case, slower)),))
        monkeypatch.setattr(bench_toy, "SLEEP", {1: 3e-3, 2: 1e-3, 4: 2e-3})
        report = commands.bench_tune([TOY], [TOY], quick=True)
        assert [found["case"] for found in report.cases] == cases
        assert [entry.config for entry in report.entries["bench_toy"]] == [{"num_warps": warps}]


@pytest.mark.usefixtures("commands_here")
def test_a_workload_that_was_tuned_in_part_gives_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = rms_workload()

    def failing(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        raise RuntimeError("an illegal address")

    second = dataclasses.replace(workload.cases[0], name="second", make=failing)
    monkeypatch.setattr(workloads, "WORKLOADS", (dataclasses.replace(workload, cases=(workload.cases[0], second)),))
    seen: list[commands.TuneReport] = []
    with pytest.raises(RuntimeError, match="illegal address"):
        commands.bench_tune([TOY], [TOY], quick=True, checkpoint=seen.append)
    (report,) = seen
    assert len(report.cases) == 1 and not report.entries
