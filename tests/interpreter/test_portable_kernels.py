"""Portable kernels in Triton's interpreter: every built one of the registry, each in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")

from builtin_kernels import KERNELS

from k3port.oracle.spec import KernelSpec
from k3port.testing.interpreter import run_interpreted

PORTABLE = [spec for spec in KERNELS if spec.is_built and spec.name.startswith("portable.")]
FIRST_OF = {spec.load: spec.name for spec in reversed(PORTABLE)}


@pytest.mark.parametrize("spec", PORTABLE, ids=lambda spec: spec.name)
def test_kernel_keeps_its_contract(spec: KernelSpec) -> None:
    # A record that shares its function with an earlier one (another dtype of the state) repeats the activation dtype in
    # which the state is the coarser of the two, on ordinary samples.
    again = FIRST_OF[spec.load] != spec.name
    options: dict[str, Any] = {"dtypes": ["bfloat16"], "variants": ["plain"], "invariants": False} if again else {}
    # Shorter than the limit of a test, so that the report still names the case.
    (report,) = run_interpreted([spec.name], timeout_s=280, **options)
    report.check()
    if not report.ran:
        pytest.skip("; ".join(report.refusals()))
    # Both sides of an exact comparison would be empty where nothing was called.
    assert {case.dtype for case in report.ran} >= {"bfloat16"} or "DTYPE" in " ".join(report.refusals())
