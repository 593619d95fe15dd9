"""On a GPU: what only a GPU can show of the clock and of kernels. Skipped elsewhere."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from k3port.backends.portable.kernels.rms_norm import rms_norm
from k3port.testing.bench.ceilings import measure_ceilings
from k3port.testing.bench.clock import CannotCapture, GpuClock
from k3port.testing.bench.compilations import count_compilations
from k3port.testing.bench.timing import QUICK, Subject, measure


def test_events_graphs_and_launches() -> None:
    clock = GpuClock()
    x = torch.randn(1 << 20, device=clock.device)
    found = measure([Subject("sin", (lambda: torch.sin(x),))], clock, QUICK)[0]
    assert found.captured is not None
    assert 0 < found.captured.median <= found.eager.median * 1.2
    assert found.host.median > 0
    launches = clock.launches(lambda: torch.sin(x))
    assert launches is not None
    assert len(launches) == 1


def test_a_call_that_waits_for_the_device_is_not_captured() -> None:
    clock = GpuClock()
    x = torch.ones(4, device=clock.device)
    with pytest.raises(CannotCapture):
        clock.capture([lambda: x.sum().item()])
    # The device goes on after it, random numbers too.
    assert float(x.sum()) == 4
    assert float(torch.rand(4, device=clock.device).sum()) > 0


def test_ceilings_are_plausible() -> None:
    found = measure_ceilings(GpuClock(), QUICK, copy_bytes=2**30, matmul_size=4096)
    assert 1e11 < found.copy_bytes_per_second < 2e13
    assert 1e13 < found.matmul_flops_per_second < 1e16


def test_a_warm_kernel_compiles_nothing() -> None:
    x = torch.randn(64, 7168, device="cuda").bfloat16()
    weight = torch.ones(7168, device="cuda").bfloat16()
    rms_norm(x, weight, 1e-5)
    with count_compilations() as compiled:
        for rows in (64, 32, 16):
            rms_norm(x[:rows], weight, 1e-5)
    compiled.check_none()
