"""Speed and memory of one checkpoint on this CPU: ``python tests/performance/measure_cpu.py FOLDER [--markdown]``.

Prints prefill and single-stream decode rates (median and best of the repetitions), peak memory, and where the time of a
decode step goes. Greedy, ids drawn at random, ends ignored: the work is the same in every run.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from k3port.runtime.request import SamplingParams
from k3port.runtime.runtime import Runtime


@dataclass(frozen=True)
class Rate:
    """Tokens per second over the repetitions."""

    median: float
    best: float


def prompt_ids(runtime: Runtime, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, runtime.config.vocab_size // 2, (length,), generator=generator).tolist()


def _rate(tokens: int, run: Callable[[], float], repeats: int) -> Rate:
    seconds = [run() for _ in range(repeats + 1)][1:]  # the first run warms up
    return Rate(tokens / statistics.median(seconds), tokens / min(seconds))


def prefill_rate(runtime: Runtime, length: int, repeats: int = 7) -> Rate:
    """Prompt tokens per second until the first token is there."""
    ids = prompt_ids(runtime, length)

    def run() -> float:
        start = time.perf_counter()
        runtime.generate([ids], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        return time.perf_counter() - start

    return _rate(length, run, repeats)


def decode_rate(runtime: Runtime, context: int = 64, tokens: int = 128, repeats: int = 5) -> Rate:
    """Tokens per second of one request after its first token."""
    ids = prompt_ids(runtime, context)

    def run() -> float:
        stream = runtime.stream([ids], SamplingParams(temperature=0, max_tokens=tokens + 1, ignore_eos=True))
        next(stream)
        start = time.perf_counter()
        for _ in stream:
            pass
        return time.perf_counter() - start

    return _rate(tokens, run, repeats)


def profile_decode(runtime: Runtime, steps: int = 200) -> list[tuple[str, float]]:
    """Share of the time of a decode step by function, the largest first."""
    stream = runtime.stream([prompt_ids(runtime, 64)], SamplingParams(0 + steps + 20, 0.0, ignore_eos=True))
    for _ in range(10):
        next(stream)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        next(stream)
    profiler.disable()
    stream.close()
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    total = sum(row[2] for row in stats.values())
    names = {key: f"{Path(key[0]).name}:{key[2]}" if key[1] else key[2].split(" of ")[0] for key in stats}
    shares = [(names[key].strip("{<>}"), row[2] / total) for key, row in stats.items()]
    return sorted(shares, key=lambda item: -item[1])[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    runtime = Runtime.load(args.folder)
    loaded = time.perf_counter() - start
    rows = [(f"prefill {n} tokens", prefill_rate(runtime, n)) for n in (64, 512)]
    rows += [(f"decode after {n} tokens", decode_rate(runtime, n)) for n in (64, 1024)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{args.folder.name}, {runtime.plan.dtype}, torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"threads {runtime.threads.prefill}/{runtime.threads.decode}, loaded in {loaded:.2f} s, peak {peak:.0f} MiB\n"
    )
    print("| what | median tok/s | best tok/s |\n|---|---|---|")
    for name, rate in rows:
        print(f"| {name} | {rate.median:,.0f} | {rate.best:,.0f} |")
    print("\n| decode step | share |\n|---|---|")
    for name, share in profile_decode(runtime):
        print(f"| `{name}` | {share:.1%} |")


if __name__ == "__main__":
    main()
