"""Memory that shows misuse: poison where nothing was written, canaries around every tensor.

A tensor under guard lies inside a larger buffer. Everything in the buffer that is not part of the tensor (its borders,
and the gaps between strided rows) holds a pattern; whatever changes there was written out of bounds. For floating
types the pattern is a NaN with an unusual payload, so reading it shows as well. GPU kernels are not checked by anything
else: a wrong mask writes silently into the neighbouring allocation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

# The guards allocate too, while the functions of torch are replaced.
_EMPTY = torch.empty

MIN_BORDER_BYTES = 4096
MAX_BORDER_BYTES = 1 << 20
"""Borders are as large as the tensor itself within these limits: a tile without a mask overruns by about a tensor."""
ALIGNMENT_BYTES = 512
"""Tensors under guard start where allocations of torch on a GPU start, so that kernels take their usual paths."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FLOAT_PATTERNS = {
    torch.float64: 0x7FF8A5A5A5A5A5A5,
    torch.float32: 0x7FE5A5A5,
    torch.bfloat16: 0x7FE5,
    torch.float16: 0x7EA5,
}
_POISON = {
    torch.float64: 0x7FFDEAD0DEAD0DEA,
    torch.float32: 0x7FDEAD01,
    torch.bfloat16: 0x7FDE,
    torch.float16: 0x7EDE,
}
_INTEGER_PATTERNS = {1: 0xA5, 2: 0x7BA5, 4: 0x7BA5A5A5, 8: 0x7BA5A5A5A5A5A5A5}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with a NaN that no arithmetic makes, integers with their largest number; bool stays as it is."""
    if tensor.dtype in _POISON:
        tensor.view(_INTEGERS[tensor.dtype.itemsize]).fill_(_POISON[tensor.dtype])
        return tensor
    if tensor.is_floating_point():
        return tensor.fill_(torch.nan)
    return tensor if tensor.dtype == torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


def count_unwritten(tensor: torch.Tensor) -> int:
    """How many numbers still hold the poison; 0 for types without a poison of their own."""
    pattern = _POISON.get(tensor.dtype)
    if pattern is None or not tensor.numel():
        return 0
    return int((tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize]) == pattern).sum())


class Guard:
    """One tensor inside a buffer of canaries.

    Args:
        name: for messages.
        shape, strides, dtype, device: of :attr:`tensor`; its numbers are not set.
        shift: elements between an aligned address and the tensor's first element.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        shift: int = 0,
    ) -> None:
        self.name = name
        size = dtype.itemsize
        self._elements = math.prod(shape)
        self._span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if self._elements else 0
        wanted = min(max(self._span * size, MIN_BORDER_BYTES), MAX_BORDER_BYTES)
        border = -(-wanted // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // size
        self._pattern = _FLOAT_PATTERNS.get(dtype, _INTEGER_PATTERNS[size])
        self._begin = border + shift
        self._buffer = _EMPTY(self._begin + self._span + border, dtype=_INTEGERS[size], device=device)
        self._buffer.fill_(self._pattern)
        self._layout = (tuple(shape), tuple(strides), self._begin)
        self.tensor = self._buffer.view(dtype).as_strided(*self._layout)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this buffer."""
        return tensor.untyped_storage().data_ptr() == self._buffer.untyped_storage().data_ptr()

    def fault(self) -> str:
        """What was written beside the tensor, in one sentence; empty where nothing was."""
        changed = self._buffer != self._pattern
        if self._elements == self._span:
            changed[self._begin : self._begin + self._span] = False
        else:
            changed.as_strided(*self._layout).fill_(False)
        places = changed.nonzero().flatten()
        if not places.numel():
            return ""
        first = int(places[0]) - self._begin
        if first < 0:
            where = f"{-first} before its first element"
        elif first >= self._span:
            where = f"{first - self._span + 1} after its last element"
        else:
            where = f"in a gap between its rows, at {first}"
        return f"{self.name}: {places.numel()} elements outside it were overwritten, the first one {where}"


def can_guard(tensor: torch.Tensor) -> bool:
    """Plain strided tensors of real numbers with memory of their own kind; others are left as they are."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
        and not (tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned())
    )


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> tuple[int, ...]:
    """Strides without gaps; ``order`` lists the axes from the outermost in memory to the innermost."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def usable_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor; dense ones where elements share memory, as in an expanded tensor."""
    pairs = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return dense_strides(tensor.shape)
        reach += (size - 1) * stride
    return tuple(tensor.stride())


class Guards:
    """All guarded tensors of one call."""

    def __init__(self) -> None:
        self._guards: list[Guard] = []
        self._numbers = itertools.count(1)

    def place(
        self, tensor: torch.Tensor, name: str, strides: Sequence[int] | None = None, shift: int = 0
    ) -> torch.Tensor:
        """A copy of ``tensor`` under guard, with its own strides or others."""
        if tensor.is_meta:
            return tensor
        if not can_guard(tensor):
            return tensor.clone()
        found = tuple(strides) if strides is not None else usable_strides(tensor)
        guard = Guard(name, tensor.shape, found, tensor.dtype, tensor.device, shift)
        self._guards.append(guard)
        return guard.tensor.copy_(tensor)

    def allocated(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for what the code under test has just allocated."""
        return self.place(tensor, f"allocation {next(self._numbers)} {tuple(tensor.shape)}")

    def rename(self, tensor: torch.Tensor, name: str) -> None:
        """Says what an allocation turned out to be."""
        for guard in self._guards:
            if guard.owns(tensor):
                guard.name = name

    def faults(self) -> list[str]:
        """One sentence for each tensor beside which something was written."""
        return [fault for guard in self._guards if (fault := guard.fault())]


_UNSET = ("empty", "empty_like", "empty_strided")
_SET = ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like")
_UNSET_METHODS = ("new_empty", "new_empty_strided")
_SET_METHODS = ("new_zeros", "new_ones", "new_full")


@contextmanager
def poisoned_memory() -> Iterator[Guards]:
    """Inside, new memory holds NaN (the largest number for integers) and lies between canaries.

    A result that was never written shows, and so does a write beside a tensor, in :meth:`Guards.faults`. Only
    allocations from Python are changed: kernels keep the algorithms that they use in real runs.
    """
    guards = Guards()

    def replaced(allocate: Callable[..., torch.Tensor], unset: bool) -> Callable[..., torch.Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            if unset and not tensor.is_meta:
                poison(tensor)
            return tensor if kwargs.get("out") is not None else guards.allocated(tensor)

        return allocated

    with ExitStack() as stack:
        for owner, names, unset in (
            (torch, _UNSET, True),
            (torch, _SET, False),
            (torch.Tensor, _UNSET_METHODS, True),
            (torch.Tensor, _SET_METHODS, False),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, replaced(getattr(owner, name), unset)))
        yield guards
