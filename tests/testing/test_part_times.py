"""The closing table of a test run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from part_times import NOTE, install_time, part_of, part_times


def report(nodeid: str, start: float, duration: float) -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, start=start, stop=start + duration, duration=duration)


def test_parts_are_folders() -> None:
    assert part_of("tests/interpreter/test_a.py::b") == "interpreter"
    assert part_of("tests/emulator/test_a.py::b") == "emulator"
    assert part_of("tests/xcompile/test_a.py::b") == "compile"
    assert part_of("tests/ops/test_a.py::b") == "unit and parity"


def test_durations_are_summed_and_the_clock_is_from_first_to_last() -> None:
    reports = [
        report("tests/ops/test_a.py::one", 10.0, 2.0),
        report("tests/ops/test_a.py::one", 12.0, 0.5),
        report("tests/ops/test_a.py::two", 11.0, 1.0),
        report("tests/emulator/test_a.py::three", 11.0, 7.25),
        SimpleNamespace(nodeid="", message="a warning"),
        SimpleNamespace(nodeid="tests/ops", duration=3.0),
    ]
    assert part_times(reports) == [
        "emulator: 1 tests, 7.2 s of work, 7.2 s on the clock",
        "unit and parity: 2 tests, 3.5 s of work, 2.5 s on the clock",
        NOTE,
    ]
    assert part_times([]) == []


def test_the_installation_is_told_where_make_did_it(tmp_path: Path) -> None:
    assert install_time(tmp_path) == []
    (tmp_path / "install-seconds").write_text("83\n")
    assert install_time(tmp_path) == ["installation: 83 s, when make last did it"]
