"""Portable kernels in Triton's interpreter: every built one of the registry, each in a process of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")

from builtin_kernels import KERNELS

from k3port.testing.interpreter import run_interpreted

PORTABLE = [spec.name for spec in KERNELS if spec.is_built and spec.name.startswith("portable.")]


@pytest.mark.parametrize("name", PORTABLE)
def test_kernel_keeps_its_contract(name: str) -> None:
    # Shorter than the limit of a test, so that the report still names the case.
    (report,) = run_interpreted([name], timeout_s=280)
    report.check()
    if not report.ran:
        pytest.skip("; ".join(report.refusals()))
    # Both sides of an exact comparison would be empty where nothing was called.
    assert {case.dtype for case in report.ran} >= {"bfloat16"} or "DTYPE" in " ".join(report.refusals())
