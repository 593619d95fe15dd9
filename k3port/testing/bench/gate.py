"""The gate before every timing: a kernel that does not agree with the reference on the very inputs is not timed.

The contract suite (:mod:`k3port.testing.contract`) looks closer, at small shapes and on the CPU. This gate stays on the
device, since the results of a timed shape are gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from k3port.errors import NumericsError
from k3port.ops.contract import cloned, relative_rms, resolve_path
from k3port.testing.bench.workload import Answer, Args, Op, Workload, contract_answer
from k3port.testing.contract.reference import as_tuple
from k3port.testing.contract.variants import tensors
from k3port.testing.harness import PEAK_FACTOR, poisoned_memory

PEER_TOLERANCE = 5e-2
"""Relative RMS error up to which a peer counts as doing the same work: peers round other things inside than we do."""


class GateError(NumericsError):
    """A kernel's result on the inputs that were to be timed is wrong, so there is no time to report."""


@dataclass(frozen=True)
class GateReport:
    """The largest relative RMS error over everything that the kernel wrote, its bound, and what was compared."""

    relative_rms: float
    tolerance: float
    checked: tuple[str, ...]


def answer_of(workload: Workload, args: Args) -> Answer:
    """The float64 answer for these arguments, which stay as they are."""
    if workload.reference is not None:
        return workload.reference(args)
    return contract_answer(workload.contract, args)


def pass_gate(kernel: str, function: Op, workload: Workload, case: str, args: Args, answer: Answer) -> GateReport:
    """Runs a kernel on a copy of the inputs, in poisoned memory between canaries, and compares all that it wrote.

    Raises:
        GateError: it raised, differs, leaves a hole, or writes where it must not.
    """
    contract, faults = workload.contract, list[str]()
    tolerance = contract.tolerance[workload.dtype]
    own = cloned(args)
    try:
        with poisoned_memory() as guards:
            outputs = as_tuple(function(**own))
        faults += guards.faults()
    except Exception as exc:
        text = str(exc).strip().splitlines()
        raise GateError(
            f"{kernel} failed on {case}: nothing is timed",
            reasons=[f"{type(exc).__name__}: {text[0] if text else ''}"],
            hint=f"k3port kernels check {kernel}",
        ) from exc
    if len(outputs) != len(contract.outputs):
        faults.append(f"{len(outputs)} outputs, the contract has {list(contract.outputs)}")
    errors: dict[str, float] = {}
    for name, value, wanted in zip(contract.outputs, outputs, answer.outputs, strict=False):
        if value.shape != wanted.shape:
            faults.append(f"{name} is {tuple(value.shape)}, expected {tuple(wanted.shape)}")
        else:
            errors[name] = _error(name, value, wanted, tolerance, faults)
    for path, wanted in answer.updated.items():
        value, old = resolve_path(own, path), resolve_path(args, path)
        # Only what the op writes is measured: large numbers beside it would hide any error.
        written = (wanted != old).any(dim=-1)
        if written.any():
            errors[path] = _error(path, value[written], wanted[written], tolerance, faults)
        if not _same_bits(value[~written], old[~written]):
            faults.append(f"{path}: rows that the op must not touch changed")
    for (path, value), (_, old) in zip(tensors(own), tensors(args), strict=True):
        if path not in answer.updated and not _same_bits(value, old):
            faults.append(f"{path} changed, which the op must leave as it is")
    if not errors and not faults:
        faults.append("it wrote nothing that could be compared")
    if faults:
        raise GateError(
            f"{kernel} is wrong on {case}: nothing is timed", reasons=faults, hint=f"k3port kernels check {kernel}"
        )
    return GateReport(max(errors.values()), tolerance, tuple(errors))


def peer_error(call: Callable[[], Any], answer: Answer) -> float:
    """Largest relative RMS error of a peer's results; NaN where there are none of the right size."""
    worst, compared = 0.0, 0
    for result, wanted in zip(as_tuple(call()), answer.outputs, strict=False):
        if not isinstance(result, torch.Tensor) or result.numel() != wanted.numel():
            return float("nan")
        worst = max(worst, relative_rms(result.reshape(wanted.shape), wanted))
        compared += 1
    return worst if compared else float("nan")


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN equals NaN, and zero does not equal minus zero."""
    return torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))


def _error(name: str, value: torch.Tensor, wanted: torch.Tensor, tolerance: float, faults: list[str]) -> float:
    """Relative RMS error of one result, 0 for integers that are equal; what is wrong is added to ``faults``."""
    if not value.is_floating_point():
        wrong = int((value != wanted).sum())
        if wrong:
            faults.append(f"{name}: {wrong} of {value.numel()} numbers differ")
        return float(wrong)
    lost = int((~torch.isfinite(value)).sum())
    if lost:
        faults.append(f"{name}: {lost} of {value.numel()} numbers are not finite")
        return float("nan")
    difference = value.double() - wanted
    size, largest = float(wanted.square().mean().sqrt()), float(wanted.abs().max())
    rms, most = float(difference.square().mean().sqrt()), float(difference.abs().max())
    relative = rms / size if size else rms
    if not relative <= tolerance or not most <= PEAK_FACTOR * tolerance * largest:
        peak = most / largest if largest else most
        faults.append(f"{name}: relative RMS error {relative:.2e}, peak {peak:.2e}; tolerance {tolerance:.0e}")
    return relative
