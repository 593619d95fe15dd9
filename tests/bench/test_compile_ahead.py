"""Configurations are compiled in other processes before they are tried; what fails there is left to the trial."""

from __future__ import annotations

import os

import pytest
import torch

from k3port.oracle.spec import KernelSpec
from k3port.plugins import default_registry
from k3port.testing.bench import compile_ahead, workloads
from k3port.testing.bench.compile_ahead import CompileAhead
from k3port.testing.bench.workload import Case, Workload

CPU = torch.device("cpu")
CONFIGS = [{"anything": {"num_warps": n}} for n in (1, 2, 4)]


@pytest.fixture
def norm() -> tuple[KernelSpec, Workload, Case]:
    spec = next(spec for spec in default_registry().kernels if spec.op == "rms_norm" and spec.is_reference)
    workload = next(w for w in workloads.WORKLOADS if w.op == "rms_norm")
    return spec, workload, min(workload.cases, key=lambda case: case.axes["T"])


def test_every_configuration_gets_a_call(norm: tuple[KernelSpec, Workload, Case]) -> None:
    with CompileAhead(2, CPU) as ahead:
        assert ahead.compile(*norm, CONFIGS, 1) == 3
        # What fails in a process is no error here.
        spec, workload, case = norm
        unknown = KernelSpec("nobody.norm", spec.op, spec.load, "not in the registry")
        assert ahead.compile(unknown, workload, case, CONFIGS, 1) == 0


def test_large_shapes_and_single_configurations_are_left_to_the_trial(norm: tuple[KernelSpec, Workload, Case]) -> None:
    with CompileAhead(2, CPU) as ahead:
        assert ahead.compile(*norm, CONFIGS, compile_ahead.MOST_BYTES) == 0
        assert ahead.compile(*norm, CONFIGS[:1], 1) == 0
    with CompileAhead(1, CPU) as nobody:
        assert nobody.compile(*norm, CONFIGS, 1) == 0


def test_a_process_that_dies_ends_compiling_ahead_only(
    norm: tuple[KernelSpec, Workload, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "_call", os._exit)
    monkeypatch.setattr(compile_ahead, "_Task", lambda *fields: 3)
    with CompileAhead(2, CPU) as ahead:
        assert ahead.compile(*norm, CONFIGS, 1) == 0
        assert ahead.compile(*norm, CONFIGS, 1) == 0
