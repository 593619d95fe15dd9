"""The mutation run: most dropped instructions are noticed, blind tests notice nothing but crashes, hangs end."""

from __future__ import annotations

import amd_needs  # noqa: F401
import pytest
import torch
import triton
import triton.language as tl
from amd_checks import CHECKS

from k3port.testing.amd_isa import EmuError, MutationReport, emulate, mutate


def checked(name: str, arch: str):
    def run() -> None:
        error, tolerance = CHECKS[name](arch)
        assert error <= tolerance, f"relative error {error}"

    return run


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize(("name", "least"), [("rowsum", 24), ("dot_bf16_32", 24)])
def test_most_dropped_instructions_are_noticed(name: str, least: int, arch: str) -> None:
    report = mutate(checked(name, arch), arch=arch, count=40, seed=1)
    assert report.count == 40 <= report.candidates
    assert report.noticed >= least, str(report)
    assert report.noticed + len(report.missed) == report.count
    assert all(m.text.endswith(")") and ".py:" in m.text for m in report.mutants)
    dropped = {m.text.split()[0] for m in report.mutants}
    assert not dropped & {"s_endpgm", "s_waitcnt", "s_nop", "s_branch"}
    assert report.outcomes.get("assertion", 0) > 10


def test_the_same_seed_drops_the_same() -> None:
    first, second = (mutate(checked("rowsum", "gfx950"), arch="gfx950", count=6, seed=3) for _ in range(2))
    assert isinstance(first, MutationReport)
    assert first == second
    other = mutate(checked("rowsum", "gfx950"), arch="gfx950", count=6, seed=4)
    assert [m.index for m in other.mutants] != [m.index for m in first.mutants]


def test_all_kernels_of_a_run_are_drawn_from() -> None:
    def run() -> None:
        with emulate("gfx942"):  # its own context does no harm
            checked("rowsum", "gfx942")()
            checked("collatz", "gfx942")()

    report = mutate(run, arch="gfx942", count=25)
    assert {m.kernel for m in report.mutants} == {"rowsum", "collatz"}


def test_a_test_that_looks_at_nothing_misses_the_numbers() -> None:
    blind = mutate(lambda: CHECKS["rowsum"]("gfx950"), arch="gfx950", count=40, seed=1)
    sharp = mutate(checked("rowsum", "gfx950"), arch="gfx950", count=40, seed=1)
    assert "assertion" not in blind.outcomes
    assert blind.noticed < sharp.noticed - 10
    assert "missed: rowsum [" in str(blind)
    assert ".py:" in str(blind.missed[0])


@triton.jit
def chase(x, o):
    n = tl.load(x)
    steps = 0
    while n != 0:
        n = tl.load(x + n)
        steps += 1
    tl.store(o, steps)


def test_mutants_that_hang_are_noticed() -> None:
    """Without the load in it the loop never ends."""

    def run() -> None:
        x, o = torch.tensor([3, 0, 1, 2], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        chase[(1,)](x, o, num_warps=1)
        assert o.item() == 3

    report = mutate(run, arch="gfx942", count=1000)
    assert report.count == report.candidates < 100
    assert report.outcomes.get("hang", 0) >= 1, str(report)


def test_a_run_that_fails_unchanged_is_an_error() -> None:
    def run() -> None:
        checked("collatz", "gfx942")()
        raise AssertionError("wrong from the start")

    with pytest.raises(AssertionError, match="from the start"):
        mutate(run, arch="gfx942", count=3)
    with pytest.raises(EmuError, match="launched no kernel"):
        mutate(lambda: None, arch="gfx942", count=3)


def test_a_run_that_is_not_repeatable_is_an_error() -> None:
    calls: list[int] = []

    def run() -> None:
        calls.append(1)
        if len(calls) == 1:
            checked("collatz", "gfx942")()

    with pytest.raises(EmuError, match="repeatable"):
        mutate(run, arch="gfx942", count=3)
