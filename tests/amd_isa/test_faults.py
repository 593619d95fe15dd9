"""Wrong kernels are noticed: wrong mask, missing load mask, missing barriers; right ones bear one-ulp noise."""

from __future__ import annotations

import math

import amd_kernels as kernels
import pytest
import torch
from amd_checks import CHECKS, causal_attention, relative

from k3port.testing.amd_isa import EmuError, emulate
from k3port.testing.amd_isa.compile import _cache
from k3port.testing.amd_isa.launch import LaunchReport, observed
from k3port.testing.amd_isa.mutate import _Survey

ARCHS = ("gfx942", "gfx950")


@pytest.mark.parametrize("arch", ARCHS)
def test_a_wrong_causal_mask(arch: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 64).to(torch.bfloat16) for _ in range(3))
    errors = []
    for kernel in (kernels.flash, kernels.flash_wrong):
        o = torch.full((1, 64, 64), math.nan)
        with emulate(arch):
            kernel[(1, 1)](q, k, v, o, 64, 0.125, BM=64, BN=32, D=64)
        errors.append(relative(o, causal_attention(q, k, v)))
    assert errors[0] < 4e-3
    assert errors[1] > 0.1


@pytest.mark.parametrize("arch", ARCHS)
def test_a_missing_load_mask(arch: str) -> None:
    """The last row ends with the tensor: the kernel reads beyond it."""
    x, o = torch.randn(4, 777), torch.empty(4, 777)
    with emulate(arch), pytest.raises(EmuError) as caught:
        kernels.softmax_nomask[(4,)](x, o, 777, N=1024)
    assert "of x, which has 12432 bytes" in str(caught.value)
    line = kernels.softmax_nomask.fn.__code__.co_firstlineno + 5
    assert f"amd_kernels.py:{line}" in str(caught.value)


@pytest.mark.parametrize("arch", ARCHS)
def test_each_missing_barrier(arch: str) -> None:
    """Every removed barrier shows as a race, whether it changes a number or not."""
    torch.manual_seed(0)
    survey = _Survey()
    with emulate(arch), observed(survey):
        error, tolerance = CHECKS["dot_bf16_32"](arch)
    assert error <= tolerance
    (program,) = survey.programs.values()
    barriers = [k for k, inst in enumerate(program.kernel.instructions) if inst.op == "s_barrier"]
    assert barriers
    noticed = []
    for k in barriers:
        with emulate(arch, skip=k) as reports:
            error, tolerance = CHECKS["dot_bf16_32"](arch)
        noticed.append(bool(reports[0].races) or not error <= tolerance)
    assert all(noticed)


@pytest.mark.parametrize("arch", ARCHS)
def test_no_race_check_when_not_asked_for(arch: str) -> None:
    def reports_without(barrier: int, check: bool) -> LaunchReport:
        with emulate(arch, skip=barrier, race_check=check) as reports:
            CHECKS["dot_bf16_32"](arch)
        return reports[0]

    survey = _Survey()
    with emulate(arch), observed(survey):
        CHECKS["dot_bf16_32"](arch)
    (program,) = survey.programs.values()
    barriers = [k for k, inst in enumerate(program.kernel.instructions) if inst.op == "s_barrier"]
    assert any(reports_without(k, True).races for k in barriers)
    assert not any(reports_without(k, False).races for k in barriers)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["elementwise", "softmax", "flash", "delta", "ops_float"])
def test_one_ulp_noise(name: str, arch: str) -> None:
    """Stays within the tolerances (a few times those of exact functions), changes results, and does not stay behind."""
    errors = []
    for noise in (False, True, False):
        torch.manual_seed(0)
        with emulate(arch, ulp_noise=noise):
            error, tolerance = CHECKS[name](arch)
        assert error <= 4 * tolerance
        errors.append(error)
    assert errors[0] == errors[2] != errors[1]


def test_programs_are_kept_and_few() -> None:
    with emulate("gfx950"):
        CHECKS["rowsum"]("gfx950")
        before = len(_cache)
        CHECKS["rowsum"]("gfx950")
    assert len(_cache) == before <= 256
