"""What each part of a test run took, by folder: the parts have budgets of their own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARTS = {
    "tests/interpreter/": "interpreter",
    "tests/amd_isa/": "emulator",
    "tests/emulator/": "emulator",
    "tests/xcompile/": "compile",
    "tests/gpu/": "gpu",
}
OTHER = "unit and parity"
NOTE = (
    "what a test starts in processes of its own counts for the test: tests/testing, tests/cli and tests/examples "
    "interpret, emulate and compile too, and that is in unit and parity"
)


def part_of(nodeid: str) -> str:
    return next((part for folder, part in PARTS.items() if nodeid.startswith(folder)), OTHER)


def part_times(reports: Iterable[Any]) -> list[str]:
    """One line per part, longest first: tests, seconds summed over all processes, and from the first start to the last
    end. Reports of one test are its setup, call and teardown.
    """
    tests: dict[str, set[str]] = {}
    seconds: dict[str, float] = {}
    span: dict[str, tuple[float, float]] = {}
    for report in reports:
        nodeid, duration = getattr(report, "nodeid", ""), getattr(report, "duration", None)
        if duration is None or "::" not in nodeid:
            continue
        part = part_of(nodeid)
        tests.setdefault(part, set()).add(nodeid)
        seconds[part] = seconds.get(part, 0.0) + duration
        start, stop = getattr(report, "start", 0.0), getattr(report, "stop", 0.0)
        first, last = span.get(part, (start, stop))
        span[part] = min(first, start), max(last, stop)
    lines = [
        f"{part}: {len(tests[part])} tests, {seconds[part]:.1f} s of work, {span[part][1] - span[part][0]:.1f} s on the clock"
        for part in sorted(tests, key=lambda part: -seconds[part])
    ]
    return [*lines, NOTE] if lines else []


def install_time(environment: Path) -> list[str]:
    """What ``make`` noted of the installation into a virtual environment; nothing where it did not install it."""
    note = environment / "install-seconds"
    if not note.is_file():
        return []
    return [f"installation: {int(note.read_text(encoding='utf-8'))} s, when make last did it"]
