"""The contract suite must find faults of real Triton kernels, each by the part that is meant for it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")

from k3port.testing.interpreter import run_interpreted
from k3port.testing.suite import SuiteReport

FAULTS = {
    "narrow_mask": "y: 37 of 9472 numbers were never written",
    "wide_mask": "y: 256 elements outside it were overwritten, the first one 1 after its last element",
    "short_tail": "y: 256 of 9472 numbers were never written",
    "unwritten": "y: 9472 of 9472 numbers were never written",
    "narrow_block": "y: 20736 of 21504 numbers were never written",
    "refuses": "its predicates admit this call, but it raised ValueError: only 256 columns, got 7168",
    "outside": "y: 1 elements outside it were overwritten, the first one 1 before its first element",
    "changes_input": "weight was changed",
    "beside_weight": "weight: 1 elements outside it were overwritten, the first one 1 after its last element",
    "ignores_stride": "y: 8960 of 9472 numbers are not finite",
    "wild": "the interpreter's process ended with status -11 (a wild address?)",
}
# Where the fault shows: elsewhere the kernel is right, and must be called right.
ONLY = {"narrow_block": "'wide'", "refuses": "'wide'", "ignores_stride": "strided"}
RIGHT = ("right", "honest")


@pytest.fixture(scope="module")
def reports() -> dict[str, SuiteReport]:
    names = [f"faulty.{name}" for name in (*RIGHT, *FAULTS)]
    plugins = ["faulty_kernels"]
    found = run_interpreted(names, dtypes=["float32"], samples="faulty_kernels:few", plugins=plugins)
    return {report.kernel.removeprefix("faulty."): report for report in found}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(reports: dict[str, SuiteReport], name: str) -> None:
    faults = reports[name].faults
    assert any(FAULTS[name] in fault for fault in faults), faults
    assert all(ONLY.get(name, "") in fault for fault in faults), faults
    with pytest.raises(AssertionError, match=f"faulty.{name}, float32"):
        reports[name].check()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_has_no_fault(reports: dict[str, SuiteReport], name: str) -> None:
    reports[name].check()
    assert len(reports[name].ran) >= 3


def test_a_record_that_states_the_limit_is_asked_no_more_than_that(reports: dict[str, SuiteReport]) -> None:
    assert {case.sample for case in reports["honest"].ran} == {"rows"}
    assert reports["honest"].refusals() == {"AXIS: D = 7168, does 256 columns": 1}


def test_a_plain_product_of_bfloat16_is_found_under_interpretation() -> None:
    """``tl.dot`` instead of ``lib.dot``."""
    dtypes = ["float32", "float16", "bfloat16"]
    (report,) = run_interpreted(
        ["faulty.plain_dot"], dtypes=dtypes, samples="faulty_kernels:few", plugins=["faulty_kernels"]
    )
    assert {case.dtype for case in report.ran} == set(dtypes)
    assert report.faults
    assert all("bfloat16" in fault and "y: relative RMS error" in fault for fault in report.faults)
