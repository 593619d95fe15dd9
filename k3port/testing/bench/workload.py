"""What is measured: the shapes of one op, the data of each call, and the peers to measure beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from k3port.ops.catalog import Phase, slot_name
from k3port.ops.contract import Contract, Cost, mutated, upcast
from k3port.oracle.spec import KernelSpec
from k3port.testing.contract.reference import as_tuple
from k3port.testing.harness import op_contracts, sealed_table

Op = Callable[..., Any]
Args = Mapping[str, Any]


class PeerAbsent(Exception):
    """A peer cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Answer:
    """What is right for some arguments, in float64 (integers as they are), on the device that is measured.

    ``outputs`` in the contract's order; ``updated`` by dotted path of the arguments that the op changes.
    """

    outputs: tuple[torch.Tensor, ...]
    updated: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """Something else that does the same work.

    Attributes:
        name: as the table shows it.
        prepare: from the contract's arguments to a call without arguments. Layouts are converted here, outside the
            timing; tensors that the call changes must be its own or the arguments'. What the call returns is compared
            with the contract's outputs, in their order, where ``same_result``. Raises :class:`PeerAbsent`.
        same_result: False for a peer that only moves the same bytes.
        note: what to know about its numbers, asked after the timing.
    """

    name: str
    prepare: Callable[[Args], Callable[[], Any]]
    same_result: bool = True
    note: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Case:
    """One shape.

    Attributes:
        name: as the table shows it, such as ``H96 T8192``.
        axes: sizes by the contract's letters, for its cost and for the receipt.
        make: ``make(device, generator)`` gives the arguments of one call; the generator is the device's.
        quick: whether the short run has it.
        cost: in place of the contract's, which counts plain calls, with the same arguments.
        tuned: whether tuning takes it. Not where another case asks for the same configuration at the same sizes and is
            the one to decide: of two that are tuned the slower one would.
    """

    name: str
    axes: Mapping[str, int]
    make: Callable[[torch.device, torch.Generator], dict[str, Any]]
    quick: bool = False
    cost: Callable[[Mapping[str, int], int], Cost] | None = None
    tuned: bool = True


Peers = Callable[[Case, Cost, Sequence[KernelSpec]], Iterable[Peer]]


def no_peers(case: Case, cost: Cost, kernels: Sequence[KernelSpec]) -> Iterable[Peer]:
    """For ops that nothing else is measured beside."""
    return ()


@dataclass(frozen=True)
class Workload:
    """The cases of one op and phase.

    Attributes:
        peers: from a case, its cost and all kernels of the registry to what is measured beside each kernel.
        reference: where the contract's own would take too long; independent of every kernel that is measured.
        dtype: of the activations.
    """

    op: str
    phase: Phase | None
    cases: tuple[Case, ...]
    peers: Peers = no_peers
    reference: Callable[[Args], Answer] | None = None
    dtype: torch.dtype = torch.bfloat16

    @property
    def slot(self) -> str:
        return slot_name(self.op, self.phase)

    @property
    def contract(self) -> Contract:
        """The contract of this phase."""
        return next(c for c in op_contracts(self.op) if c.phase in (None, self.phase))

    def cost(self, case: Case) -> Cost:
        """Least work of one call of a case."""
        return (case.cost or self.contract.cost)(case.axes, self.dtype.itemsize)


def contract_answer(contract: Contract, args: Args) -> Answer:
    """What the contract's reference gives in float64 for these arguments, which stay as they are."""
    wide = upcast(args)
    with sealed_table():
        outputs = as_tuple(contract.reference(**wide))
    return Answer(outputs, mutated(contract, wide))


def contract_args(contract: Contract, data: Args) -> dict[str, Any]:
    """The contract's arguments out of more data; one that is not there gets the default that the reference has for it.

    Raises:
        KeyError: an argument has neither.
    """
    parameters = inspect.signature(contract.reference).parameters
    found: dict[str, Any] = {}
    for name in contract.inputs:
        if name in data:
            found[name] = data[name]
        elif parameters[name].default is not inspect.Parameter.empty:
            found[name] = parameters[name].default
        else:
            raise KeyError(f"{contract.op}: no data for its argument {name}")
    return found


def copy_peer(cost: Cost) -> Peer:
    """A copy on the device that reads and writes together as many bytes as the op must move, in one launch."""

    def prepare(args: Args) -> Callable[[], Any]:
        device = next(value.device for value in args.values() if isinstance(value, torch.Tensor))
        source = torch.randn(max(1, cost.bytes // 8), device=device)
        return source.clone

    return Peer("copy", prepare, same_result=False)


def copy_peers(case: Case, cost: Cost, kernels: Sequence[KernelSpec]) -> Iterable[Peer]:
    """Only the copy."""
    return (copy_peer(cost),)
