"""Plans of the published model on every platform, compared with reviewed files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared_data import shared

from k3port.model.config_file import load_config, parse_config
from k3port.testing import golden
from k3port.testing.published import published_k3_config

NAMES = list(golden.golden_names())


@pytest.mark.parametrize(("platform", "tp"), NAMES, ids=[f"{platform}-tp{tp}" for platform, tp in NAMES])
def test_a_plan_is_the_reviewed_one(platform: str, tp: int):
    begin = time.perf_counter()
    text = golden.golden_text(golden.golden_plan(platform, tp))
    assert time.perf_counter() - begin < 1
    path = golden.FOLDER / golden.golden_file(platform, tp)
    assert text == path.read_text(encoding="utf-8"), "review the change, then: python -m k3port.testing.golden"


def test_every_platform_has_its_files_and_no_other_file_is_there():
    expected = {golden.golden_file(platform, tp) for platform, tp in NAMES}
    assert {path.name for path in golden.FOLDER.iterdir()} == expected
    assert len(expected) == 5 * 14


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command on two plans and a folder of its own."""
    monkeypatch.setattr(golden, "FOLDER", tmp_path / "plans")
    monkeypatch.setattr(golden, "golden_names", lambda: [("b200", 8), ("cpu", 1)])
    return tmp_path / "plans"


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["golden", *args])
    return golden.main()


def test_one_command_updates_and_checks(few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert run(monkeypatch, "--check") == 1
    assert not few.exists()
    assert run(monkeypatch) == 0
    assert sorted(path.name for path in few.iterdir()) == ["b200-tp8.txt", "cpu-tp1.txt"]
    assert run(monkeypatch, "--check") == 0
    (few / "gone-tp1.txt").write_text("old")
    (few / "cpu-tp1.txt").write_text("changed")
    capsys.readouterr()
    assert run(monkeypatch, "--check") == 1
    assert capsys.readouterr().out.split() == ["cpu-tp1.txt", "gone-tp1.txt"]
    assert run(monkeypatch) == 0
    assert run(monkeypatch, "--check") == 0


def test_the_environment_does_not_reach_golden_plans(monkeypatch: pytest.MonkeyPatch):
    code = "from k3port.testing import golden; print(golden.golden_text(golden.golden_plan('b200', 8)), end='')"
    environment = {"K3PORT_DISABLE": "cuda.*", "K3PORT_KERNELS": "linear=reference.linear", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=Path(__file__).parents[2],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == golden.golden_text(golden.golden_plan("b200", 8))


def test_the_published_structure_is_the_published_one():
    """Every key that is kept has the published value, and nothing that shapes the model was cut away."""
    path = shared("data/kimi-k3.config.json")
    assert parse_config(published_k3_config()) == load_config(path)
    published = json.loads(path.read_text())

    def compare(mine: dict[str, object], theirs: dict[str, object], where: str) -> None:
        for key, value in mine.items():
            if isinstance(value, dict):
                compare(value, theirs[key], f"{where}{key}.")  # type: ignore[arg-type]
            elif key != "ignore":
                assert theirs[key] == value, where + key

    compare(published_k3_config(), published, "")
