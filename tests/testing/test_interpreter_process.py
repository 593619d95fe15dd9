"""The process in which Triton interprets: what it is asked, and what is made of a process that fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")

from k3port.ops.contract import Sample
from k3port.testing import interpreter, interpreter_process
from k3port.testing.interpreter import InterpreterFailed, run_interpreted, small
from k3port.testing.suite import SuiteReport


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


PLUGIN = """
import time
import torch, triton
from k3port.hookspecs import hookimpl
from k3port.oracle.spec import KernelSpec, Requires

def norm(x, weight, eps):
    value = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()
    return value.to(x.dtype)

def sleepy(x, weight, eps):
    # In C, for as long as it likes: no exception of Python comes through.
    if x.shape[0] == 1:
        import ctypes
        ctypes.PyDLL(None).sleep(60)
    return norm(x, weight, eps)

def chatty(x, weight, eps):
    print("{noise}")
    print('{"case": 3}')
    return norm(x, weight, eps)

def leaves(x, weight, eps):
    if x.shape[0] == 1:
        import os
        os._exit(0)
    return norm(x, weight, eps)

@hookimpl
def k3port_kernels():
    gpu = Requires(vendors=("nvidia", "amd"))
    return [KernelSpec(f"odd.{name}", "rms_norm", f"odd_plugin:{name}", name, (), gpu)
            for name in ("norm", "sleepy", "chatty", "leaves")]
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SuiteReport]:
    """Runs a kernel of the plugin above, in its plain calls."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "odd_plugin.py").write_text(PLUGIN)

    def run(name: str, **options: Any) -> SuiteReport:
        fixed = {"plugins": ["odd_plugin"], "dtypes": ["float32"], "variants": ["plain"], "invariants": False}
        (report,) = run_interpreted([f"odd.{name}"], **{**fixed, **options})
        return report

    return run


def test_a_process_that_does_not_end_names_its_case_and_the_others_run(
    odd: Callable[..., SuiteReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter_process, "GRACE_S", 1.0)
    every = [case.name for case in odd("norm").ran]
    report = odd("sleepy", case_s=1)
    assert sorted(case.name for case in report.ran) == sorted(every)
    assert report.faults and all("did not end within 1 s" in fault for fault in report.faults)
    assert len(report.faults) < len(every)


def test_the_whole_has_a_limit(odd: Callable[..., SuiteReport]) -> None:
    fault = odd("sleepy", timeout_s=9).faults[-1]
    assert fault.endswith("the whole part did not end within 9 s; what comes after it was not run")


def test_what_a_kernel_prints_is_no_result(odd: Callable[..., SuiteReport]) -> None:
    report = odd("chatty")
    assert len(report.ran) > 3 and not report.faults


def test_a_kernel_that_ends_its_process_is_named_and_the_other_samples_run(odd: Callable[..., SuiteReport]) -> None:
    report = odd("leaves")
    assert len(report.ran) > 3
    assert all("ended with status 0, as os._exit does" in fault for fault in report.faults)
    assert 0 < len(report.faults) < 3


def test_the_process_must_have_been_started_for_interpretation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        interpreter.main(["portable.rms_norm"])
    assert "TRITON_INTERPRET=1 must be in the environment" in capsys.readouterr().err
    assert "triton" in sys.modules


def test_large_samples_are_left_out() -> None:
    assert small(Sample("small", {"x": torch.empty(1 << 19), "eps": 1e-5}))
    assert not small(Sample("large", {"x": torch.empty(1 << 19), "more": [torch.empty(1)]}))
