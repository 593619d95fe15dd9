"""From measured points to entries of a configuration file, and the file before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3port.backends.portable.tuning import Entry
from k3port.errors import K3Error
from k3port.testing.bench.config_file import (
    NewEntry,
    Tuned,
    config_text,
    merge_points,
    save_config,
    updated_file,
)
from k3port.testing.bench.run import CONFIGS

MEASURED = {"device": "NVIDIA H200", "torch": "2.11", "triton": "3.6.0", "date": "2026-12-01"}


def point(config: int, us: float = 1.0, **axes: int) -> Tuned:
    return Tuned(axes, {"num_warps": config}, us)


def found(entries: list[NewEntry], **axes: int) -> int | None:
    """What the launcher would take."""
    for entry in entries:
        if Entry(("sm_90",), entry.when, entry.config).fits("sm_90", axes):
            return entry.config["num_warps"]
    return None


def test_entries_hold_up_to_the_middle_between_points() -> None:
    entries = merge_points([point(1, T=1024), point(2, T=4096), point(8, T=16384)])
    assert [entry.when["T"] for entry in entries] == [(513, 2048), (2049, 8192), (8193, None)]
    assert [found(entries, T=t) for t in (512, 513, 2048, 2049, 10**6)] == [None, 1, 1, 2, 8]


def test_a_size_that_is_the_only_one_holds_within_a_factor_of_two() -> None:
    (entry,) = merge_points([point(4, D=7168)])
    assert entry.when == {"D": (3585, 14335)}
    (flag,) = merge_points([point(4, wide=0)])
    assert flag.when == {"wide": (0, 0)}
    (one,) = merge_points([point(4, most=1)])
    assert one.when == {"most": (1, 1)}


def test_neighbours_with_one_configuration_become_one_entry() -> None:
    entries = merge_points([point(4, 1.0, T=1024), point(4, 2.0, T=4096), point(8, 3.0, T=16384)])
    assert [(entry.when["T"], entry.config["num_warps"]) for entry in entries] == [((513, 8192), 4), ((8193, None), 8)]
    assert entries[0].microseconds == {"T=1024": 1.0, "T=4096": 2.0}
    grid = [point(4, H=heads, T=tokens) for heads in (12, 96) for tokens in (1, 64)]
    (whole,) = merge_points(grid)
    assert whole.when == {"H": (7, None), "T": (1, None)}


@given(
    st.dictionaries(
        st.tuples(st.sampled_from((0, 1, 12, 13, 96)), st.sampled_from((1, 2, 64, 1000, 65536))),
        st.sampled_from((1, 2, 4)),
        min_size=1,
    )
)
def test_every_measured_point_finds_its_configuration(points: dict[tuple[int, int], int]) -> None:
    entries = merge_points([point(config, H=heads, T=tokens) for (heads, tokens), config in points.items()])
    for (heads, tokens), config in points.items():
        assert found(entries, H=heads, T=tokens) == config
    assert sum(len(entry.microseconds) for entry in entries) == len(points)


OLD: dict[str, Any] = {
    "kernel": "toy",
    "entries": [
        {"archs": ["sm_90"], "when": {"T": [1, 1]}, "config": {"num_warps": 1}, "measured": None},
        {"archs": ["sm_90", "gfx950"], "when": {"T": [600, 1500]}, "config": {"num_warps": 2}, "measured": None},
        {"archs": ["gfx942"], "when": {}, "config": {"num_warps": 3}, "measured": None},
        {"archs": ["sm_90"], "when": {"T": [600, None]}, "config": {"num_warps": 4}, "measured": None},
        {"archs": ["*"], "when": {"T": [2, 8]}, "config": {"num_warps": 5}, "measured": None},
        {"archs": ["*"], "when": {}, "config": {"num_warps": 6}, "measured": None},
    ],
}


def test_other_entries_stay() -> None:
    new = merge_points([point(8, 2.5, T=1024)])
    data = updated_file(OLD, "sm_90", new, MEASURED)
    assert data["entries"][0] == {
        "archs": ["sm_90"],
        "when": {"T": [513, 2047]},
        "config": {"num_warps": 8},
        "measured": {**MEASURED, "us": {"T=1024": 2.5}},
    }
    kept = [(entry["archs"], entry["config"]["num_warps"]) for entry in data["entries"][1:]]
    # The entry that is covered loses this architecture, not the other one; those beside and beyond it stay.
    assert kept == [(["sm_90"], 1), (["gfx950"], 2), (["gfx942"], 3), (["sm_90"], 4), (["*"], 5), (["*"], 6)]


def test_what_was_tuned_before_is_replaced() -> None:
    once = updated_file(OLD, "sm_90", merge_points([point(8, T=1024)]), MEASURED)
    twice = updated_file(once, "sm_90", merge_points([point(4, T=1024)]), MEASURED)
    assert [entry["config"]["num_warps"] for entry in twice["entries"]] == [4, 1, 2, 3, 4, 5, 6]


def test_neighbours_cover_together_what_none_covers_alone() -> None:
    once = updated_file(OLD, "sm_90", merge_points([point(8, T=64)]), MEASURED)
    assert once["entries"][0]["when"] == {"T": [33, 127]}
    finer = [point(n, T=size) for n, size in ((1, 32), (2, 64), (4, 128))]
    twice = updated_file(once, "sm_90", merge_points(finer), MEASURED)
    assert once["entries"][0] not in twice["entries"]


def test_the_text_has_one_entry_per_line() -> None:
    text = config_text(OLD)
    assert json.loads(text) == OLD
    assert len([line for line in text.splitlines() if line.startswith('  {"archs"')]) == len(OLD["entries"])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_files_of_this_project_are_written_as_they_are(path: Path) -> None:
    """Saving changes the lines of new entries only."""
    text = path.read_text(encoding="utf-8")
    assert config_text(json.loads(text)) == text


def test_saving_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_text(config_text(OLD))
    save_config(path, "sm_90", merge_points([point(8, T=1024)]), MEASURED)
    assert json.loads(path.read_text()) == updated_file(OLD, "sm_90", merge_points([point(8, T=1024)]), MEASURED)
    assert [file.name for file in tmp_path.iterdir()] == ["toy.json"]


@pytest.mark.parametrize(
    "content", ["", "{}", '{"kernel": "toy", "entries": []}', json.dumps({**OLD, "entries": OLD["entries"][:1]})]
)
def test_a_file_that_is_not_one_stays(tmp_path: Path, content: str) -> None:
    path = tmp_path / "toy.json"
    path.write_text(content)
    with pytest.raises(K3Error, match="cannot be updated"):
        save_config(path, "sm_90", merge_points([point(8, T=1024)]), MEASURED)
    assert path.read_text() == content
