"""Mutation: drop one instruction at a time and see whether the checks of a test notice.

A missed mutant is an instruction without effect on what the test looks at: a gap in the samples, or an instruction that
these inputs do not need.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from k3port.testing.amd_isa.core import EmuError, Step, nothing
from k3port.testing.amd_isa.execute import MAX_INSTRUCTIONS, HangError
from k3port.testing.amd_isa.launch import LaunchReport, emulate, observed
from k3port.testing.amd_isa.program import Program
from k3port.testing.amd_isa.wave import Wave

WITHOUT_EFFECT = (
    "s_nop", "s_waitcnt", "s_endpgm", "s_setprio", "s_branch", "s_sched", "s_sleep", "v_nop", "ds_nop", "buffer_wbl2",
    "buffer_inv",
)  # fmt: skip
"""Never dropped: they do nothing here (a wait only for direct-to-LDS copies), or dropping them says nothing."""
MISSED = "missed"


@dataclass(frozen=True)
class Mutant:
    """One dropped instruction. ``outcome``: assertion, emulator error, race, hang, exception, or missed."""

    kernel: str
    index: int
    text: str
    """Instruction and source line."""
    outcome: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kernel} [{self.index}] {self.text}"


@dataclass(frozen=True)
class MutationReport:
    """All mutants of a run; ``candidates`` is how many instructions could have been dropped."""

    arch: str
    mutants: tuple[Mutant, ...]
    candidates: int

    @property
    def count(self) -> int:
        return len(self.mutants)

    @property
    def noticed(self) -> int:
        return self.count - len(self.missed)

    @property
    def missed(self) -> tuple[Mutant, ...]:
        return tuple(m for m in self.mutants if m.outcome == MISSED)

    @property
    def outcomes(self) -> dict[str, int]:
        return dict(Counter(m.outcome for m in self.mutants))

    def __str__(self) -> str:
        ways = ", ".join(f"{n} {outcome}" for outcome, n in sorted(self.outcomes.items()))
        head = f"{self.arch}: {self.noticed} of {self.count} dropped instructions noticed ({ways})"
        return "\n".join([head, *(f"  missed: {m}" for m in self.missed)])


class _Survey:
    """Remembers which instructions each program executes, its longest wave and its races."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self.executed: dict[str, set[int]] = {}
        self.longest: dict[str, int] = {}
        self.races: dict[str, set[str]] = {}

    def code(self, program: Program) -> Sequence[Step]:
        self.programs[program.digest] = program
        seen = self.executed.setdefault(program.digest, set())

        def marked(pc: int, step: Step) -> Step:
            def run(w: Wave) -> int | None:
                seen.add(pc)
                return step(w)

            return run

        return [marked(pc, step) for pc, step in enumerate(program.code)]

    def limit(self, program: Program) -> int:
        return MAX_INSTRUCTIONS

    def done(self, program: Program, report: LaunchReport) -> None:
        d = program.digest
        self.longest[d] = max(self.longest.get(d, 0), report.longest)
        self.races.setdefault(d, set()).update(report.races)

    def candidates(self) -> list[tuple[Program, int]]:
        """Executed instructions behind the prologue that loads what newer firmware preloads."""
        found = []
        for digest, program in self.programs.items():
            lines, first = program.kernel.instructions, 0
            if program.kernel.settings.get("user_sgpr_kernarg_preload_length"):
                first = next((k + 1 for k, inst in enumerate(lines) if inst.op == "s_branch"), 0)
            for pc in sorted(self.executed[digest]):
                if pc >= first and not lines[pc].op.startswith(WITHOUT_EFFECT):
                    found.append((program, pc))
        return found


class _Dropped:
    """Runs one program without one instruction."""

    def __init__(self, survey: _Survey, program: Program, pc: int):
        self.survey, self.digest, self.pc = survey, program.digest, pc
        self.launched = False
        self.races: list[str] = []

    def code(self, program: Program) -> Sequence[Step]:
        code = list(program.code)
        if program.digest == self.digest:
            self.launched = True
            code[self.pc] = nothing
        return code

    def limit(self, program: Program) -> int:
        return 4 * self.survey.longest.get(program.digest, MAX_INSTRUCTIONS) + 1000

    def done(self, program: Program, report: LaunchReport) -> None:
        self.races += set(report.races) - self.survey.races.get(program.digest, set())


def _try(run: Callable[[], object], arch: str, seed: int, dropped: _Dropped) -> tuple[str, str]:
    """(outcome, detail) of one mutant."""
    try:
        with torch.random.fork_rng(devices=[]), emulate(arch), observed(dropped):
            torch.manual_seed(seed)
            run()
    except AssertionError as e:
        return "assertion", str(e)
    except HangError as e:
        return "hang", str(e)
    except EmuError as e:
        return "emulator error", str(e)
    except Exception as e:  # a wrong result may break the test's own code in any way
        return "exception", repr(e)
    if not dropped.launched:
        raise EmuError("the kernels launched differ from run to run: a mutation run needs a repeatable test")
    return ("race", dropped.races[0]) if dropped.races else (MISSED, "")


def mutate(run: Callable[[], object], *, arch: str, count: int, seed: int = 0) -> MutationReport:
    """Drops ``count`` instructions, one at a time, and counts what ``run`` notices.

    ``run`` launches kernels on CPU tensors and checks their results, with AssertionError for wrong ones. It is called
    inside :func:`emulate` (and may enter it again), first unchanged, then once per mutant, always with torch's random
    numbers from ``seed``. The mutants are drawn over all kernels that it launches, from the executed instructions.
    New LDS races, errors of the emulator and runs four times as long as before count as noticed.

    Raises:
        AssertionError, EmuError: the unchanged kernels fail already.
    """
    survey = _Survey()
    with torch.random.fork_rng(devices=[]), emulate(arch), observed(survey):
        torch.manual_seed(seed)
        run()
    candidates = survey.candidates()
    if not candidates:
        raise EmuError("the run launched no kernel")
    chosen = random.Random(seed).sample(candidates, min(count, len(candidates)))
    mutants = []
    for program, pc in chosen:
        outcome, detail = _try(run, arch, seed, _Dropped(survey, program, pc))
        mutants.append(Mutant(program.name, pc, str(program.kernel.instructions[pc]), outcome, detail))
    return MutationReport(arch, tuple(mutants), len(candidates))
