"""Kernels for GPUs on the GPU of this machine: every sample, dtype and memory order, with canaries around each tensor."""

from __future__ import annotations

import pytest
import torch
from builtin_kernels import KERNELS
from gpu_target import gpu_target

from k3port.oracle.spec import KernelSpec
from k3port.testing.subject import gpu_kernels
from k3port.testing.suite import run_suite

TARGET = gpu_target(KERNELS)
SUBJECTS = gpu_kernels(KERNELS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.skipif(TARGET is None, reason="torch.cuda sees no GPU that platforms.yaml knows")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("spec", SUBJECTS, ids=lambda spec: spec.name)
@pytest.mark.timeout(900)
def test_kernel_keeps_its_contract(spec: KernelSpec, dtype: torch.dtype) -> None:
    assert TARGET is not None
    report = run_suite(spec, KERNELS, target=TARGET, device="cuda", dtypes=[dtype])
    report.check()
    if not report.ran:
        pytest.skip("; ".join(report.refusals()))
