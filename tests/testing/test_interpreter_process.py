"""The process in which Triton interprets: what it is asked, and what is made of a process that fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")

from k3port.ops.contract import Sample
from k3port.testing import interpreter
from k3port.testing.interpreter import InterpreterFailed, run_interpreted, small


def test_an_unknown_kernel_is_an_error_with_its_name() -> None:
    with pytest.raises(InterpreterFailed, match=r"no kernel portable\.nothing"):
        run_interpreted(["portable.nothing"])


def test_a_declared_kernel_is_refused_with_the_reason() -> None:
    (report,) = run_interpreted(["portable.gloo_all_reduce"], dtypes=["float32"])
    assert not report.ran and not report.faults
    assert all(reason.startswith("AXIS: serves two ranks and more") for reason in report.refusals())


def test_a_kernel_for_another_platform_is_refused() -> None:
    (report,) = run_interpreted(["portable.rms_norm"], platform="cpu", dtypes=["float32"])
    assert not report.ran
    assert list(report.refusals()) == ["VENDOR: needs nvidia or amd, the device is cpu"]


def test_a_process_that_does_not_end_names_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"kernel": "endless.norm", "op": "rms_norm", "case": ["float32", "one row", "strided"]})

    def run(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 7, output=f"{line}\n{{cut".encode())

    monkeypatch.setattr(subprocess, "run", run)
    (report,) = run_interpreted(["endless.norm"], timeout_s=7)
    assert report.faults == (
        "endless.norm, float32, 'one row', strided: the interpreter's process did not end in time",
    )


def test_the_process_must_have_been_started_for_interpretation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        interpreter.main(["portable.rms_norm"])
    assert "TRITON_INTERPRET=1 must be in the environment" in capsys.readouterr().err
    assert "triton" in sys.modules


def test_large_samples_are_left_out() -> None:
    assert small(Sample("small", {"x": torch.empty(1 << 19), "eps": 1e-5}))
    assert not small(Sample("large", {"x": torch.empty(1 << 19), "more": [torch.empty(1)]}))
