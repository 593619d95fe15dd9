"""Every kernel on every sample of its op's contract, in every dtype that it takes; a kernel gets its tests by existing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from builtin_kernels import CPU, KERNELS, REGISTRY, dtype_name

from k3port.ops.catalog import OPS, Phase
from k3port.ops.contract import Contract, Sample, mutated
from k3port.oracle.resolve import reject
from k3port.oracle.spec import KernelSpec, Rejection
from k3port.testing.harness import (
    DTYPES,
    VARIANTS,
    Expected,
    check_invariant,
    check_sample,
    contract_samples,
    expect,
    fitted,
    has_variant,
    op_contracts,
    sample_query,
)

# Keys instead of contracts: a dataclass with a mapping inside cannot be hashed.
CONTRACTS = {(c.op, c.phase): c for op in OPS for c in op_contracts(op)}
ContractKey = tuple[str, Phase | None]


@cache
def samples_of(key: ContractKey, dtype: torch.dtype) -> list[Sample]:
    return contract_samples(CONTRACTS[key], dtype)


@cache
def expected_of(key: ContractKey, dtype: torch.dtype, index: int) -> Expected:
    return expect(CONTRACTS[key], samples_of(key, dtype)[index], dtype)


def refusal(spec: KernelSpec, contract: Contract, sample: Sample, dtype: torch.dtype) -> Rejection | None:
    return reject(spec, sample_query(contract, fitted(contract, sample, spec), dtype), CPU)


def first_reason(key: ContractKey, dtype: torch.dtype, found: list[Rejection | None]) -> Rejection:
    """The reason that has nothing to do with the phase, where there is one."""
    reasons = sorted((r for r in found if r is not None), key=lambda reason: reason.code == "PHASE")
    assert reasons, f"the contract of {' '.join(filter(None, key))} has no sample in {dtype_name(dtype)}: it needs some"
    return reasons[0]


def test_an_op_without_samples_is_told_in_a_sentence() -> None:
    with pytest.raises(AssertionError, match="the contract of kda decode has no sample in float32: it needs some"):
        first_reason(("kda", "decode"), torch.float32, [])
    phase, dtype = (Rejection("k", code, "") for code in ("PHASE", "DTYPE"))
    assert first_reason(("kda", None), torch.float32, [phase, None, dtype]) is dtype
    assert first_reason(("kda", None), torch.float32, [phase]) is phase


def cases() -> Iterator[tuple[KernelSpec, ContractKey, torch.dtype, int | None, Rejection | None]]:
    """Kernel, contract, dtype and sample number; a kernel that takes no sample in a dtype has one case that says why."""
    for spec in KERNELS:
        for key, contract in CONTRACTS.items():
            if key[0] != spec.op or (key[1] is not None and spec.phases and key[1] not in spec.phases):
                continue
            for dtype in DTYPES:
                found = [(i, refusal(spec, contract, s, dtype)) for i, s in enumerate(samples_of(key, dtype))]
                taken = [i for i, rejection in found if rejection is None]
                yield from ((spec, key, dtype, i, None) for i in taken)
                if not taken:
                    yield spec, key, dtype, None, first_reason(key, dtype, [r for _, r in found])


CASES = list(cases())


def case_id(case: tuple[KernelSpec, ContractKey, torch.dtype, int | None, Rejection | None]) -> str:
    spec, key, dtype, index, rejection = case
    name = f"refused {rejection.code}" if index is None and rejection else samples_of(key, dtype)[index or 0].name
    return f"{spec.name}-{dtype_name(dtype)}-{name}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_kernel_matches_the_reference(
    case: tuple[KernelSpec, ContractKey, torch.dtype, int | None, Rejection | None],
) -> None:
    spec, key, dtype, index, rejection = case
    if index is None:
        assert rejection is not None
        pytest.skip(f"{rejection.code}: {rejection.detail}")
    sample = samples_of(key, dtype)[index]
    contract = CONTRACTS[key]
    own = fitted(contract, sample, spec)
    expected = expected_of(key, dtype, index) if own is sample else expect(contract, own, dtype)
    for variant in VARIANTS:
        if has_variant(own.args, contract.inputs, variant):
            report = check_sample(spec, contract, own, dtype, KERNELS, variant=variant, expected=expected)
            report.check()
            assert len(report.outputs) == len(contract.outputs) + len(mutated(contract, own.args))


INVARIANT_CASES = [
    (spec, key, dtype, number)
    for spec, key, dtype in dict.fromkeys((case[0].name, case[1], case[2]) for case in CASES if case[3] is not None)
    if dtype != torch.float64
    for number in range(len(CONTRACTS[key].invariants))
]


@pytest.mark.parametrize(
    ("name", "key", "dtype", "number"),
    INVARIANT_CASES,
    ids=[f"{n}-{dtype_name(d)}-{CONTRACTS[k].invariants[i].name}" for n, k, d, i in INVARIANT_CASES],
)
def test_kernel_keeps_the_invariants(name: str, key: ContractKey, dtype: torch.dtype, number: int) -> None:
    spec, contract = REGISTRY.kernel(name), CONTRACTS[key]
    if not check_invariant(spec, contract, contract.invariants[number], dtype, KERNELS):
        pytest.skip(f"PHASE: serves {', '.join(spec.phases)}, which this invariant does not call")
