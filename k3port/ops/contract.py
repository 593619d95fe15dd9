"""What an op promises: arguments with named axes, a readable reference, samples, tolerances, invariants and cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from k3port.ops.catalog import Phase

# Relative RMS error that a correct kernel stays under: a few times what the built-in ones show (1e-7 to 3e-7 in
# float32). Rounding the output alone is 1.7e-3 in bfloat16, 2.1e-4 in float16.
DEFAULT_TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 2e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 5e-3,
    torch.float16: 1e-3,
}
# For ops whose results stay float32 whatever the activations are.
FLOAT32_RESULT_TOLERANCE: Mapping[torch.dtype, float] = {**DEFAULT_TOLERANCE, torch.bfloat16: 1e-6, torch.float16: 1e-6}


@dataclass(frozen=True)
class Sample:
    """One call of an op: ``name`` says what is special about it, ``args`` are keyword arguments."""

    name: str
    args: Mapping[str, Any]
    adversarial: bool = False
    allowance: Mapping[torch.dtype, float] = field(default_factory=dict)
    """Tolerances of this call alone where they are above the contract's, by dtype; the sample says why."""


@dataclass(frozen=True)
class Cost:
    """Least work of one call: device-memory bytes (each operand once) and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Invariant:
    """A property that every kernel of the op keeps. ``check(function, dtype, generator)`` raises AssertionError."""

    name: str
    check: Callable[[Callable[..., Any], torch.dtype, torch.Generator], None]


@dataclass(frozen=True)
class Contract:
    """The contract of one op (or of one phase of it, where the phases take different arguments).

    Attributes:
        op, phase: catalog name; phase None means that all phases share this contract.
        inputs: argument name to axis names, such as ``{"x": "T D"}``; scalars and records have an empty string.
        outputs: result name to axis names.
        mutates: dotted paths of arguments that the op updates in place; some calls lack some of them.
        packed: arguments that hold weights as stored; a kernel with a ``pack`` function gets them packed.
        reference: readable implementation; it computes in float64 when it is given float64, else in float32, rounds
            its result to the activation dtype once, and never goes through the table.
        samples: ``samples(dtype, generator)`` yields calls, adversarial ones included.
        tolerance: relative RMS bound per dtype against the float64 reference on the same inputs.
        cost: axis sizes and the activation's item size in bytes to :class:`Cost`.
    """

    op: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    reference: Callable[..., Any]
    samples: Callable[[torch.dtype, torch.Generator], Iterator[Sample]]
    cost: Callable[[Mapping[str, int], int], Cost]
    phase: Phase | None = None
    mutates: tuple[str, ...] = ()
    packed: tuple[str, ...] = ()
    tolerance: Mapping[torch.dtype, float] = field(default_factory=lambda: DEFAULT_TOLERANCE)
    invariants: tuple[Invariant, ...] = ()


def accumulation_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float64 if any operand is float64 (a reference run), else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Applies ``fn`` to every tensor inside nested dataclasses, dicts, lists and tuples; other values pass through."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: map_tensors(getattr(value, f.name), fn) for f in dataclasses.fields(value) if f.init}
        )
    if isinstance(value, Mapping):
        return {key: map_tensors(item, fn) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, fn) for item in value)
    return value


def cloned(value: Any) -> Any:
    """A deep copy of all tensors in ``value``: in-place ops on the copy leave the original alone."""
    return map_tensors(value, torch.Tensor.clone)


def upcast(value: Any) -> Any:
    """A copy with every floating tensor in float64."""
    return map_tensors(value, lambda t: t.to(torch.float64 if t.is_floating_point() else t.dtype, copy=True))


def resolve_path(args: Mapping[str, Any], path: str) -> torch.Tensor:
    """The tensor at a dotted path such as ``cache.state``."""
    head, *rest = path.split(".")
    value = args[head]
    for name in rest:
        value = getattr(value, name)
    return value


def mutated(contract: Contract, args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What a call updates in place, by dotted path. An optional argument that the call lacks is left out."""
    found: dict[str, torch.Tensor] = {}
    for path in contract.mutates:
        head, *rest = path.split(".")
        value = args.get(head)
        for name in rest:
            value = None if value is None else getattr(value, name)
        if value is not None:
            found[path] = value
    return found


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """sqrt(mean(error²) / mean(expected²)); a plain RMS where the expected values are all zero. NaN stays NaN."""
    actual, expected = actual.double(), expected.double()
    error = (actual - expected).square().mean().sqrt()
    size = expected.square().mean().sqrt()
    return float(error / size) if size > 0 else float(error)
