"""Statistics, order of samples, rotation, and that eager and captured runs stay apart."""

from __future__ import annotations

import pytest
from bench_parts import SHORT, FakeClock
from hypothesis import given
from hypothesis import strategies as st

from k3port.testing.bench.clock import CannotCapture, CpuClock
from k3port.testing.bench.timing import Settings, Subject, measure, summarize


def test_statistics_are_medians_and_quartiles_in_microseconds() -> None:
    timing = summarize([5e-6, 1e-6, 2e-6, 4e-6, 3e-6])
    assert (timing.median, timing.low, timing.high) == pytest.approx((3, 2, 4))
    assert (timing.least, timing.most, timing.samples) == pytest.approx((1, 5, 5))
    assert timing.spread == pytest.approx(2 / 3)
    assert summarize([7e-6]).median == pytest.approx(7)
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


@given(st.lists(st.floats(1e-7, 1.0), min_size=1, max_size=40))
def test_statistics_are_ordered(seconds: list[float]) -> None:
    timing = summarize(seconds)
    assert timing.least <= timing.low <= timing.median <= timing.high <= timing.most


def test_one_slow_sample_moves_nothing() -> None:
    assert summarize([1e-6] * 9 + [1.0]).median == pytest.approx(1)


def subjects(clock: FakeClock, copies: int = 1) -> list[Subject]:
    return [Subject(name, tuple(clock.call(name, copy) for copy in range(copies))) for name in ("a", "b")]


def test_samples_of_all_subjects_take_turns() -> None:
    clock = FakeClock({"a": 1e-3, "b": 2e-3})
    measured = measure(subjects(clock), clock, Settings(rounds=4, sample_seconds=1e-3, warmup_seconds=0))
    rounds = [sample[0] for sample in clock.samples if len(sample) == 1][:8]
    assert rounds == ["a0", "b0"] * 4
    assert [found.eager.median for found in measured] == pytest.approx([1000, 2000])
    assert [found.eager.samples for found in measured] == [4, 4]


def test_short_calls_are_repeated_and_divided() -> None:
    clock = FakeClock({"a": 1e-5, "b": 1e-3})
    a, b = measure(subjects(clock), clock, Settings(rounds=3, sample_seconds=1e-3, warmup_seconds=0))
    assert (a.eager.median, b.eager.median) == pytest.approx((10, 1000))
    assert max(len(sample) for sample in clock.samples) == 100


def test_copies_take_turns_over_all_samples() -> None:
    clock = FakeClock({"a": 4e-4, "b": 4e-4}, {"a": 4e-4, "b": 4e-4})
    measure(subjects(clock, copies=3), clock, Settings(rounds=5, sample_seconds=1e-3, warmup_seconds=0))
    batches = [sample for sample in clock.samples if sample[0].startswith("a") and len(sample) == 3]
    eager = [call for sample in batches if not sample[0].endswith("*") for call in sample]
    assert eager == ["a0", "a1", "a2"] * 5
    # A graph has whole turns: no copy comes twice in a row when it is replayed.
    assert all(sample == ["a0*", "a1*", "a2*"] for sample in batches if sample[0].endswith("*"))
    assert any(sample[0].endswith("*") for sample in batches)


def test_eager_and_captured_are_kept_apart() -> None:
    clock = FakeClock({"a": 1e-4, "b": 1e-4}, {"a": 1e-5, "b": 2e-5})
    a, b = measure(subjects(clock), clock, SHORT)
    assert a.captured is not None
    assert b.captured is not None
    assert (a.eager.median, a.captured.median) == pytest.approx((100, 10))
    assert (b.eager.median, b.captured.median) == pytest.approx((100, 20))
    first_replay = next(i for i, sample in enumerate(clock.samples) if sample[0].endswith("*"))
    assert all(sample[0].endswith("*") for sample in clock.samples[first_replay:])


def test_what_cannot_be_captured_says_why() -> None:
    clock = FakeClock({"a": 1e-4, "b": 1e-4})
    a, _ = measure(subjects(clock), clock, SHORT)
    assert (a.captured, a.not_captured) == (None, "no graphs here")
    given = Subject("a", (clock.call("a"),), capturable=False, why_not="graph_safe is False")
    assert measure([given], FakeClock({"a": 1e-4}, {"a": 1e-5}), SHORT)[0].not_captured == "graph_safe is False"
    with pytest.raises(CannotCapture):
        CpuClock().capture([])


def test_host_time_waits_between_few_calls() -> None:
    clock = FakeClock({"a": 1e-4})
    measured = measure([Subject("a", (clock.call("a"),))], clock, Settings(rounds=8, sample_seconds=1e-4))
    assert measured[0].host.median == pytest.approx(50)
    assert measured[0].host.samples == 20


def test_the_cpu_clock_measures() -> None:
    clock = CpuClock()
    found = measure([Subject("sum", (lambda: sum(range(1000)),))], clock, SHORT)[0]
    assert found.eager.median > 0
    assert found.host.median > 0
    assert found.captured is None
