"""The slotted table of bound functions that a model calls. Reading a slot is one attribute access, nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from k3port.ops.catalog import OPS

SLOTS: tuple[str, ...] = tuple(slot for info in OPS.values() for slot in info.slots)


class OpTable:
    """One function per op and phase, bound from a plan before the first step.

    A slot that the plan left unbound (an op that the model does not use, or that a fused kernel covers) has no value:
    reading it raises AttributeError with the slot's name. A table is not changed after binding; :meth:`replaced`
    makes a new one.
    """

    __slots__ = SLOTS

    if TYPE_CHECKING:
        # The slots come from the catalog, which a type checker does not run.
        def __getattr__(self, slot: str) -> Callable[..., Any]: ...

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        for slot, function in functions.items():
            setattr(self, slot, function)

    def items(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """The bound slots in catalog order."""
        return ((slot, getattr(self, slot)) for slot in SLOTS if hasattr(self, slot))

    def replaced(self, **functions: Callable[..., Any]) -> OpTable:
        """A copy with some slots bound to other functions."""
        return OpTable({**dict(self.items()), **functions})
