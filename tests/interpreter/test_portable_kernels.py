"""Kernels for GPUs in Triton's interpreter: every built one of the registry, each in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from builtin_kernels import KERNELS

from k3port.oracle.spec import KernelSpec
from k3port.testing.check import platform_for
from k3port.testing.harness import op_contracts
from k3port.testing.interpreter import DTYPES, run_interpreted
from k3port.testing.subject import admits_dtype, gpu_kernels
from k3port.testing.suite import INVARIANT

SUBJECTS = gpu_kernels(KERNELS)
FIRST_OF = {spec.load: spec.name for spec in reversed(SUBJECTS)}

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed, so nothing can be interpreted"
)


@pytest.mark.parametrize("spec", SUBJECTS, ids=lambda spec: spec.name)
def test_kernel_keeps_its_contract(spec: KernelSpec) -> None:
    # A record that shares its function with an earlier one (another dtype of the state) repeats the activation dtype in
    # which the state is the coarser of the two, on ordinary samples.
    again = FIRST_OF[spec.load] != spec.name
    options: dict[str, Any] = {"dtypes": ["bfloat16"], "variants": ["plain"], "invariants": False} if again else {}
    # Shorter than the limit of a test, so that the report still names the case.
    (report,) = run_interpreted([spec.name], platform=platform_for(spec), timeout_s=280, **options)
    report.check()
    # Ran, or refused with a reason: none is forgotten, and none is tried in a dtype that the record does not admit.
    wanted = [invariant.name for contract in op_contracts(spec.op) for invariant in contract.invariants]
    tried = [(case.dtype, case.sample) for case in report.cases if case.variant == INVARIANT]
    first = next(dtype for dtype in DTYPES if admits_dtype(spec, dtype))
    assert sorted(tried) == sorted((first, name) for name in wanted if not again)
    if not report.ran:
        pytest.skip("; ".join(report.refusals()))
    # Both sides of an exact comparison would be empty where nothing was called.
    assert {case.dtype for case in report.ran} >= {"bfloat16"} or "DTYPE" in " ".join(report.refusals())
