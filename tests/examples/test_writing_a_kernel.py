"""docs/writing-a-kernel.md: its files are the example's, byte for byte, and its commands print what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_environment import EXAMPLE, ROOT, new_environment

PAGE = (ROOT / "docs" / "writing-a-kernel.md").read_text(encoding="utf-8")
FILE = re.compile(r"^File `([^`]+)`:\n\n(`{3,4})\w+\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
SESSION = re.compile(r"^```shell-session\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files_of_the_page() -> dict[str, str]:
    return {name: text for name, _, text in FILE.findall(PAGE)}


def files_of_the_example() -> dict[str, str]:
    return {
        str(path.relative_to(EXAMPLE)): path.read_text(encoding="utf-8")
        for path in sorted(EXAMPLE.rglob("*"))
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts)
    }


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Commands with the lines that they print."""
    for block in SESSION.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = part.rstrip("\n").split("\n")
            yield command, lines


def loosely(line: str) -> str:
    """A line without what differs from machine to machine and between versions of Triton: numbers, spaces, loads."""
    for pattern, replacement in (
        (r"\s+", " "),
        (r"(?:(?:buffer_load|global_load|ld\.global)[\w.]*(?:, )?)+", "LOADS"),
        (r"\d[\d.]*(e[+-]\d+)?", "0"),
    ):
        line = re.sub(pattern, replacement, line.strip())
    return line


def lacking(shown: list[str], printed: str) -> str:
    """The first shown line that was not printed, in order; empty where all were. ``...`` stands for any lines."""
    rows = iter([loosely(row) for row in printed.split("\n")])
    for line in shown:
        if line != "..." and not any(loosely(line) in row for row in rows):
            return line
    return ""


def test_the_files_are_those_of_the_example() -> None:
    assert files_of_the_page() == files_of_the_example()


@pytest.mark.slow
def test_the_walk(tmp_path: Path) -> None:
    """From an empty folder: writes the files of the page, runs its commands in order, leaves nothing behind."""
    here = new_environment(tmp_path)
    for name, text in files_of_the_page().items():
        path = here.work / EXAMPLE.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    before = here.files()
    walked = []
    for command, shown in commands(PAGE):
        done = here.run(command)
        printed = done.stdout + done.stderr
        fails = any(line.startswith("error:") for line in shown)
        assert (done.returncode != 0) == fails, f"$ {command}\n{printed}"
        assert not (missing := lacking(shown, printed)), f"$ {command}\n{printed}\nlacks: {missing}"
        walked.append(command.split()[:3])
    assert ["k3port", "kernels", "explain"] in walked and ["k3port", "kernels", "check"] in walked
    assert walked[0][:2] == ["pip", "install"]
    assert here.files() == before


def test_a_line_that_is_not_printed_is_noticed() -> None:
    assert lacking(["a 1", "...", "b  2.5e-03"], "x\na 7\ny\nb 3.0e-05 more") == ""
    assert lacking(["b 1", "a 1"], "a 1\nb 1") == "a 1"
    assert lacking(["a 1", "c"], "a 1\nb 1") == "c"
