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


_MACHINE = (
    (r"\(\d+ s\)", "(N s)"),  # how long a part took
    (r"\b\d+\.\d+(?:e[+-]\d+|[\w.]*)(?:\+\w+)?", "N"),  # errors, and versions of Python, PyTorch and Triton
    (r"(\| [\w-]+ \| \w+ \| \d+ \|) \d+ / (\d+) \| \d+ \| \d+ \| [-\d]+ \| \S+ \| .+", r"\1 N / \2"),  # of the compiler
    (r"\d+ wave instructions", "N wave instructions"),
    (
        r"\d+ of (\d+) dropped instructions noticed, chosen from \d+",
        r"N of \1 dropped instructions noticed, chosen from N",
    ),
)
"""What differs from machine to machine and between versions of Triton."""


def loosely(line: str) -> str:
    """A line without times, errors, versions, and what the compiler made. Counts of cases and launches stay."""
    line = re.sub(r"\s+", " ", line.strip())
    for pattern, replacement in _MACHINE:
        line = re.sub(pattern, replacement, line)
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
    assert lacking(["a 1", "...", "b  2.5e-03"], "x\na 1\ny\nb 3.0e-05 more") == ""
    assert lacking(["b 1", "a 1"], "a 1\nb 1") == "a 1"
    assert lacking(["a 1", "c"], "a 1\nb 1") == "c"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("| bfloat16 | 15 | 0 | y | 2.4e-03 | 5.0e-03 |", "| bfloat16 | 15 | 0 | y | 2.1e-03 | 5.0e-03 |", True),
        ("| bfloat16 | 15 | 0 | y | 2.4e-03 | 5.0e-03 |", "| bfloat16 | 21 | 0 | y | 2.4e-03 | 5.0e-03 |", False),
        ("| bfloat16 | 15 | 0 | y | 2.4e-03 | 5.0e-03 |", "| bfloat16 | 15 | 1 | y | 2.4e-03 | 5.0e-03 |", False),
        ("16 of 16 launches compiled, 0 faults.", "24 of 24 launches compiled, 0 faults.", False),
        ("16 of 16 launches compiled, 0 faults.", "16 of 16 launches compiled, 2 faults.", False),
        ("### Compilation at production shapes (9 s)", "### Compilation at production shapes (0 s)", True),
        (
            "| gfx950 | k | 4 | 2048 / 163840 | 56 | 0 | 8 | - | buffer_load_dword, buffer_load_dwordx4 |",
            "| gfx950 | k | 4 | 1024 / 163840 | 48 | 0 | 7 | - | global_load_dword |",
            True,
        ),
        (
            "| sm_90 | k | 4 | 2048 / 232448 | 56 | 0 | - | - | ld.global.v2.b32 |",
            "| sm_90 | k | 12 | 2048 / 232448 | 56 | 0 | - | - | ld.global.v2.b32 |",
            False,
        ),
        ("12 launches, 26452 wave instructions executed; 0 races", "12 launches, 3 wave instructions executed; 0 races", True),
        ("12 launches, 26452 wave instructions executed; 0 races", "11 launches, 26452 wave instructions executed; 0 races", False),
        ("9 of 10 dropped instructions noticed, chosen from 793 x", "8 of 10 dropped instructions noticed, chosen from 7 x", True),
        ("9 of 10 dropped instructions noticed, chosen from 793 x", "9 of 20 dropped instructions noticed, chosen from 793 x", False),
        ("3 passed", "4 passed", False),
        ("k3port 0.1.0, Python 3.11.7, PyTorch 2.13.0", "k3port 0.2.0, Python 3.12.1, PyTorch 2.13.0+cpu, Triton", True),
    ],
)  # fmt: skip
def test_counts_are_compared_exactly_and_times_are_not(shown: str, printed: str, same: bool) -> None:
    assert (lacking([shown], printed) == "") == same
