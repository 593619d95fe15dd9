"""Faults that the emulator's part of the kit has to find, each by its own means. Nothing here runs on AMD hardware."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so there is no machine code to execute")

import planted_kernels as planted

from k3port.plugins import make_registry
from k3port.testing.amd_isa.core import Step, nothing
from k3port.testing.amd_isa.execute import MAX_INSTRUCTIONS
from k3port.testing.amd_isa.launch import LaunchReport, observed
from k3port.testing.amd_isa.program import Program
from k3port.testing.emulation import DTYPES, EmulationReport, run_emulated
from k3port.testing.targets import ISAS

KERNELS = make_registry(entry_points=False).kernels


def emulated(function: str, arch: str, **options: int) -> EmulationReport:
    return run_emulated(planted.spec(function), KERNELS, arch, dtypes=(torch.float32,), **options)


def line_of(text: str) -> int:
    """Number of the first line of the planted kernels with this text."""
    lines = inspect.getsource(planted).splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


class WithoutBarriers:
    """Takes every barrier out of the machine code."""

    def __init__(self) -> None:
        self.dropped = 0

    def code(self, program: Program) -> Sequence[Step]:
        barriers = [inst.op == "s_barrier" for inst in program.kernel.instructions]
        self.dropped += sum(barriers)
        return [nothing if barrier else step for barrier, step in zip(barriers, program.code, strict=True)]

    def limit(self, program: Program) -> int:
        return MAX_INSTRUCTIONS

    def done(self, program: Program, report: LaunchReport) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("arch", ISAS)
def test_the_kernel_without_a_fault_passes(arch: str) -> None:
    report = emulated("right", arch)
    assert report.faults == () and report.launches > 0


@pytest.mark.parametrize("arch", ISAS)
def test_a_missing_load_mask_is_out_of_bounds_and_names_its_line(arch: str) -> None:
    report = emulated("no_load_mask", arch)
    assert report.out_of_bounds
    place = f"planted_kernels.py:{line_of('# planted: no mask')}"
    assert all(place in fault and "of x_ptr" in fault for fault in report.out_of_bounds)
    # The numbers would not have told: what is read beyond the tensor is not used.
    assert set(report.out_of_bounds) == set(report.faults)


@pytest.mark.parametrize("arch", ISAS)
def test_a_read_of_one_number_too_many_is_out_of_bounds(arch: str) -> None:
    """No border around a tensor hides it, in either memory order."""
    report = emulated("one_beyond", arch)
    place = f"planted_kernels.py:{line_of('# planted: one too far')}"
    assert set(report.out_of_bounds) == set(report.faults)
    assert all(place in fault and "of x_ptr" in fault for fault in report.faults)
    wrong = {case.variant for case in report.suite.ran if case.report is not None and case.report.faults}
    assert wrong == {"plain", "unaligned"}


def test_a_record_of_triton_that_launches_nothing_is_a_fault() -> None:
    report = emulated("launches_nothing", "gfx950")
    assert report.suite.faults == () and len(report.suite.ran) > 3
    (fault,) = report.faults
    assert fault.startswith("planted.launches_nothing, gfx950: nothing was launched")


def test_every_dtype_of_activations_is_emulated() -> None:
    assert set(DTYPES) == {torch.bfloat16, torch.float32, torch.float16}
    spec = planted.spec("right", dtypes=("bfloat16", "float32", "float16"))
    report = run_emulated(spec, KERNELS, "gfx950")
    assert report.faults == ()
    cases = Counter((case.dtype, case.variant) for case in report.suite.ran)
    # Seven samples, of which the one with wide rows is small enough too.
    assert cases == {
        **{(name, "plain"): 7 for name in ("bfloat16", "float32", "float16")},
        ("bfloat16", "unaligned"): 7,
    }


@pytest.mark.parametrize("arch", ISAS)
def test_a_wrong_mask_shows_in_the_numbers(arch: str) -> None:
    report = emulated("wrong_mask", arch)
    assert not report.out_of_bounds and not report.races
    assert any("'rows': y: relative RMS error" in fault for fault in report.faults)


@pytest.mark.parametrize("arch", ISAS)
def test_one_row_too_many_in_a_ragged_tail_is_out_of_bounds(arch: str) -> None:
    report = emulated("ragged_tail", arch)
    # 37 rows are no multiple of the rows of a program, 5 neither.
    assert any("'rows'" in fault for fault in report.out_of_bounds)
    assert any("'zero, tiny and large rows" in fault for fault in report.out_of_bounds)


@pytest.mark.parametrize("arch", ISAS)
def test_a_missing_barrier_is_a_race(arch: str) -> None:
    without = WithoutBarriers()
    with observed(without):
        report = emulated("right", arch)
    assert without.dropped > 0
    assert report.races
    assert any("planted_kernels.py:" in race for race in report.races)
    assert any("race in LDS" in fault for fault in report.faults)


def test_an_unknown_instruction_is_a_fault_with_its_text() -> None:
    class Unknown(WithoutBarriers):
        def done(self, program: Program, report: LaunchReport) -> None:
            object.__setattr__(report, "unknown", {"v_frobnicate_b32": "v_frobnicate_b32 v0, v1"})

        def code(self, program: Program) -> Sequence[Step]:
            return program.code

    with observed(Unknown()):
        report = emulated("right", "gfx950")
    assert report.unknown == ("v_frobnicate_b32 v0, v1",)
    assert any("unknown instruction: v_frobnicate_b32 v0, v1" in fault for fault in report.faults)


def test_dropped_instructions_are_counted_and_the_missed_ones_named() -> None:
    report = emulated("right", "gfx950", mutate=6, seed=1)
    assert report.mutation is not None
    assert report.mutation.count == 6 and report.mutation.candidates > 50
    assert report.mutation.noticed >= 3
    assert report.faults == ()
    again = emulated("right", "gfx950", mutate=6, seed=1).mutation
    assert again is not None
    # Messages hold addresses, which differ.
    one, two = ([(m.index, m.outcome) for m in found.mutants] for found in (report.mutation, again))
    assert one == two


def test_a_kernel_that_is_wrong_already_is_not_mutated() -> None:
    assert emulated("wrong_mask", "gfx950", mutate=2).mutation is None


def test_approximate_instructions_may_be_off_by_an_ulp() -> None:
    exact, noisy = emulated("right", "gfx950"), emulated("right", "gfx950", ulp_noise=True)
    assert noisy.ulp_noise and noisy.faults == ()
    assert noisy.suite.worst() != exact.suite.worst()
