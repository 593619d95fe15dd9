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
from typing import Any, cast
from unittest import mock

import torch

from k3port.ops.contract import Contract, Sample
from k3port.oracle.spec import KernelSpec
from k3port.testing.amd_isa import LaunchReport, MutationReport, emulate
from k3port.testing.amd_isa import mutate as drop_instructions
from k3port.testing.contract import memory
from k3port.testing.contract.reference import contract_samples, dtype_name, op_contracts, sample_query
from k3port.testing.contract.variants import Variant
from k3port.testing.kernel_code import LONG_CASE_S, PART_S, Budget
from k3port.testing.subject import admits_dtype
from k3port.testing.suite import INVARIANT, SuiteReport, run_suite
from k3port.testing.targets import platform_target
from k3port.testing.xcompile.compiler import caught

DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32, torch.float16)
MAX_ROWS = 144
"""Most tokens times heads of a sample: an emulated wave takes 10 to 20 us per instruction. Two chunks of 64 and a tail
still fit; the larger samples run in the interpreter and on GPUs."""
MAX_ROWS_AGAIN = 40
"""The same for the other dtypes and memory orders, after the first dtype has taken every sample up to the limit above:
they change loads, stores and roundings, not the path through the kernel."""
VARIANTS: tuple[Variant, ...] = ("plain", "unaligned")
"""Memory orders: dense rows take the widest loads, unaligned ones the narrowest."""


@dataclass(frozen=True)
class EmulationReport:
    """What the emulated launches of one kernel on one instruction set showed.

    Attributes:
        suite: the samples and the invariants, with their errors and refusals.
        left_out: samples that are too large, with their size.
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
    """The choice of samples: those of at most ``most`` rows."""

    def __init__(self, op: str, most: int) -> None:
        self._contracts, self.most = op_contracts(op), most

    def __call__(self, sample: Sample) -> bool:
        contract = next(c for c in self._contracts if set(sample.args) <= set(c.inputs))
        return rows(contract, sample) <= self.most

    def left_out(self) -> tuple[str, ...]:
        """The samples that are too large, with their size."""
        found = ((c, s) for c in self._contracts for s in contract_samples(c, torch.float32))
        return tuple(f"'{s.name}' ({rows(c, s)} rows)" for c, s in found if rows(c, s) > self.most)


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
    """
    begin, known = time.perf_counter(), tuple(kernels)
    choice = Affordable(spec.op, max_rows)
    # What the record admits comes first: the first dtype takes the large samples.
    dtypes = sorted(dtypes, key=lambda dtype: not admits_dtype(spec, dtype_name(dtype)))
    budget, mutation = Budget(LONG_CASE_S, timeout_s), None
    with caught() as said:
        suite, launches = _run(spec, known, arch, dtypes, variants, choice, budget, ulp_noise=ulp_noise)
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
    **options: Any,
) -> tuple[SuiteReport, list[LaunchReport]]:
    """All samples in the first dtype and memory order; the small ones in the other dtypes, and in the other orders.

    The invariants come with the first: a wave that stores a number in place before another one has read it is seen by
    no check of LDS, and samples need not see it either.
    """
    small = Affordable(spec.op, min(samples.most, MAX_ROWS_AGAIN))
    asked = [
        (dtypes[:1], variants[:1], samples, samples),
        (dtypes[1:], variants[:1], small, False),
        (dtypes[:1], variants[1:], small, False),
    ]
    with exact_bounds(), emulate(arch, **options) as launches:
        first, second, third = (
            run_suite(
                spec, kernels, target=platform_target(arch), dtypes=tuple(types), samples=choice, variants=orders,
                invariants=invariants, budget=budget,
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
