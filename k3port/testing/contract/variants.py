"""The same numbers in other memory orders: what a kernel must take without being told.

======== ==========================================================================================================
plain    as the sample gives them
strided  token rows are columns of wider rows, aligned to 16 bytes in bfloat16, as the model's merged projections are
permuted ``[T, H, K]`` with the heads outermost in memory; ``[T, D]`` with the tokens innermost
unaligned as strided, but from an odd element and with an odd distance between rows: no wide load fits
======== ==========================================================================================================

Only arguments whose first axis is ``T`` and which have more than one axis are changed: weights, states and caches are
allocated by k3port itself and always dense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch

from k3port.testing.contract.memory import Guards, dense_strides, usable_strides

Variant = Literal["plain", "strided", "permuted", "unaligned"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)


def is_rows(value: Any, axes: str) -> bool:
    """Whether an argument of these axes holds token rows."""
    return isinstance(value, torch.Tensor) and value.dim() > 1 and axes.split()[:1] == ["T"]


def memory_order(x: torch.Tensor, variant: Variant) -> tuple[tuple[int, ...] | None, int]:
    """Strides (None: its own) and the elements that come before the first one, for token rows."""
    if variant == "plain":
        return None, 0
    if variant == "permuted":
        return dense_strides(x.shape, [1, 0, *range(2, x.dim())]), 0
    inner = dense_strides(x.shape)
    width = inner[0]
    if variant == "strided":
        return (width + 24, *inner[1:]), 8
    return (width + 1 + width % 2, *inner[1:]), 1


def has_variant(args: Mapping[str, Any], inputs: Mapping[str, str], variant: Variant) -> bool:
    """Whether the variant differs from the plain call at all: some argument holds token rows."""
    return variant == "plain" or any(is_rows(args[name], axes) for name, axes in inputs.items())


def map_paths(value: Any, fn: Callable[[torch.Tensor, str], Any], path: str = "") -> Any:
    """Applies ``fn(tensor, dotted path)`` to every tensor inside nested dataclasses, mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return fn(value, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return dataclasses.replace(value, **{n: map_paths(getattr(value, n), fn, _join(path, n)) for n in names})
    if isinstance(value, Mapping):
        return {key: map_paths(item, fn, _join(path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map_paths(item, fn, _join(path, str(index))) for index, item in enumerate(value))
    return value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def placed(args: Mapping[str, Any], inputs: Mapping[str, str], variant: Variant, guards: Guards) -> dict[str, Any]:
    """Every tensor of a call under guard, token rows in the variant's memory order."""

    def place(tensor: torch.Tensor, path: str) -> torch.Tensor:
        if is_rows(tensor, inputs.get(path, "")):
            strides, shift = memory_order(tensor, variant)
            return guards.place(tensor, path, strides, shift)
        return guards.place(tensor, path)

    return map_paths(args, place)


def tensors(value: Any) -> list[tuple[str, torch.Tensor]]:
    """All tensors of a call with their dotted paths."""
    found: list[tuple[str, torch.Tensor]] = []
    map_paths(value, lambda tensor, path: found.append((path, tensor)) or tensor)
    return found


def moved(value: Any, device: str) -> Any:
    """A call with every tensor on a device, strides kept; tensors that are there already are not copied."""

    def move(tensor: torch.Tensor, _: str) -> torch.Tensor:
        if tensor.device == torch.device(device):
            return tensor
        there = torch.empty_strided(tensor.shape, usable_strides(tensor), dtype=tensor.dtype, device=device)
        return there.copy_(tensor)

    return map_paths(value, move)
