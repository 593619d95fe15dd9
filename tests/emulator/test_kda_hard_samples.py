"""The chunked KDA kernels as AMD machine code in emulation, on long hard samples that the run of all kernels leaves out."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so there is no machine code to execute")

import torch

from k3port.oracle.spec import KernelSpec
from k3port.plugins import make_registry
from k3port.testing.amd_isa import emulate
from k3port.testing.emulation import exact_bounds
from k3port.testing.subject import triton_kernels
from k3port.testing.suite import run_suite
from k3port.testing.targets import ISAS, platform_target

REGISTRY = make_registry(entry_points=False)
KERNELS = [spec for spec in triton_kernels(REGISTRY.kernels) if spec.op == "kda_core" and "prefill" in spec.phases]
# Correlated keys make the inverse inside a chunk large, decays of -5 its factors small; three chunks carry the state.
HARD = {"keys correlated 0.9, log decay -5", "keys correlated 1.0, log decay -0.01", "ragged with empty and single"}


@pytest.mark.parametrize("arch", ISAS)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_numbers_bounds_and_synchronisation(spec: KernelSpec, arch: str) -> None:
    with exact_bounds(), emulate(arch) as launches:
        report = run_suite(
            spec, REGISTRY.kernels, target=platform_target(arch), dtypes=(torch.bfloat16,), variants=("plain",),
            samples=lambda sample: sample.name in HARD, invariants=False, repeat=False,
        )  # fmt: skip
    report.check()
    assert {case.sample for case in report.ran} == HARD
    assert launches and not any(launch.races or launch.unknown for launch in launches)
