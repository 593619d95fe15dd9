"""Triton kernels compiled for both architectures, executed in emulation, against float64 references."""

from __future__ import annotations

import amd_needs  # noqa: F401
import pytest
import torch
import triton
from amd_checks import CHECKS
from packaging.version import Version

from k3port.testing.amd_isa import emulate

ARCHS = ("gfx942", "gfx950")
NO_XF32 = "gfx950 has no xf32 matrix instruction, Triton refuses tf32 for it"
NO_SCALED = "this Triton refuses dot_scaled for gfx942"


def missing(name: str, arch: str) -> str | None:
    if name == "dot_tf32" and arch == "gfx950":
        return NO_XF32
    if name.startswith("scaled_") and name != "scaled_bf16_fp4" and arch == "gfx942":
        return NO_SCALED if Version(triton.__version__) < Version("3.9") else None
    return None


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", CHECKS)
def test_kernel(name: str, arch: str) -> None:
    if reason := missing(name, arch):
        pytest.skip(reason)
    torch.manual_seed(0)
    with emulate(arch) as reports:
        error, tolerance = CHECKS[name](arch)
    assert error <= tolerance
    assert reports
    for report in reports:
        assert report.races == ()
        assert report.unknown == {}
        assert report.instructions > 0 < report.static_instructions
