"""One kernel, one property that every kernel of its op keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Contract, Invariant, Sample, mutated, resolve_path
from k3port.ops.segment import Segment
from k3port.oracle.predicates import reject
from k3port.oracle.spec import KernelSpec, Rejection, Target
from k3port.testing.contract.memory import poisoned_memory
from k3port.testing.contract.reference import SEED, build_kernel, sample_query
from k3port.testing.contract.variants import map_paths, moved


def check_invariant(
    spec: KernelSpec,
    contract: Contract,
    invariant: Invariant,
    dtype: torch.dtype,
    kernels: Iterable[KernelSpec],
    phase: Phase | None = None,
    *,
    target: Target | None = None,
    device: str = "cpu",
) -> bool:
    """Runs one invariant of a contract on one kernel; calls that it does not serve go to the reference.

    Args:
        phase: of a composite's parts.
        target: where given, calls that the kernel's predicates refuse there go to the reference too.
        device: where the kernel runs; the invariant's own tensors stay on the CPU.

    Returns:
        Whether the kernel was called at all.

    Raises:
        AssertionError: the kernel does not keep the invariant, or writes out of bounds.
    """
    return invariant_refusal(spec, contract, invariant, dtype, kernels, phase, target=target, device=device) is None


def invariant_refusal(
    spec: KernelSpec,
    contract: Contract,
    invariant: Invariant,
    dtype: torch.dtype,
    kernels: Iterable[KernelSpec],
    phase: Phase | None = None,
    *,
    target: Target | None = None,
    device: str = "cpu",
    calls: Callable[[Sample], bool] | None = None,
) -> Rejection | None:
    """The same; where the kernel was never called, the reason why not, else None.

    Args:
        calls: which calls the kernel gets at all; the others go to the reference.
    """
    kernel, signature = build_kernel(spec, kernels, phase), inspect.signature(contract.reference)
    used, refusals = False, []

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal used
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        call = dict(bound.arguments)
        refusal = _refusal(spec, contract, call, dtype, target)
        if refusal is None and calls is not None and not calls(Sample("invariant", call)):
            refusal = Rejection(spec.name, "AXIS", "the calls of this invariant are not run here, for their size")
        if refusal is not None:
            refusals.append(refusal)
            return contract.reference(**call)
        used = True
        if device == "cpu":
            return kernel(**call)
        there = moved(call, device)
        result = kernel(**there)
        for path, tensor in mutated(contract, call).items():
            tensor.copy_(resolve_path(there, path))
        return map_paths(result, lambda tensor, _: tensor.cpu())

    with poisoned_memory() as guards:
        invariant.check(function, dtype, torch.Generator().manual_seed(SEED))
    faults = guards.faults()
    assert not faults, "; ".join(faults)
    if used:
        return None
    return refusals[0] if refusals else Rejection(spec.name, "AXIS", "the invariant calls no kernel in this dtype")


def _refusal(
    spec: KernelSpec, contract: Contract, call: dict[str, Any], dtype: torch.dtype, target: Target | None
) -> Rejection | None:
    if target is not None:
        return reject(spec, sample_query(contract, Sample("invariant", call), dtype), target)
    segment = next((value for value in call.values() if isinstance(value, Segment)), None)
    if segment is None or not spec.phases or segment.phase in spec.phases:
        return None
    return Rejection(spec.name, "PHASE", f"serves {' or '.join(spec.phases)}, not {segment.phase}")
