"""One kernel, one call: everything that it wrote is compared, everything else must have kept its bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Contract, Sample, cloned, resolve_path
from k3port.oracle.spec import KernelSpec
from k3port.runtime.binding import load_kernel
from k3port.testing.contract.measure import PLAIN_FACTOR, OutputError, compare, same_bits
from k3port.testing.contract.memory import Guards, count_unwritten, poisoned_memory
from k3port.testing.contract.reference import (
    Expected,
    as_tuple,
    build_kernel,
    dtype_name,
    expect,
    sample_phase,
)
from k3port.testing.contract.variants import Variant, moved, placed, tensors
from k3port.testing.kernel_code import said


@dataclass(frozen=True)
class SampleReport:
    """What one call of one kernel showed.

    ``faults`` are sentences: exceptions, wrong shapes, NaN, writes out of bounds, touched inputs, errors that are too
    large.
    """

    kernel: str
    op: str
    phase: Phase | None
    dtype: str
    sample: str
    outputs: tuple[OutputError, ...]
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults

    def check(self) -> None:
        """Raises AssertionError with all faults."""
        if self.faults:
            where = f"{self.kernel}, {self.dtype}, sample '{self.sample}'"
            raise AssertionError("\n  - ".join([f"{where}:", *self.faults]))


def check_sample(
    spec: KernelSpec,
    contract: Contract,
    sample: Sample,
    dtype: torch.dtype,
    kernels: Iterable[KernelSpec],
    *,
    variant: Variant = "plain",
    device: str = "cpu",
    expected: Expected | None = None,
) -> SampleReport:
    """Runs one kernel on one sample and compares everything that it wrote.

    The bound of an output is the contract's tolerance for the activation dtype (or for the output's own, where that is
    the coarser one; a sample may allow more), or twice the error of the reference in the same dtype where that is more.
    A reference kernel is held to the first alone: it would be its own bound.

    Args:
        kernels: where the parts of a composite come from.
        variant: memory order of the token rows.
        device: where the kernel runs; the reference always runs on the CPU.
        expected: the reference's answer, if it is at hand.
    """
    expected = expect(contract, sample, dtype) if expected is None else expected
    phase = sample_phase(contract, sample)
    faults: list[str] = []
    errors: list[OutputError] = []

    def report() -> SampleReport:
        return SampleReport(spec.name, contract.op, phase, dtype_name(dtype), sample.name, tuple(errors), tuple(faults))

    def bound(name: str, value: torch.Tensor) -> float:
        given = {name: max(bound, sample.allowance.get(name, 0.0)) for name, bound in contract.tolerance.items()}
        floor = max(given[dtype], given.get(value.dtype, 0.0))
        return floor if spec.is_reference else max(floor, PLAIN_FACTOR * expected.plain.get(name, 0.0))

    function = build_kernel(spec, kernels, phase)
    args = moved(dict(sample.args), device)
    if spec.pack:
        args |= {name: load_kernel(spec, spec.pack)(cloned(args[name]), dtype) for name in contract.packed}
    outer = Guards()
    args = placed(args, contract.inputs, variant, outer)
    before = cloned(args)
    try:
        with poisoned_memory() as inner:
            outputs = as_tuple(function(**args))
            for name, value in zip(contract.outputs, outputs, strict=False):
                inner.rename(value, name)
        # On a GPU this waits for the kernel, so that its errors appear here.
        faults += outer.faults() + inner.faults()
    except Exception as exc:
        faults.append(f"its predicates admit this call, but it raised {said(exc)}")
        return report()
    if len(outputs) != len(contract.outputs):
        faults.append(f"{len(outputs)} outputs, the contract has {list(contract.outputs)}")
    for name, value, wanted, form in zip(contract.outputs, outputs, expected.outputs, expected.forms, strict=False):
        if (value.shape, value.dtype) != form:
            faults.append(f"{name} is {tuple(value.shape)} {value.dtype}, expected {tuple(form[0])} {form[1]}")
            continue
        unwritten = count_unwritten(value)
        if unwritten:
            faults.append(
                f"{name}: {unwritten} of {value.numel()} numbers were never written, or come from memory that was not"
            )
        error = compare(name, value, wanted, bound(name, value), [] if unwritten else faults)
        errors.append(error)
    for path, wanted in expected.updated.items():
        value, old = resolve_path(args, path).cpu(), resolve_path(before, path).cpu()
        # Only what the op writes is measured: large numbers beside it would hide any error.
        written = ((wanted != old.double()) & ~(wanted.isnan() & old.isnan())).any(dim=-1)
        errors.append(compare(path, value[written], wanted[written], bound(path, value), faults))
        if not same_bits(value[~written], old[~written]):
            faults.append(f"{path}: rows that the op must not touch changed")
    faults += [f"{path} was changed" for path in _changed(args, before) if path not in contract.mutates]
    return report()


def _changed(args: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Dotted paths of arguments whose bits differ."""
    old = dict(tensors(before))
    return [path for path, new in tensors(args) if not same_bits(new, old[path])]
