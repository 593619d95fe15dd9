"""What makes the contract tests trustworthy: every op and kernel is covered, and references stand on their own."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from builtin_kernels import CPU, KERNELS, dtype_name

from k3port.ops.catalog import OPS
from k3port.ops.contract import Contract, Sample, cloned, mutated, relative_rms, resolve_path
from k3port.ops.table import SLOTS, OpTable
from k3port.oracle.profile import load_profiles
from k3port.oracle.resolve import reject
from k3port.oracle.spec import KernelSpec, Requires, Target
from k3port.testing.check import platform_for
from k3port.testing.harness import (
    DTYPES,
    check_sample,
    contract_samples,
    expect,
    fitted,
    op_contracts,
    sample_query,
    sealed_table,
)
from k3port.testing.interpreter import small
from k3port.testing.subject import gpu_kernels

CONTRACTS: list[Contract] = [contract for op in OPS for contract in op_contracts(op)]
NAMES = [f"{c.op}-{c.phase}" if c.phase else c.op for c in CONTRACTS]
each_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=NAMES)
# Ops without arithmetic that could go wrong at the edges of the number range.
PLAIN = {"embed": "reads rows", "dense_mlp": "made of linear and situ_mul", "moe": "made of moe_route and moe_experts"}


def test_catalog_and_contracts_agree() -> None:
    assert {c.op for c in CONTRACTS} == set(OPS)
    for op, info in OPS.items():
        phases = [c.phase for c in op_contracts(op)]
        assert phases == [None] or (info.phased and phases == ["prefill", "decode"]), op
        assert set(info.parts) <= set(OPS)
        for part in info.parts:
            assert not OPS[part].parts, "composites are made of fine ops"


@each_contract
def test_contract_is_complete(contract: Contract) -> None:
    parameters = list(inspect.signature(contract.reference).parameters)
    assert list(contract.inputs) == parameters
    assert {path.partition(".")[0] for path in contract.mutates} <= set(parameters)
    assert set(contract.packed) <= set(parameters)
    assert contract.outputs or contract.mutates
    assert set(DTYPES) <= set(contract.tolerance)
    tolerance = contract.tolerance
    assert tolerance[torch.float64] < tolerance[torch.float32] <= tolerance[torch.float16] <= tolerance[torch.bfloat16]
    assert contract.tolerance[torch.float32] <= 5e-6, "the project promises float32 results to 5e-6"


@each_contract
def test_samples(contract: Contract) -> None:
    for dtype in DTYPES:
        samples = contract_samples(contract, dtype)
        assert len({s.name for s in samples}) == len(samples) >= 3
        assert all(set(s.args) == set(contract.inputs) for s in samples)
        if contract.op not in PLAIN:
            assert any(s.adversarial for s in samples)
            assert any(not s.adversarial for s in samples)
        found = {path for sample in samples for path in mutated(contract, sample.args)}
        assert found == set(contract.mutates)


@each_contract
def test_samples_are_the_same_in_every_run(contract: Contract) -> None:
    first, second = (contract_samples(contract, torch.float32) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for name in contract.inputs:
            if isinstance(one.args[name], torch.Tensor):
                assert torch.equal(one.args[name].nan_to_num(7.0), other.args[name].nan_to_num(7.0))


@each_contract
def test_samples_exercise_the_op(contract: Contract) -> None:
    """Some sample must give numbers that are not all zero, and change what the op updates."""
    samples = contract_samples(contract, torch.float64)
    results = [expect(contract, s, torch.float64) for s in samples]
    for index in range(len(contract.outputs)):
        assert any(r.outputs[index].abs().sum() > 0 for r in results)
    for path in contract.mutates:
        changed = [
            not torch.equal(r.updated[path], resolve_path(s.args, path))
            for r, s in zip(results, samples, strict=True)
            if path in r.updated
        ]
        assert any(changed)


# Ops that update an argument and have no invariant, and what looks after them instead.
WITHOUT_INVARIANTS = {
    "mla_append": "one write per row; rows that are not written are compared bit for bit",
    "mla": "made of mla_append and mla_attend",
}


def test_ops_that_keep_something_have_invariants() -> None:
    """What a call leaves behind must not depend on how a sequence is cut: samples of single calls cannot show it."""
    for contract in CONTRACTS:
        if contract.mutates:
            assert bool(contract.invariants) != (contract.op in WITHOUT_INVARIANTS), contract.op
        names = [invariant.name for invariant in contract.invariants]
        assert len(set(names)) == len(names), contract.op


# Sizes of one call each; what a cost function does not read is ignored.
AXES = {"T": 4, "B": 2, "D": 96, "O": 64, "V": 128, "I": 64, "R": 3, "P": 256, "W": 4, "H": 2, "K": 128, "C": 512}
AXES |= {"N": 128, "E": 12, "X": 3, "L": 64, "ranks": 4}
NO_FLOPS = {"embed", "all_gather"}


@each_contract
def test_cost_is_positive_and_grows(contract: Contract) -> None:
    cost = contract.cost(AXES, 2)
    assert cost.bytes > 0
    assert (cost.flops > 0) == (contract.op not in NO_FLOPS)
    axis = "B" if contract.op == "sample" else "T"
    more = contract.cost({**AXES, axis: 8 * AXES[axis]}, 2)
    assert more.bytes > cost.bytes
    assert more.flops > cost.flops or contract.op in NO_FLOPS
    wider = contract.cost(AXES, 4)
    assert wider.bytes > cost.bytes or contract.op == "sample", "float32 activations move more bytes"
    assert wider.flops == cost.flops


def test_costs_that_can_be_counted_by_hand() -> None:
    costs = {c.op: c.cost for c in CONTRACTS if c.phase in (None, "decode")}
    linear = costs["linear"]({"T": 2, "D": 10, "O": 3}, 2)
    assert (linear.bytes, linear.flops) == ((20 + 30 + 6) * 2, 120)
    assert costs["all_reduce"]({"T": 2, "D": 10, "ranks": 4}, 2).bytes == 60
    assert costs["all_reduce"]({"T": 2, "D": 10}, 2).bytes == 0, "one rank sends nothing"
    # Three blocks, the sum and the pending output are read, the sum and the result written, and three vectors read.
    attn_res = costs["attn_res"]({"T": 2, "D": 10, "R": 3}, 2)
    assert attn_res.bytes == (7 * 20 + 30) * 2
    assert costs["attn_res"]({"T": 2, "D": 10, "R": 3, "pending": 0}, 2).bytes == (5 * 20 + 30) * 2
    assert costs["attn_res"]({"T": 2, "D": 10, "R": 0}, 2).bytes == (4 * 20 + 10) * 2, "add and norm"
    # One token through one MXFP4 expert of 32 x 64: three matrices at 17 bytes per 32 numbers, then the rows.
    experts = costs["moe_experts"]({"T": 1, "X": 1, "E": 8, "I": 64, "L": 32}, 2)
    assert experts.bytes == 3 * 64 * 17 + 2 * 32 * 2 + 12
    assert experts.flops == 6 * 64 * 32
    # Decode of one request reads and writes its float32 state once.
    core = costs["kda_core"]({"T": 1, "B": 1, "H": 1, "V": 128, "K": 128}, 2)
    assert core.bytes == 2 * 128 * 128 * 4 + 5 * 128 * 2, "q, k, v and the raw gate come in, the result goes out"


TARGETS = [CPU, *(profile.target() for profile in load_profiles().values() if profile.vendor != "cpu")]
# Declared kernels for which no contract has a sample; an adapter for one of them has to bring it.
NO_SAMPLE = {
    "*all_reduce*": "several ranks",
    "*all_gather*": "several ranks",
    "*kda_verify*": "drafts that need no record",
    "cuda.flash_kda_prefill*": "heads of 128",
    "cuda.flashinfer_kda_decode*": "8 heads or more",
    "cuda.flashinfer_mla_*": "production widths, pages or heads",
    "rocm.aiter_mla_prefill*": "production widths",
}


@cache
def samples_of(op: str) -> list[tuple[Contract, torch.dtype, Sample]]:
    return [(c, dtype, s) for c in op_contracts(op) for dtype in DTYPES for s in contract_samples(c, dtype)]


def admitted(spec: KernelSpec, target: Target) -> int:
    """How many samples the kernel's record admits on a target, built or not."""
    count = 0
    for contract, dtype, sample in samples_of(spec.op):
        query = sample_query(contract, fitted(contract, sample, spec), dtype)
        allowed = replace(query, rounds=frozenset({spec.rounds}) if spec.rounds else frozenset())
        count += reject(spec, allowed, target, built_only=False) is None
    return count


def test_every_kernel_that_runs_here_is_reached() -> None:
    reached = {spec.name: admitted(spec, CPU) for spec in KERNELS if spec.is_built}
    for spec in KERNELS:
        if spec.is_built and (not spec.requires.vendors or "cpu" in spec.requires.vendors):
            assert reached[spec.name] >= 2, f"no test reaches {spec.name}"
    assert sum(count > 0 for count in reached.values()) >= 35


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.name)
def test_every_kernel_is_reached_on_some_platform(spec: KernelSpec) -> None:
    """A kernel that no sample reaches anywhere is never tested: its adapter has to bring one."""
    reached = any(admitted(spec, target) for target in TARGETS)
    why = next((text for pattern, text in NO_SAMPLE.items() if fnmatch(spec.name, pattern)), "")
    if why and not reached:
        assert not spec.is_built, f"{spec.name} is built and has no sample with {why}"
        pytest.skip(f"declared only; no contract has a sample with {why}")
    assert reached, f"no sample of {spec.op} is one that {spec.name} admits"


def test_the_list_of_kernels_without_samples_has_no_idle_entry() -> None:
    for pattern in NO_SAMPLE:
        found = [spec for spec in KERNELS if fnmatch(spec.name, pattern)]
        assert any(not any(admitted(spec, target) for target in TARGETS) for spec in found), pattern


def names_in(path: str, variable: str = "SUBJECTS") -> set[str]:
    """The kernels that a test module takes."""
    spec = spec_from_file_location(f"subjects_of_{Path(path).stem}", Path(__file__).parents[1] / path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return {kernel.name for kernel in getattr(module, variable)}


def test_every_built_kernel_that_is_not_for_the_cpu_is_in_a_list_of_tests() -> None:
    """Whatever it is called: its record decides."""
    gpu = {s.name for s in KERNELS if s.is_built and s.requires.vendors and "cpu" not in s.requires.vendors}
    asks = {s.name for s in KERNELS if s.is_built and any(text.startswith("triton") for text in s.requires.packages)}
    assert len(gpu) >= 15 and len(asks) >= 10
    for path in ("interpreter/test_portable_kernels.py", "gpu/test_contracts_gpu.py"):
        assert names_in(path) == gpu | asks, path
    if find_spec("triton") is not None:
        assert names_in("emulator/test_portable_kernels.py", "KERNELS") == asks
        assert names_in("xcompile/test_kernels.py", "KERNELS") == asks


@pytest.mark.parametrize("spec", gpu_kernels(KERNELS), ids=lambda spec: spec.name)
def test_every_kernel_for_gpus_has_calls_that_are_small_enough_for_the_interpreter(spec: KernelSpec) -> None:
    small_calls = [s for _, dtype, s in samples_of(spec.op) if dtype == torch.float32 and small(s)]
    assert len(small_calls) >= 3
    assert admitted(spec, load_profiles()[platform_for(spec)].target())


@pytest.mark.parametrize("op", ["kda_core", "kda"])
def test_states_fit_the_kernel(op: str) -> None:
    """A kernel that keeps the state in bfloat16 gets samples with such a state, and the query says so."""
    spec = KernelSpec("test.bf16", op, "", "", requires=Requires(state_dtypes=("bfloat16",)))
    for contract, dtype, sample in samples_of(op):
        own = fitted(contract, sample, spec)
        state = resolve_path(own.args, "state" if op == "kda_core" else "state.recurrent")
        if dtype == torch.float64:
            assert own is sample
        else:
            assert state.dtype == torch.bfloat16
            assert sample_query(contract, own, dtype).state_dtype == "bfloat16"
            assert sample_query(contract, sample, dtype).state_dtype == "float32"


@each_contract
def test_reference_does_not_use_the_table(contract: Contract) -> None:
    table = OpTable({slot: lambda *_: None for slot in SLOTS})
    with sealed_table():
        with pytest.raises(AssertionError, match="the ops table was read"):
            table.linear(0)
        for sample in contract_samples(contract, torch.float32)[:6]:
            contract.reference(**cloned(sample.args))


@each_contract
def test_reference_keeps_the_activation_dtype(contract: Contract) -> None:
    """Float outputs have the dtype of the activations, or float32 where the contract keeps them wide."""
    wide = {"moe_route", "logits", "sample"}
    for dtype in DTYPES:
        sample = contract_samples(contract, dtype)[0]
        for _, found in expect(contract, sample, dtype).forms:
            if found.is_floating_point:
                wanted = torch.promote_types(dtype, torch.float32) if contract.op in wide else dtype
                assert found == wanted, (contract.op, dtype_name(dtype))


def test_tolerances_are_within_reach_of_what_is_observed() -> None:
    """No float32 tolerance is more than 20 times what the worst kernel of the op shows: a loose bound proves nothing."""
    loose = {}
    for contract in CONTRACTS:
        worst = 0.0
        for sample in contract_samples(contract, torch.float32):
            for spec in KERNELS:
                if spec.op == contract.op and reject(spec, sample_query(contract, sample, torch.float32), CPU) is None:
                    report = check_sample(spec, contract, sample, torch.float32, KERNELS)
                    worst = max(worst, *(max(o.relative_rms, o.peak / 4) for o in report.outputs if o.tolerance), 0.0)
        # An op that only moves numbers has no error to compare with.
        if worst > 0 and contract.tolerance[torch.float32] > 20 * worst:
            loose[f"{contract.op}-{contract.phase}"] = worst
    assert not loose


def test_relative_rms() -> None:
    expected = torch.tensor([3.0, 4.0])
    assert relative_rms(torch.tensor([3.3, 4.4]), expected) == pytest.approx(0.1, rel=1e-6)
    assert relative_rms(torch.tensor([0.1]), torch.zeros(1)) == pytest.approx(0.1, rel=1e-6)
    assert math.isnan(relative_rms(torch.tensor([float("nan"), 4.0]), expected))
