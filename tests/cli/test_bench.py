"""``k3port bench``: refused without a GPU, and the whole path on the CPU's clock where a test lends it one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_parts import CEILINGS, SHORT, absent_peer, rms_workload

from k3port.cli import bench
from k3port.errors import ExitCode
from k3port.oracle.spec import KernelSpec
from k3port.plugins import Registry
from k3port.testing.bench import run, workloads
from k3port.testing.bench.clock import CpuClock
from k3port.testing.bench.machine import describe
from k3port.testing.bench.receipt import read_receipt

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@no_gpu
@pytest.mark.parametrize(
    "command", [("bench", "kernels"), ("bench", "kernels", "--op", "kda_core", "--quick", "--no-peers")]
)
def test_without_a_gpu_there_is_nothing_to_measure(k3port: Any, command: tuple[str, ...]) -> None:
    result = k3port(*command)
    assert (result.code, result.out) == (ExitCode.UNSUPPORTED, "")
    assert "error: no GPU to measure on" in result.err
    assert "hint:" in result.err


@no_gpu
def test_without_a_gpu_as_json(k3port: Any) -> None:
    result = k3port("bench", "kernels", "--json")
    assert result.code == ExitCode.UNSUPPORTED
    assert json.loads(result.out)["error"]["exit_code"] == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("kernels", "--op", "rms_nrm"), "did you mean rms_norm?"),
        (("kernels", "--kernel", "cpu.rms_nrm"), "did you mean cpu.rms_norm?"),
        (("kernels", "--kernel", "cuda.flashinfer_mla_trtllm"), "declared but not built"),
        (("kernels", "--op", "embed"), "nothing to measure for embed"),
        (("kernels", "--op", "rms_norm", "--kernel", "cpu.linear"), "cpu.linear does not do rms_norm"),
        (("kernels", "--kernel", "rms_norm"), "did you mean portable.rms_norm?"),
        (("tune", "rms_norm"), "did you mean portable.rms_norm?"),
        (("tune",), "missing argument"),
        (("tune", "portable.none"), "no kernel 'portable.none'"),
        (("tun", "x"), "did you mean k3port bench tune?"),
    ],
)
def test_wrong_names_are_told_first(k3port: Any, args: tuple[str, ...], message: str) -> None:
    result = k3port("bench", *args)
    assert result.code == ExitCode.USAGE
    assert message in result.err


@pytest.fixture
def lent_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = describe(torch.device("cpu"))
    monkeypatch.setattr(run, "prepare", lambda *_: run.Device(CpuClock(), machine, CEILINGS))
    monkeypatch.setattr(run, "QUICK", SHORT)
    monkeypatch.setattr(workloads, "WORKLOADS", (rms_workload([absent_peer()], dtype=torch.float32),))


@pytest.mark.usefixtures("lent_clock")
def test_the_table_and_its_receipt(k3port: Any, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    result = k3port("bench", "kernels", "--quick", "--quiet", "--save", path)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith(describe(torch.device("cpu")).device)
    assert "4,000 GB/s copy" in lines[1]
    assert lines[4].split()[:2] == ["op", "shape"]
    assert "cpu.rms_norm" in lines[5]
    assert "nobody: peer absent" in lines[5]
    receipt = read_receipt(path)
    assert [row.kernel for row in receipt.rows] == ["cpu.rms_norm"]
    assert receipt.machine.packages["torch"] == torch.__version__


@pytest.mark.usefixtures("lent_clock")
def test_a_run_that_is_stopped_keeps_what_it_has(k3port: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = rms_workload(dtype=torch.float32)

    def stop(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        raise KeyboardInterrupt

    second = dataclasses.replace(first, cases=(dataclasses.replace(first.cases[0], make=stop),))
    monkeypatch.setattr(workloads, "WORKLOADS", (first, second))
    path = tmp_path / "receipt.json"
    assert k3port("bench", "kernels", "--quick", "--save", path).code == ExitCode.INTERRUPTED
    assert [row.kernel for row in read_receipt(path).rows] == ["cpu.rms_norm"]


@pytest.mark.usefixtures("lent_clock")
def test_json_is_the_receipt(k3port: Any) -> None:
    result = k3port("bench", "kernels", "--quick", "--json", "--no-peers", "--kernel", "reference.rms_norm")
    document = json.loads(result.out)
    assert [row["kernel"] for row in document["rows"]] == ["reference.rms_norm"]
    assert document["rows"][0]["peers"] == []
    assert document["warnings"] == []


@pytest.mark.usefixtures("lent_clock")
def test_a_failed_check_is_an_error_at_the_end(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3port.backends.cpu import dense

    monkeypatch.setattr(dense, "rms_norm", lambda x, weight, eps: x * 3)
    for options in ((), ("--json",)):
        result = k3port("bench", "kernels", "--quick", *options)
        assert result.code == ExitCode.NUMERICS
        assert "1 kernels failed the check before their timing" in result.err
        assert "relative RMS error" in result.err
    document = json.loads(result.out)
    assert document["rows"] == []
    assert document["skipped"][0]["failed"]


@pytest.mark.usefixtures("lent_clock")
def test_a_receipt_that_cannot_be_written(k3port: Any, tmp_path: Path) -> None:
    result = k3port("bench", "kernels", "--quick", "--save", tmp_path / "none" / "receipt.json")
    assert result.code == ExitCode.FAILED
    assert "cannot write" in result.err


@pytest.fixture
def toy(lent_clock: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A kernel to tune in the registry, and a folder of its own for its configuration."""
    pytest.importorskip("triton", reason="Triton is not installed, so there is nothing to tune")
    import bench_toy

    from k3port.backends.portable import launch

    spec = KernelSpec("toy.norm", "rms_norm", "bench_toy:toy", "for tests")
    monkeypatch.setattr(bench, "default_registry", lambda: Registry((spec,), (), ()))
    monkeypatch.setattr(launch, "entries", lambda name: bench_toy.ENTRIES)
    save = run.save_entries
    monkeypatch.setattr(run, "save_entries", lambda report: save(report, tmp_path))
    (tmp_path / "bench_toy.json").write_text(bench_toy.FILE)
    with launch.pretend_arch("sm_90"):
        yield tmp_path / "bench_toy.json"


def test_tuning_prints_what_it_found_and_writes_nothing(k3port: Any, toy: Path) -> None:
    before = toy.read_text()
    result = k3port("bench", "tune", "toy.norm", "--quick", "--quiet")
    assert (result.code, result.err) == (0, "")
    rows = result.out.splitlines()
    assert rows[0].split()[:3] == ["configuration", "case", "in"]
    assert rows[1].startswith("bench_toy")
    assert rows[1].endswith("{'num_warps': 2}")
    assert json.loads("\n".join(rows[2:]))["entries"][0]["config"] == {"num_warps": 2}
    assert toy.read_text() == before


def test_tuning_saves(k3port: Any, toy: Path) -> None:
    result = k3port("bench", "tune", "toy.norm", "--quick", "--save", "--json")
    document = json.loads(result.out)
    assert document["saved"] == [str(toy)]
    assert document["entries"]["bench_toy"][0]["config"] == {"num_warps": 2}
    assert {trial["config"]["num_warps"] for trial in document["cases"][0]["trials"]} == {1, 2, 4, 8, 16}
    assert json.loads(toy.read_text())["entries"][0]["config"] == {"num_warps": 2}


def test_a_kernel_without_candidates_cannot_be_tuned(k3port: Any, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_toy

    monkeypatch.delattr(bench_toy, "CANDIDATES")
    result = k3port("bench", "tune", "toy.norm")
    assert result.code == ExitCode.FAILED
    assert "toy.norm has nothing to tune" in result.err


def with_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel more in the registry, which is wrong as it is."""
    toy = KernelSpec("toy.norm", "rms_norm", "bench_toy:toy", "for tests")
    wrong = KernelSpec("toy.wrong", "rms_norm", "bench_toy:wrong", "for tests")
    monkeypatch.setattr(bench, "default_registry", lambda: Registry((toy, wrong), (), ()))


def test_a_kernel_that_fails_takes_no_results_along(k3port: Any, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_failing(monkeypatch)
    asked = ("bench", "tune", "toy.norm", "toy.wrong", "--quick", "--quiet", "--save")
    result = k3port(*asked)
    assert result.code != 0 and "toy.wrong" in result.err.splitlines()[0]
    assert result.out.splitlines()[1].endswith("{'num_warps': 2}")
    assert json.loads(toy.read_text())["entries"][0]["config"] == {"num_warps": 2}
    document = json.loads(k3port(*asked, "--json").out)
    assert document["entries"]["bench_toy"][0]["config"] == {"num_warps": 2} and document["saved"] == [str(toy)]
    assert document["error"]["exit_code"] == result.code and "toy.wrong" in document["error"]["message"]


def test_a_first_kernel_that_fails_is_an_error_alone(k3port: Any, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_failing(monkeypatch)
    result = k3port("bench", "tune", "toy.wrong", "toy.norm", "--quick", "--json")
    assert list(json.loads(result.out)) == ["error"]


def test_an_interrupt_keeps_what_is_saved(k3port: Any, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from k3port.testing.bench import tune

    with_failing(monkeypatch)
    real = tune.tune_case

    def stopped(bench: Any, spec: KernelSpec, *rest: Any) -> Any:
        if spec.name == "toy.wrong":
            raise KeyboardInterrupt
        return real(bench, spec, *rest)

    monkeypatch.setattr(tune, "tune_case", stopped)
    asked = ("bench", "tune", "toy.norm", "toy.wrong", "--quick", "--save")
    result = k3port(*asked)
    assert result.code == ExitCode.INTERRUPTED
    assert result.out.splitlines()[1].endswith("{'num_warps': 2}")
    assert list(json.loads(k3port(*asked, "--json").out)) == ["error"]
    assert json.loads(toy.read_text())["entries"][0]["config"] == {"num_warps": 2}


@no_gpu
@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("portable.kda_commit", "--op", "kda"), "portable.kda_commit does not do kda", "--op kda_commit, or no --op"),
        (("portable.rms_norm", "--op", "kda"), "portable.rms_norm does not do kda", "--op rms_norm, or no --op"),
        (
            ("portable.rms_norm", "portable.kda_prefill"),
            "portable.kda_prefill has nothing to tune",
            "what it calls is tuned by: k3port bench tune portable.gated_norm portable.kda_core_chunk portable.short_conv",
        ),
        (("portable.linear",), "portable.linear has nothing to tune", "needs CANDIDATES"),
    ],
)
def test_what_needs_no_gpu_is_told_without_one(k3port: Any, args: tuple[str, ...], message: str, hint: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed, so there is nothing to tune")
    result = k3port("bench", "tune", *args)
    assert result.code in (ExitCode.USAGE, ExitCode.FAILED)
    assert f"error: {message}" in result.err and hint in result.err
