"""For kernel authors: runs a kernel on its contract's samples and measures it against the float64 reference.

A kernel gets packed weights, poisoned memory and, on request, rows that are slices of wider ones. Every output and
every argument that the op updates is compared; what the op must not touch is compared bit for bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from k3port.ops.catalog import OPS, Phase
from k3port.ops.contract import Contract, Invariant, Sample, cloned, resolve_path, upcast
from k3port.ops.moe import RouterParams
from k3port.ops.moe_weights import StoredExperts
from k3port.ops.segment import Segment
from k3port.ops.table import OpTable
from k3port.oracle.spec import KernelSpec, OpQuery
from k3port.runtime.binding import load_object

Op = Callable[..., Any]

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float64)
SEED = 20260
ABSOLUTE_SHARE = 1e-4
"""Share of the relative tolerance that is allowed as an absolute error, for results that are zero or nearly so."""
PEAK_FACTOR = 4.0
"""The largest single error, relative to the largest expected number, may be this many times the RMS tolerance: one
wrong element in a large tensor hardly moves the RMS."""


@dataclass(frozen=True)
class OutputError:
    """How far one output, or one updated argument, is from the reference."""

    name: str
    relative_rms: float
    peak: float
    """Largest error over the largest expected magnitude."""
    tolerance: float
    """Bound of ``relative_rms``; ``peak`` may be :data:`PEAK_FACTOR` times as large."""
    ok: bool


@dataclass(frozen=True)
class SampleReport:
    """What one call of one kernel showed.

    ``faults`` are sentences: wrong shapes, NaN, touched inputs, errors that are too large.
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


@dataclass(frozen=True)
class Expected:
    """The reference's answer in float64, and the shapes and types that it gives in the sample's own dtype."""

    outputs: tuple[torch.Tensor, ...]
    updated: Mapping[str, torch.Tensor]
    forms: tuple[tuple[torch.Size, torch.dtype], ...]


def op_contracts(op: str) -> tuple[Contract, ...]:
    """The contracts of an op: one, or one per phase."""
    paths = (path.partition(":") for path in OPS[op].contracts)
    return tuple(getattr(importlib.import_module(module), name) for module, _, name in paths)


def contract_samples(contract: Contract, dtype: torch.dtype) -> list[Sample]:
    """All samples with their usual random numbers; in float64 every floating tensor is float64."""
    samples = contract.samples(dtype, torch.Generator().manual_seed(SEED))
    if dtype != torch.float64:
        return list(samples)
    return [Sample(s.name, upcast(s.args), s.adversarial) for s in samples]


def sample_phase(contract: Contract, sample: Sample) -> Phase | None:
    """The phase that a sample belongs to; None for ops without phases."""
    if not OPS[contract.op].phased:
        return None
    return contract.phase or sample.args["segment"].phase


def sample_query(contract: Contract, sample: Sample, dtype: torch.dtype) -> OpQuery:
    """What the oracle would be asked for a call like this sample."""
    axes: dict[str, int] = {}
    weight_format = ""
    for name, spec in contract.inputs.items():
        value, names = sample.args[name], spec.split()
        if isinstance(value, torch.Tensor) and len(names) == value.dim():
            axes |= {axis: size for axis, size in zip(names, value.shape, strict=True) if axis.isidentifier()}
        elif isinstance(value, StoredExperts):
            axes |= {"E": value.num_experts, "I": value.width, "L": value.latent}
            weight_format = "mxfp4" if value.is_mxfp4 else "bfloat16"
        elif isinstance(value, RouterParams):
            axes |= {"E": value.weight.shape[0], "X": value.top_k}
    return OpQuery(contract.op, sample_phase(contract, sample), axes, str(dtype).removeprefix("torch."), weight_format)


def build_kernel(spec: KernelSpec, kernels: Iterable[KernelSpec], phase: Phase | None = None) -> Op:
    """Imports a kernel; a composite is built from the reference kernels of its parts.

    Args:
        kernels: where the parts are looked up.
        phase: of the parts, for composites that serve both phases; None takes the kernel's first phase.
    """
    function = load_object(spec.load)
    if not spec.parts:
        return function
    phase = phase or (spec.phases[0] if spec.phases else None)
    known = tuple(kernels)

    def reference(part: str) -> KernelSpec:
        wanted = phase if OPS[part].phased else None
        found = (k for k in known if k.op == part and k.is_reference)
        return next(k for k in found if wanted is None or not k.phases or wanted in k.phases)

    return function(**{part: build_kernel(reference(part), known, phase) for part in spec.parts})


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory holds NaN (the largest number for integers), so that a result that was never written shows.

    Only allocations from Python are poisoned: kernels keep the algorithms that they use in real runs.
    """

    def poison(allocate: Op) -> Op:
        def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)

        return allocated

    with ExitStack() as stack:
        for owner, names in ((torch, ("empty", "empty_like", "empty_strided")), (torch.Tensor, ("new_empty",))):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, poison(getattr(owner, name))))
        yield


@contextmanager
def sealed_table() -> Iterator[None]:
    """Reading any slot of any table raises: a reference must not go through dispatch."""

    def refuse(self: OpTable, name: str) -> Any:
        raise AssertionError(f"the ops table was read ({name})")

    with mock.patch.object(OpTable, "__getattribute__", refuse):
        yield


def expect(contract: Contract, sample: Sample, dtype: torch.dtype) -> Expected:
    """Runs the reference, in float64 for the numbers and in ``dtype`` for the shapes and types."""
    with sealed_table():
        wide = upcast(sample.args)
        outputs = _as_tuple(contract.reference(**wide))
        narrow = _as_tuple(contract.reference(**cloned(sample.args)))
    updated = {path: resolve_path(wide, path) for path in contract.mutates}
    return Expected(outputs, updated, tuple((t.shape, t.dtype) for t in narrow))


def check_sample(
    spec: KernelSpec,
    contract: Contract,
    sample: Sample,
    dtype: torch.dtype,
    kernels: Iterable[KernelSpec],
    *,
    strided: bool = False,
    expected: Expected | None = None,
) -> SampleReport:
    """Runs one kernel on one sample and compares everything that it wrote.

    Args:
        kernels: where the parts of a composite come from.
        strided: give the token rows as slices of wider rows, as the model's merged projections do.
        expected: the reference's answer, if it is at hand.
    """
    expected = expect(contract, sample, dtype) if expected is None else expected
    phase = sample_phase(contract, sample)
    function = build_kernel(spec, kernels, phase)
    args = dict(cloned(sample.args))
    if strided:
        args |= {n: _slice_of_wider(args[n]) for n, axes in contract.inputs.items() if _is_rows(args[n], axes)}
    if spec.pack:
        args |= {name: load_object(spec.pack)(args[name], dtype) for name in contract.packed}
    before = cloned(args)
    with poisoned_memory():
        outputs = _as_tuple(function(**args))
    faults: list[str] = []
    errors: list[OutputError] = []
    tolerance = contract.tolerance[dtype]
    if len(outputs) != len(contract.outputs):
        faults.append(f"{len(outputs)} outputs, the contract has {list(contract.outputs)}")
    for name, value, wanted, form in zip(contract.outputs, outputs, expected.outputs, expected.forms, strict=False):
        if (value.shape, value.dtype) != form:
            faults.append(f"{name} is {tuple(value.shape)} {value.dtype}, expected {tuple(form[0])} {form[1]}")
        else:
            errors.append(_compare(name, value, wanted, tolerance, faults))
    for path, wanted in expected.updated.items():
        value, old = resolve_path(args, path), resolve_path(before, path)
        # Only what the op writes is measured: large numbers beside it would hide any error.
        written = ((wanted != old.double()) & ~(wanted.isnan() & old.isnan())).any(dim=-1)
        errors.append(_compare(path, value[written], wanted[written], tolerance, faults))
        if not _same_bits(value[~written], old[~written]):
            faults.append(f"{path}: rows that the op must not touch changed")
    faults += [f"{path} was changed" for path in _changed(args, before) if path not in contract.mutates]
    name = str(dtype).removeprefix("torch.")
    return SampleReport(spec.name, contract.op, phase, name, sample.name, tuple(errors), tuple(faults))


def check_invariant(
    spec: KernelSpec,
    contract: Contract,
    invariant: Invariant,
    dtype: torch.dtype,
    kernels: Iterable[KernelSpec],
    phase: Phase | None = None,
) -> bool:
    """Runs one invariant of a contract on one kernel; calls of a phase that it does not serve go to the reference.

    Args:
        phase: of a composite's parts.

    Returns:
        Whether the kernel was called at all.

    Raises:
        AssertionError: the kernel does not keep the invariant.
    """
    kernel, used = build_kernel(spec, kernels, phase), False

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal used
        segment = next((value for value in (*args, *kwargs.values()) if isinstance(value, Segment)), None)
        if segment is not None and spec.phases and segment.phase not in spec.phases:
            return contract.reference(*args, **kwargs)
        used = True
        return kernel(*args, **kwargs)

    with poisoned_memory():
        invariant.check(function, dtype, torch.Generator().manual_seed(SEED))
    return used


def _compare(
    name: str, value: torch.Tensor, expected: torch.Tensor, tolerance: float, faults: list[str]
) -> OutputError:
    if not value.is_floating_point():
        wrong = int((value != expected).sum())
        if wrong:
            faults.append(f"{name}: {wrong} of {value.numel()} numbers differ")
        return OutputError(name, float(wrong), float(wrong), 0.0, not wrong)
    value = value.double()
    finite = torch.isfinite(expected)
    # Where the reference is infinite the kernel must be too, with the same sign.
    misplaced = int((~torch.isfinite(value) & finite).sum()) + int((value != expected)[~finite].sum())
    if misplaced:
        count = f"{misplaced} of {value.numel()} numbers"
        faults.append(f"{name}: {count} are not finite, or finite where they must not be")
    value, expected = value[finite], expected[finite]
    if not value.numel():
        return OutputError(name, 0.0, 0.0, tolerance, not misplaced)
    error = value - expected
    size, largest = float(expected.square().mean().sqrt()), float(expected.abs().max())
    rms, most = float(error.square().mean().sqrt()), float(error.abs().max())
    floor = tolerance * ABSOLUTE_SHARE
    relative = rms / size if size else rms
    peak = most / largest if largest else most
    # A comparison with NaN is false, so NaN is a fault here as well.
    fits = rms <= tolerance * size + floor and most <= PEAK_FACTOR * tolerance * largest + floor
    if not fits and not misplaced:
        faults.append(f"{name}: relative RMS error {relative:.2e}, peak {peak:.2e}; tolerance {tolerance:.0e}")
    return OutputError(name, relative, peak, tolerance, fits and not misplaced)


def _is_rows(value: Any, axes: str) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and axes.split()[:1] == ["T"]


def _slice_of_wider(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as columns of a wider buffer whose other columns hold NaN (or the largest integer)."""
    rows = x.flatten(1) if x.dim() > 1 else x
    poison = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    wide = torch.full((x.shape[0], rows.shape[1] + 24), poison, dtype=x.dtype, device=x.device)
    wide[:, 8 : 8 + rows.shape[1]] = rows
    return wide[:, 8 : 8 + rows.shape[1]].unflatten(1, x.shape[1:])


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return () if result is None else tuple(result) if isinstance(result, tuple | list) else (result,)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.numel() else True


def _changed(args: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Dotted paths of arguments whose bits differ."""
    old = dict(_tensors(before))
    return [path for path, new in _tensors(args) if not _same_bits(new, old[path])]


def _tensors(value: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []

    def visit(item: Any, path: str) -> None:
        if isinstance(item, torch.Tensor):
            found.append((path, item))
        elif isinstance(item, Mapping):
            for key, part in item.items():
                visit(part, f"{path}.{key}".lstrip("."))
        elif isinstance(item, list | tuple):
            for index, part in enumerate(item):
                visit(part, f"{path}.{index}")
        elif hasattr(item, "__dataclass_fields__"):
            for name in item.__dataclass_fields__:
                visit(getattr(item, name), f"{path}.{name}")

    visit(value, "")
    return found
