"""What k3port's kit says of this kernel: its numbers in the interpreter, and its AMD machine code in emulation."""

import pytest

from k3port.plugins import default_registry
from k3port.testing.emulation import run_emulated
from k3port.testing.interpreter import run_interpreted

NAME = "example.rms_norm"


def test_the_contract_in_the_interpreter():
    (report,) = run_interpreted([NAME])
    assert report.ran
    report.check()


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_machine_code_in_emulation(arch):
    registry = default_registry()
    report = run_emulated(registry.kernel(NAME), registry.kernels, arch)
    assert report.launches
    assert not report.faults, report.faults
