"""Every built Triton kernel of k3port, executed as gfx942 and gfx950 machine code in emulation. No AMD hardware."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from k3port.ops.contract import Sample
from k3port.oracle.spec import KernelSpec
from k3port.plugins import make_registry
from k3port.testing.contract.reference import contract_samples, op_contracts
from k3port.testing.emulation import MAX_ROWS, Affordable, rows, run_emulated
from k3port.testing.subject import is_triton
from k3port.testing.suite import INVARIANT
from k3port.testing.targets import ISAS, platform_target

pytest.importorskip("triton")

REGISTRY = make_registry(entry_points=False)
KERNELS = [spec for spec in REGISTRY.kernels if spec.is_built and is_triton(spec) and spec.name.startswith("portable.")]
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("arch", ISAS)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_numbers_bounds_and_synchronisation(spec: KernelSpec, arch: str) -> None:
    report = run_emulated(spec, REGISTRY.kernels, arch, dtypes=DTYPES)
    assert report.launches > 0 and report.instructions > 0
    assert report.races == report.unknown == report.out_of_bounds == ()
    assert report.faults == ()
    assert {case.dtype for case in report.suite.ran} == {"bfloat16", "float32"} & set(spec.requires.dtypes)


def test_invariants_are_kept_in_emulation_where_their_calls_are_small() -> None:
    spec = REGISTRY.kernel("portable.attn_res")
    names = {invariant.name for contract in op_contracts(spec.op) for invariant in contract.invariants}
    report = run_emulated(spec, REGISTRY.kernels, "gfx950", dtypes=(torch.float32,), variants=("plain",), max_rows=8)
    assert names and {case.sample for case in report.suite.ran if case.variant == INVARIANT} == names
    none = run_emulated(spec, REGISTRY.kernels, "gfx950", dtypes=(torch.float32,), variants=("plain",), max_rows=0)
    assert not none.launches
    assert "AXIS: the calls of this invariant are not run here, for their size" in none.suite.refusals()


def test_some_kernels_are_built() -> None:
    assert {"portable.rms_norm", "portable.situ_mul"} <= {spec.name for spec in KERNELS}


@pytest.mark.parametrize("op", sorted({spec.op for spec in KERNELS}))
def test_the_choice_of_samples_reaches_every_phase_and_names_what_it_leaves_out(op: str) -> None:
    choice, left = Affordable(op, MAX_ROWS), 0
    for contract in op_contracts(op):
        samples = contract_samples(contract, torch.float32)
        taken = [sample for sample in samples if choice(sample)]
        assert any(rows(contract, sample) > 1 for sample in taken)
        left += len(samples) - len(taken)
    assert left == len(choice.left_out())


def test_a_sample_beyond_the_limit_is_left_out() -> None:
    (contract,) = op_contracts("rms_norm")
    small, large = Affordable("rms_norm", 36), Affordable("rms_norm", 37)
    (sample,) = (s for s in contract_samples(contract, torch.float32) if s.name == "rows")
    assert isinstance(sample, Sample)
    assert not small(sample) and large(sample)
    assert "'rows' (37 rows)" in small.left_out() and large.left_out() == ()


@pytest.mark.parametrize("arch", ISAS)
def test_refusals_are_asked_of_a_platform_of_that_instruction_set(arch: str) -> None:
    assert (platform_target(arch).device.vendor, platform_target(arch).device.arch) == ("amd", arch)


def test_large_samples_run_once_and_in_a_dtype_that_the_record_admits() -> None:
    spec = REGISTRY.kernel("portable.gated_norm")
    only = dataclasses.replace(spec, requires=dataclasses.replace(spec.requires, dtypes=("float16", "float32")))
    report = run_emulated(only, REGISTRY.kernels, "gfx950", dtypes=(torch.bfloat16, torch.float32, torch.float16))
    assert report.faults == ()
    large = [(case.dtype, case.variant) for case in report.suite.ran if case.sample == "tokens"]
    assert large == [("float32", "plain")]
    assert {case.dtype for case in report.suite.ran} == {"float32", "float16"}
    assert "unaligned" in {case.variant for case in report.suite.ran}


def test_a_kernel_that_the_record_keeps_off_this_instruction_set_is_refused_and_says_so() -> None:
    spec = REGISTRY.kernel("portable.rms_norm")
    only = dataclasses.replace(spec, requires=dataclasses.replace(spec.requires, archs=("gfx950",)))
    report = run_emulated(only, REGISTRY.kernels, "gfx942", dtypes=DTYPES)
    assert not report.suite.ran and not report.launches and report.faults == ()
    assert list(report.suite.refusals()) == ["ARCH: needs gfx950, the device is gfx942"]
