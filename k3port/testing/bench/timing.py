"""Timings of several calls side by side: warm-up, rounds in turn, medians and their spread."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from k3port.testing.bench.clock import CannotCapture, Clock, Run

MAX_CALLS = 256
"""Most calls of one sample."""
HOST_CALLS = 10
"""Calls between two waits when the host's time is measured: few enough that the queue of the device is never full."""


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        rounds: samples of each call.
        sample_seconds: shortest sample; several calls make up one sample.
        warmup_seconds: for each call before anything is kept (at least two calls, which compile and load it).
    """

    rounds: int = 25
    sample_seconds: float = 1.5e-3
    warmup_seconds: float = 0.02


QUICK = Settings(rounds=7, sample_seconds=5e-4, warmup_seconds=0.005)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the samples, their quartiles and extremes."""

    median: float
    low: float
    high: float
    least: float
    most: float
    samples: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def summarize(seconds: Sequence[float]) -> Timing:
    """Statistics of samples in seconds, in microseconds.

    Raises:
        ValueError: there are no samples.
    """
    if not seconds:
        raise ValueError("no samples")
    ordered = sorted(second * 1e6 for second in seconds)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return Timing(statistics.median(ordered), low, high, ordered[0], ordered[-1], len(ordered))


@dataclass(frozen=True)
class Subject:
    """One thing to time: the same call on each copy of its buffers, which take turns.

    ``capturable`` False leaves the captured measurement out, for the reason in ``why_not``.
    """

    name: str
    calls: tuple[Run, ...]
    capturable: bool = True
    why_not: str = ""


@dataclass(frozen=True)
class Measured:
    """What the rounds showed for one subject; ``captured`` is None for the reason in ``not_captured``."""

    name: str
    eager: Timing
    captured: Timing | None
    host: Timing
    not_captured: str = ""


def measure(subjects: Sequence[Subject], clock: Clock, settings: Settings) -> list[Measured]:
    """Times all subjects in one process, one sample of each per round: A, B, A, B, ...

    Eager samples are calls as a program makes them; captured samples replay a graph of the same calls. All rounds of
    one kind come before the other kind. A slow drift of the clock rate meets all subjects of a round alike.
    """
    warm = [_warm_up(subject, clock, settings) for subject in subjects]
    eager = _rounds([_batch(s, n) for s, n in zip(subjects, warm, strict=True)], warm, clock, settings.rounds)
    host = [_host(subject, clock, settings) for subject in subjects]
    graphs: list[tuple[Run, int] | str] = [
        _graph(subject, calls, clock, settings) for subject, calls in zip(subjects, warm, strict=True)
    ]
    ready = [g for g in graphs if not isinstance(g, str)]
    replayed = iter(_rounds([g for g, _ in ready], [n for _, n in ready], clock, settings.rounds))
    return [
        Measured(
            subject.name,
            eager[i],
            None if isinstance(graph, str) else next(replayed),
            host[i],
            graph if isinstance(graph, str) else "",
        )
        for i, (subject, graph) in enumerate(zip(subjects, graphs, strict=True))
    ]


def _warm_up(subject: Subject, clock: Clock, settings: Settings) -> int:
    """Runs every copy, then as long as asked; the number of calls that fill one sample."""
    for call in subject.calls:
        call()
    clock.sync()
    once = max(clock.elapsed(_batch(subject, 2)) / 2, 1e-7)
    for _ in range(min(math.ceil(settings.warmup_seconds / once / 2), MAX_CALLS)):
        clock.elapsed(_batch(subject, 2))
    once = max(clock.elapsed(_batch(subject, 2)) / 2, 1e-7)
    return max(1, min(MAX_CALLS, math.ceil(settings.sample_seconds / once)))


def _batch(subject: Subject, calls: int) -> Run:
    """``calls`` calls, going on with the copy after the one that came last; results live until their copy's next."""
    turns = itertools.cycle(range(len(subject.calls)))
    kept: list[object] = [None] * len(subject.calls)

    def run() -> None:
        for _ in range(calls):
            turn = next(turns)
            kept[turn] = subject.calls[turn]()

    return run


def _host(subject: Subject, clock: Clock, settings: Settings) -> Timing:
    turns = itertools.cycle(subject.calls)
    seconds = []
    for _ in range(max(1, settings.rounds // 4)):
        clock.sync()
        for _ in range(HOST_CALLS):
            seconds.append(clock.host_time(next(turns)))
    return summarize(seconds)


def _graph(subject: Subject, calls: int, clock: Clock, settings: Settings) -> tuple[Run, int] | str:
    """A replay and the number of calls in it, or why there is none."""
    if not subject.capturable:
        return subject.why_not or "said not to be capturable"
    copies = len(subject.calls)
    # Whole turns through the copies, so that the next replay begins with the copy that was used longest ago.
    wanted = min(MAX_CALLS, max(calls, copies))
    turns = max(1, wanted // copies)
    try:
        replay = clock.capture(subject.calls * turns)
        clock.elapsed(replay)
        once = clock.elapsed(replay) / (copies * turns)
        # Calls that the host slowed down are faster here: a sample of them would be too short.
        more = min(MAX_CALLS // copies, math.ceil(settings.sample_seconds / max(once, 1e-7) / copies))
        if more > 2 * turns:
            turns = more
            replay = clock.capture(subject.calls * turns)
        for _ in range(2):
            clock.elapsed(replay)
    except CannotCapture as exc:
        return str(exc)
    return replay, copies * turns


def _rounds(runs: Sequence[Run], calls: Sequence[int], clock: Clock, rounds: int) -> list[Timing]:
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds):
        for i, run in enumerate(runs):
            seconds[i].append(clock.elapsed(run) / calls[i])
    return [summarize(column) for column in seconds]
