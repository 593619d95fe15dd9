"""Code of kernels that prints, raises, ends its process or never ends: what the kit makes of each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from k3port.oracle.spec import KernelSpec, Requires
from k3port.plugins import make_registry
from k3port.testing import suite
from k3port.testing.kernel_code import Budget, TookTooLong, cause, ended, load_fault, prints_to_stderr, said, time_limit
from k3port.testing.suite import SuiteReport, run_suite
from k3port.testing.targets import platform_target

REGISTRY = make_registry(entry_points=False)
STATE = {"calls": 0}


def endless(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    while True:
        try:
            STATE["calls"] += 1
        except Exception:
            continue


def leaves(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    sys.exit("bye")


def changing(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Right within the tolerance, and never the same."""
    STATE["calls"] += 1
    value = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()
    return (value * (1 + 3e-7 * (STATE["calls"] % 2))).to(x.dtype)


def spec(function: Callable[..., object], **fields: object) -> KernelSpec:
    path = f"{function.__module__}:{function.__qualname__}"
    return KernelSpec(f"own.{function.__name__}", "rms_norm", path, "x", (), Requires(), **fields)  # type: ignore[arg-type]


def run(kernel: KernelSpec, budget: Budget | None = None) -> SuiteReport:
    target, types = platform_target("gfx950"), [torch.float32]
    return run_suite(kernel, REGISTRY.kernels, target=target, dtypes=types, variants=["plain"], budget=budget)


def test_a_call_that_does_not_end_is_a_fault_and_three_are_enough() -> None:
    report = run(spec(endless), Budget(0.2, 60))
    assert len(report.ran) == 3
    assert report.grouped_faults[0].endswith("did not end within 0.2 s")
    assert report.faults[-1].endswith("did not end within 0.2 s; what comes after it was not run")


def test_the_whole_part_has_a_limit() -> None:
    budget = Budget(60, 0.3)
    (fault,) = run(spec(endless), budget).faults
    assert fault.endswith("the whole part did not end within 0.3 s; what comes after it was not run")
    assert run(spec(endless), budget).cases == (), "what used it up has been told"


def test_a_kernel_that_ends_the_process_is_a_fault_of_every_case() -> None:
    report = run(spec(leaves))
    assert len(report.ran) > 5 and all(case.report and case.report.faults for case in report.ran)
    assert "SystemExit: it ended the process with bye" in report.grouped_faults[0]


def test_a_record_that_says_deterministic_is_held_to_it() -> None:
    (fault,) = run(spec(changing)).faults
    assert "float32, " in fault and "differs between two equal calls, and its record says deterministic" in fault
    assert run(spec(changing, deterministic=False)).faults == ()


def test_cases_can_be_left_out_and_are_told_as_they_come() -> None:
    told: list[suite.CaseReport] = []
    target, types = platform_target("gfx950"), [torch.float32]
    kernel = spec(changing, deterministic=False)
    every = run_suite(kernel, REGISTRY.kernels, target=target, dtypes=types, finished=told.append)
    assert tuple(told) == every.cases
    left = [(case.dtype, case.sample, case.variant) for case in every.cases[1:]]
    one = run_suite(kernel, REGISTRY.kernels, target=target, dtypes=types, skipped=lambda *case: case in left)
    assert [case.name for case in one.cases] == [every.cases[0].name]


def test_time_is_limited_in_the_main_thread_only_and_the_alarm_is_gone_afterwards() -> None:
    def wait() -> None:
        with time_limit(0.05):
            while True:
                pass

    with pytest.raises(TookTooLong, match=r"did not end within 0\.05 s"):
        wait()
    with time_limit(30):
        pass
    ran: list[bool] = []

    def other() -> None:
        with time_limit(0.001):
            ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert ran == [True]


def test_what_is_printed_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with prints_to_stderr():
        print("python")
        os.write(1, b"descriptor\n")
        subprocess.run(["echo", "process"], check=True)
    print("after")
    found = capfd.readouterr()
    assert found.out == "before\nafter\n"
    assert sorted(found.err.split()) == ["descriptor", "process", "python"]


def test_an_error_in_one_line() -> None:
    assert said(ValueError("two\n lines")) == "ValueError: two lines"
    text = (
        "at 9:8:\ndef a_kernel(x_ptr, B):\n    row = 1\n    z = unknown\n        ^\nNameError('unknown is not defined')"
    )
    assert said(RuntimeError(text)) == "RuntimeError: NameError('unknown is not defined') (at 9:8 in a_kernel)"
    assert said(RuntimeError("at 1:2:\ndef f():\n  tl.x()\n  ^")) == "RuntimeError: def f(): tl.x() ^ (at 1:2 in f)"


def test_the_cause_in_what_a_process_wrote() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'x', line 1\nValueError: early\n\nDuring it:\n"
        "pkg.errors.K3Error: error: kernel x cannot be loaded\n  - ImportError: no y\nhint: pin another\n"
    )
    assert cause(text) == "pkg.errors.K3Error: error: kernel x cannot be loaded - ImportError: no y"
    assert cause("usage: a [-h]\n  more\npython -m a: error: no kernel z\n") == "python -m a: error: no kernel z"
    assert cause("") == ""
    assert ended(-11) == "the process ended with status -11 (a wild address?)"
    assert ended(-9) == "the process ended with status -9 (SIGKILL)"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (
            "import no_such_module",
            "its module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def f(:\n", "its module cannot be imported: SyntaxError: "),
        ("import os; os._exit(7)", "its module cannot be imported: the process ended with status 7, as os._exit does"),
        ("import sys; sys.exit(3)", "its module cannot be imported: SystemExit: it ended the process with 3"),
        ("while True: pass", "its module cannot be imported: that did not end within 5 s"),
        ("g = 1", "its module loaded_toy has no f"),
        ("f = 1", "f of its module loaded_toy cannot be called"),
        ("print('{noise}')\ndef f(): pass", ""),
    ],
)
def test_a_kernel_that_does_not_load(
    source: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loaded_toy", raising=False)
    (tmp_path / "loaded_toy.py").write_text(source)
    with prints_to_stderr():
        found = load_fault("loaded_toy:f", timeout_s=5)
    assert found.startswith(fault) and bool(found) == bool(fault) and "\n" not in found
    assert capfd.readouterr().out == ""


def test_an_equal_fault_is_one_sentence() -> None:
    report = run(spec(leaves))
    cases = tuple(case for case in report.cases if case.variant != suite.INVARIANT)
    (fault,) = SuiteReport(report.kernel, cases).grouped_faults
    assert fault.startswith(f"own.leaves, in {len(cases)} cases, first float32, '{cases[0].sample}': SystemExit")
