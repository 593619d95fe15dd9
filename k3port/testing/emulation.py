"""A kernel's contract samples, executed as AMD machine code: what Triton compiled for gfx942 or gfx950, in emulation.

It proves numbers, memory bounds and LDS synchronisation of the code that a GPU would run. It is no run on AMD hardware:
nothing is said of timing, of cache coherence, or of races in global memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast
from unittest import mock

import torch

from k3port.ops.catalog import OPS
from k3port.ops.contract import Contract, Sample
from k3port.oracle.spec import KernelSpec
from k3port.testing.amd_isa import LaunchReport, MutationReport, emulate
from k3port.testing.amd_isa import mutate as drop_instructions
from k3port.testing.contract import memory
from k3port.testing.contract.reference import contract_samples, dtype_name, op_contracts, sample_query
from k3port.testing.contract.variants import Variant, tensors
from k3port.testing.kernel_code import LONG_CASE_S, PART_S, Budget
from k3port.testing.subject import admits_dtype
from k3port.testing.suite import INVARIANT, SuiteReport, run_suite
from k3port.testing.targets import platform_target
from k3port.testing.xcompile.compiler import caught

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32, torch.float16)
MAX_ROWS = 144
"""Most tokens times heads of a sample: an emulated wave takes 5 to 10 us per instruction. Two chunks of 64 and a tail
still fit; the larger samples run in the interpreter and on GPUs."""
MAX_ROWS_AGAIN = 40
"""The same for the other dtypes and memory orders, after the first dtype has taken every sample up to the limit above:
they change loads, stores and roundings, not the path through the kernel."""
MAX_ROWS_OF_CALLS = 12
"""The same for the calls of invariants in a lean run: an update in place, which they are for, shows on few rows."""
VARIANTS: tuple[Variant, ...] = ("plain", "unaligned")
"""Memory orders: dense rows take the widest loads, unaligned ones the narrowest."""


@dataclass(frozen=True)
class EmulationReport:
    """What the emulated launches of one kernel on one instruction set showed.

    Attributes:
        suite: the samples and the invariants, with their errors and refusals.
        left_out: samples that are too large, and with ``lean`` those that others stand for, with their size.
        launches, instructions: how many there were; an instruction of one wave counts once.
        races: conflicting uses of LDS by two waves without a barrier between them.
        unknown: instructions of the compiled code that the emulator does not have, whether they were reached or not.
        ulp_noise: whether approximate instructions (rcp, rsq, exp and the like) were wrong by up to one ulp.
        mutation: single instructions dropped, and whether the samples noticed.
        warnings: what Triton's compiler warned about.
    """

    kernel: str
    arch: str
    suite: SuiteReport
    left_out: tuple[str, ...]
    launches: int
    instructions: int
    races: tuple[str, ...]
    unknown: tuple[str, ...]
    ulp_noise: bool
    mutation: MutationReport | None
    seconds: float
    warnings: tuple[str, ...] = ()

    @property
    def out_of_bounds(self) -> tuple[str, ...]:
        """The accesses outside of every tensor, and outside of LDS."""
        return tuple(fault for fault in self.suite.faults if "out of bounds" in fault)

    @property
    def faults(self) -> tuple[str, ...]:
        """All that is wrong, a sentence each. A surviving mutant is no fault."""
        return (*self.suite.faults, *self._others())

    @property
    def grouped_faults(self) -> tuple[str, ...]:
        """The same, where equal faults of several samples are one sentence."""
        return (*self.suite.grouped_faults, *self._others())

    def _others(self) -> tuple[str, ...]:
        found: list[str] = []
        found += [f"{self.kernel}, {self.arch}: race in LDS: {race}" for race in self.races]
        found += [f"{self.kernel}, {self.arch}: unknown instruction: {text}" for text in self.unknown]
        if self.suite.ran and not self.launches and not self.suite.faults:
            found.append(
                f"{self.kernel}, {self.arch}: nothing was launched: no sample has any rows, or it is no Triton"
            )
        return tuple(found)


def rows(contract: Contract, sample: Sample) -> int:
    """Tokens times heads of a sample, a measure of what emulating it costs."""
    axes = sample_query(contract, sample, torch.float32).axes
    return axes.get("T", axes.get("B", 1)) * axes.get("H", 1)


class Affordable:
    """The choice of samples: those of at most ``most`` rows, less those that others stand for.

    Args:
        keep: ``all`` of them; without those ``between`` two ordinary ones of their kind, of which one is smaller and
            one is larger; or of each kind only the two ``ends`` and one adversarial sample.
    """

    def __init__(self, op: str, most: int, keep: Literal["all", "between", "ends"] = "all") -> None:
        self._contracts, self.most = op_contracts(op), most
        self._spared = set[tuple[int, str]]()
        if keep != "all":
            kinds: dict[object, list[tuple[int, int, Sample]]] = {}
            for number, contract in enumerate(self._contracts):
                for sample in contract_samples(contract, torch.float32):
                    size = rows(contract, sample)
                    if 0 < size <= most:
                        kind = number, _kind(contract, sample, sizes=keep == "between")
                        kinds.setdefault(kind, []).append((size, number, sample))
            choice = _between if keep == "between" else _beside_the_ends
            self._spared = {(number, s.name) for kind in kinds.values() for _, number, s in choice(kind)}

    def __call__(self, sample: Sample) -> bool:
        number, contract = next((n, c) for n, c in enumerate(self._contracts) if set(sample.args) <= set(c.inputs))
        return rows(contract, sample) <= self.most and (number, sample.name) not in self._spared

    def left_out(self) -> tuple[str, ...]:
        """The samples that are not taken, with their size."""
        found: list[str] = []
        for number, contract in enumerate(self._contracts):
            for sample in contract_samples(contract, torch.float32):
                size = rows(contract, sample)
                if size > self.most:
                    found.append(f"'{sample.name}' ({size} rows)")
                elif (number, sample.name) in self._spared:
                    found.append(f"'{sample.name}' ({size} rows, between others of its kind)")
        return tuple(found)


_COUNTS = ("T", "B", "S", "N")
"""Axes that count tokens, requests, slots and rows of a record: they change the grid and the loops, not the code."""
_Sized = tuple[int, int, Sample]
"""(rows, number of the contract, sample)."""


def _kind(contract: Contract, sample: Sample, sizes: bool) -> tuple[object, ...]:
    """What calls have in common that differ in numbers and counts alone: the phase, whether there are drafts, and which
    tensors there are; with ``sizes`` also the other sizes, and whether the gate has a bound."""
    query = sample_query(contract, sample, torch.float32)
    axes = {name: n for name, n in query.axes.items() if sizes and name not in _COUNTS}
    present = tuple(path for path, _ in tensors(sample.args))
    return query.phase, query.query_tokens > 1, tuple(axes.items()), present


def _between(kind: list[_Sized]) -> list[_Sized]:
    """The ordinary samples of a kind that are neither the smallest nor the largest ones."""
    ordinary = [item for item in kind if not item[2].adversarial]
    sizes = [size for size, _, _ in ordinary]
    return [item for item in ordinary if min(sizes) < item[0] < max(sizes)]


def _beside_the_ends(kind: list[_Sized]) -> list[_Sized]:
    """All samples of a kind but one smallest and one largest ordinary one, and one largest adversarial one."""
    kept: list[_Sized] = []
    ordinary = [item for item in kind if not item[2].adversarial]
    adversarial = [item for item in kind if item[2].adversarial]
    if ordinary:
        kept += [min(ordinary, key=_size), max(reversed(ordinary), key=_size)]
    if adversarial:
        kept.append(max(reversed(adversarial), key=_size))
    return [item for item in kind if not any(item is other for other in kept)]


def _size(item: _Sized) -> int:
    return item[0]


@contextmanager
def exact_bounds() -> Iterator[None]:
    """Guarded tensors lie in memory of their own size: canaries beside them would hide reads beyond their ends."""
    with mock.patch.multiple(memory, MIN_BORDER_BYTES=0, MAX_BORDER_BYTES=0):
        yield


def run_emulated(
    spec: KernelSpec,
    kernels: Iterable[KernelSpec],
    arch: str,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    variants: Sequence[Variant] = VARIANTS,
    max_rows: int = MAX_ROWS,
    mutate: int = 0,
    seed: int = 0,
    ulp_noise: bool = False,
    timeout_s: float = PART_S,
    lean: bool = False,
) -> EmulationReport:
    """Runs the small samples and the invariants of a Triton kernel's contract on ``gfx942`` or ``gfx950`` in emulation.

    Args:
        kernels: where the parts of a composite come from.
        dtypes: of the activations; those that the record refuses are reported as refused.
        max_rows: larger samples (tokens times heads) are left out and named.
        mutate: how many single instructions to drop, one at a time; 0 drops none.
        seed: which ones. They are dropped under the samples of the first dtype, and only where all is well before.
        ulp_noise: approximate instructions are wrong by up to one ulp, as hardware may be.
        timeout_s: seconds for all samples together, mutation aside.
        lean: for a run of all kernels at once. Ordinary samples that lie between a smaller and a larger one of their
            kind are left out: they run the same machine code. In the further dtypes and memory orders each kind is its
            smallest and its largest sample and an adversarial one. Invariants are checked on small calls, and not of
            ops with phases: they compare whole runs with runs in parts, of sizes that are compiled for them alone. No
            call is repeated: the emulator takes waves in a fixed order, so it could only give the same bits.
    """
    begin, known = time.perf_counter(), tuple(kernels)
    choice = Affordable(spec.op, max_rows, "between" if lean else "all")
    # What the record admits comes first: the first dtype takes the large samples.
    dtypes = sorted(dtypes, key=lambda dtype: not admits_dtype(spec, dtype_name(dtype)))
    budget, mutation = Budget(LONG_CASE_S, timeout_s), None
    with caught() as said:
        suite, launches = _run(spec, known, arch, dtypes, variants, choice, budget, lean, ulp_noise=ulp_noise)
        if mutate and suite.ran and not suite.faults:
            mutation = _mutated(spec, known, arch, suite, mutate, seed)
    sys.stderr.write(said.others())
    return EmulationReport(
        kernel=spec.name,
        arch=arch,
        suite=suite,
        left_out=choice.left_out(),
        launches=len(launches),
        instructions=sum(launch.instructions for launch in launches),
        races=tuple(dict.fromkeys(race for launch in launches for race in launch.races)),
        unknown=tuple(dict.fromkeys(text for launch in launches for text in launch.unknown.values())),
        ulp_noise=ulp_noise,
        mutation=mutation,
        seconds=time.perf_counter() - begin,
        warnings=said.warnings(),
    )


def _run(
    spec: KernelSpec,
    kernels: tuple[KernelSpec, ...],
    arch: str,
    dtypes: Sequence[torch.dtype],
    variants: Sequence[Variant],
    samples: Affordable,
    budget: Budget,
    lean: bool,
    **options: Any,
) -> tuple[SuiteReport, list[LaunchReport]]:
    """All samples in the first dtype and memory order; the small ones in the other dtypes, and in the other orders.

    The invariants come with the first: a wave that stores a number in place before another one has read it is seen by
    no check of LDS, and samples need not see it either.
    """
    most_again = min(samples.most, MAX_ROWS_AGAIN)
    small = Affordable(spec.op, most_again, "ends" if lean else "all")
    calls = Affordable(spec.op, min(samples.most, MAX_ROWS_OF_CALLS) if lean else samples.most)
    asked = [
        (dtypes[:1], variants[:1], samples, False if lean and OPS[spec.op].phased else calls),
        (dtypes[1:], variants[:1], small, False),
        (dtypes[:1], variants[1:], small, False),
    ]
    with exact_bounds(), emulate(arch, **options) as launches:
        first, second, third = (
            run_suite(
                spec, kernels, target=platform_target(arch), dtypes=tuple(types), samples=choice, variants=orders,
                invariants=invariants, budget=budget, repeat=not lean,
            )
            for types, orders, choice, invariants in asked
        )  # fmt: skip
    return SuiteReport(spec.name, (*first.cases, *second.cases, *third.ran)), list(launches)


def _mutated(
    spec: KernelSpec,
    kernels: tuple[KernelSpec, ...],
    arch: str,
    suite: SuiteReport,
    count: int,
    seed: int,
) -> MutationReport:
    """Drops instructions under the samples that ran in one dtype; the first one that fails ends the run of a mutant."""
    name = suite.ran[0].dtype
    ran = (case for case in suite.ran if case.dtype == name and case.variant != INVARIANT)
    cases = dict.fromkeys((case.sample, case.variant) for case in ran)
    target, dtype = platform_target(arch), getattr(torch, name)

    def run() -> None:
        with exact_bounds():
            for wanted, variant in cases:
                run_suite(
                    spec, kernels, target=target, dtypes=(dtype,), invariants=False, repeat=False,
                    samples=partial(_is_named, wanted), variants=(cast(Variant, variant),),
                ).check()  # fmt: skip

    return drop_instructions(run, arch=arch, count=count, seed=seed)


def _is_named(name: str, sample: Sample) -> bool:
    return sample.name == name
