"""A guard against large slow-downs. Machines differ, so it asks for half of the targets in docs/performance.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from shared_data import shared

from k3port.runtime.runtime import Runtime


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_cpu", Path(__file__).with_name("measure_cpu.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_tiny_k3_keeps_its_pace(measure: ModuleType) -> None:
    runtime = Runtime.load(shared("parity/tiny-k3"), threads=1)
    assert measure.prefill_rate(runtime, 512, repeats=3).best > 1250
    assert measure.decode_rate(runtime, tokens=64, repeats=3).best > 125
