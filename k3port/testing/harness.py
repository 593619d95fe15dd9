"""For kernel authors: runs a kernel on its contract's samples and measures it against the float64 reference.

A kernel gets packed weights, poisoned memory between canaries and, on request, rows in other memory orders. Every
output and every argument that the op updates is compared; what the op must not touch is compared bit for bit.
:mod:`k3port.testing.suite` runs all samples of one kernel; the parts are in :mod:`k3port.testing.contract`.
"""

from __future__ import annotations

from k3port.testing.contract.invariant import check_invariant, invariant_refusal
from k3port.testing.contract.measure import ABSOLUTE_SHARE, PEAK_FACTOR, PLAIN_FACTOR, OutputError
from k3port.testing.contract.memory import Guards, poisoned_memory
from k3port.testing.contract.reference import (
    DTYPES,
    SEED,
    Expected,
    Op,
    build_kernel,
    contract_samples,
    dtype_name,
    expect,
    fitted,
    op_contracts,
    sample_phase,
    sample_query,
    sealed_table,
)
from k3port.testing.contract.sample import SampleReport, check_sample
from k3port.testing.contract.variants import VARIANTS, Variant, has_variant

__all__ = [
    "ABSOLUTE_SHARE",
    "DTYPES",
    "PEAK_FACTOR",
    "PLAIN_FACTOR",
    "SEED",
    "VARIANTS",
    "Expected",
    "Guards",
    "Op",
    "OutputError",
    "SampleReport",
    "Variant",
    "build_kernel",
    "check_invariant",
    "check_sample",
    "contract_samples",
    "dtype_name",
    "expect",
    "fitted",
    "has_variant",
    "invariant_refusal",
    "op_contracts",
    "poisoned_memory",
    "sample_phase",
    "sample_query",
    "sealed_table",
]
