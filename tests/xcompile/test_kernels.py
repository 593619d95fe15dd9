"""Every built Triton kernel, with the configuration that it chooses at TP 8, compiles for every target and fits.

Results are kept in the user's cache folder: only what changed is compiled again. All configurations and the other TP
sizes are ``make xcompile``.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be compiled")

from k3port.oracle.spec import KernelSpec
from k3port.plugins import make_registry
from k3port.testing.targets import TARGETS
from k3port.testing.xcompile import compile_kernel, triton_kernels

KERNELS = triton_kernels(make_registry(entry_points=False).kernels)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_compiles_and_fits(spec: KernelSpec) -> None:
    report = compile_kernel(spec, jobs=1)
    assert report.faults == ()
    assert report.silent == ()
    targets = {row.target for row in report.rows}
    allowed = spec.requires.archs or TARGETS
    assert targets == {target for target in TARGETS if target in allowed}


def test_there_are_kernels() -> None:
    assert "portable.rms_norm" in {spec.name for spec in KERNELS}
