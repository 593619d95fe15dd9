"""Every built Triton kernel of k3port, executed as gfx942 and gfx950 machine code in emulation. No AMD hardware."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so there is no machine code to execute")

import torch

from k3port.ops.contract import Sample
from k3port.oracle.spec import KernelSpec
from k3port.plugins import make_registry
from k3port.testing.contract.reference import contract_samples, op_contracts
from k3port.testing.contract.variants import has_variant
from k3port.testing.emulation import MAX_ROWS, MAX_ROWS_AGAIN, Affordable, rows, run_emulated
from k3port.testing.subject import triton_kernels
from k3port.testing.suite import INVARIANT
from k3port.testing.targets import ISAS, platform_target

REGISTRY = make_registry(entry_points=False)
KERNELS = triton_kernels(REGISTRY.kernels)
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("arch", ISAS)
@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_numbers_bounds_and_synchronisation(spec: KernelSpec, arch: str) -> None:
    report = run_emulated(spec, REGISTRY.kernels, arch, dtypes=DTYPES, lean=True)
    assert report.launches > 0 and report.instructions > 0
    assert report.races == report.unknown == report.out_of_bounds == ()
    assert report.faults == ()
    assert {case.dtype for case in report.suite.ran} == {"bfloat16", "float32"} & set(spec.requires.dtypes)
    # In the other dtype and the other memory order some samples are left too.
    assert sum(case.dtype == "float32" for case in report.suite.ran) >= 2
    samples = [(c, sample) for c in op_contracts(spec.op) for sample in contract_samples(c, torch.float32)]
    if any(has_variant(sample.args, contract.inputs, "unaligned") for contract, sample in samples):
        assert sum(case.variant == "unaligned" for case in report.suite.ran) >= 2


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
    choice, left = Affordable(op, MAX_ROWS, "between"), 0
    for contract in op_contracts(op):
        samples = contract_samples(contract, torch.float32)
        taken = [sample for sample in samples if choice(sample)]
        assert any(rows(contract, sample) > 1 for sample in taken)
        left += len(samples) - len(taken)
    assert left == len(choice.left_out())


@pytest.mark.parametrize("op", sorted({spec.op for spec in KERNELS}))
def test_samples_that_others_stand_for_lie_between_two_ordinary_ones(op: str) -> None:
    """No adversarial one is among them, nor one that is alone in a phase, with an argument or at a size."""
    everything, lean = Affordable(op, MAX_ROWS), Affordable(op, MAX_ROWS, "between")
    for contract in op_contracts(op):
        samples = [sample for sample in contract_samples(contract, torch.float32) if everything(sample)]
        taken = [sample for sample in samples if lean(sample)]
        sizes = [rows(contract, sample) for sample in taken if not sample.adversarial]
        for sample in samples:
            if not lean(sample):
                assert not sample.adversarial and min(sizes) < rows(contract, sample) < max(sizes)


def test_of_many_lengths_of_one_request_the_shortest_and_the_longest_are_taken() -> None:
    (contract,) = op_contracts("kda_core")
    samples = [sample for sample in contract_samples(contract, torch.float32) if sample.name.endswith(" tokens")]
    by_choice = {
        keep: [sample.name for sample in samples if Affordable("kda_core", most, keep)(sample)]
        for keep, most in (("between", MAX_ROWS), ("ends", MAX_ROWS_AGAIN))
    }
    assert by_choice == {"between": ["1 tokens", "65 tokens"], "ends": ["1 tokens", "17 tokens"]}
    named = " ".join(Affordable("kda_core", MAX_ROWS, "between").left_out())
    assert "'63 tokens' (126 rows, between others of its kind)" in named and "'130 tokens' (260 rows)" in named


@pytest.mark.parametrize("op", sorted({spec.op for spec in KERNELS}))
def test_further_dtypes_and_orders_get_samples_with_several_rows(op: str) -> None:
    choice = Affordable(op, MAX_ROWS_AGAIN, "ends")
    samples = [(c, sample) for c in op_contracts(op) for sample in contract_samples(c, torch.float32) if choice(sample)]
    assert sum(rows(contract, sample) > 1 for contract, sample in samples) >= 2


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
