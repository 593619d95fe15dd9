"""What the documents say is so: examples run, tables match the code, links lead somewhere."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tiny_text import write_tiny_text_checkpoint

from k3port.cli.run import run
from k3port.errors import ExitCode

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> Iterator[tuple[str, str]]:
    for document in DOCUMENTS:
        for number, (found, text) in enumerate(FENCE.findall(document.read_text(encoding="utf-8"))):
            if found == language:
                yield f"{document.name}-{number}", text


def cases(language: str) -> list[object]:
    return [pytest.param(text, id=name) for name, text in blocks(language)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package as a checkout has it; where the embedded checkpoint is absent, a tiny one stands in."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "k3port", root / "k3port", ignore=shutil.ignore_patterns("assets", "__pycache__"))
    shutil.copy(ROOT / "platforms.yaml", root)
    nano, copy = ROOT / "k3port" / "assets" / "k3-nano", root / "k3port" / "assets" / "k3-nano"
    copy.parent.mkdir()
    if (nano / "config.json").exists():
        copy.symlink_to(nano)
    else:
        write_tiny_text_checkpoint(copy)
    command = root / "bin" / "k3port"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m k3port "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return root


def environment(checkout: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("K3PORT_")},
        "PYTHONPATH": str(checkout),
        "PATH": f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "K3PORT_THREADS": "1",
    }


@pytest.mark.parametrize("text", cases("python"))
def test_python_examples_run(text: str, checkout: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=checkout, env=environment(checkout), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout


def steps(text: str) -> Iterator[tuple[str, list[str]]]:
    """Commands of a console block with the lines that they print."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = part.rstrip("\n").split("\n")
        yield command, lines


def loosely(line: str) -> str:
    """A printed line without what differs from run to run: numbers, spaces, and how many kernels of each kind."""
    for pattern, replacement in (
        (r"\s+", " "),
        (r"\d[\d.]*", "0"),
        (r" 0 m?s ", " 0 s "),
        (r"kernels: [^·]*", "kernels: 0 "),
        (r"· (stop|length) ·", "· end ·"),
    ):
        line = re.sub(pattern, replacement, line.strip())
    return line


@pytest.mark.parametrize("text", cases("console"))
def test_console_examples_print_what_they_show(text: str, checkout: Path) -> None:
    for command, lines in steps(text):
        done = subprocess.run(
            ["bash", "-c", command], cwd=checkout, env=environment(checkout), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        fails = any(line.startswith("error:") for line in lines)
        assert (done.returncode != 0) == fails, f"$ {command}\n{done.stdout}"
        printed = iter([loosely(line) for line in done.stdout.split("\n")])
        for line in lines:
            if line != "...":
                # Inside a row: generated text and the header share one where both go to one terminal.
                found = any(loosely(line) in row for row in printed)
                assert found, f"$ {command}\n{done.stdout}\nlacks: {line}"


def table_after(document: str, heading: str) -> list[list[str]]:
    text = (ROOT / document).read_text(encoding="utf-8").split(f"# {heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[0].splitlines()[2:]]


def test_exit_codes_are_the_real_ones() -> None:
    documented = [(int(code), name) for code, name, _ in table_after("docs/cli.md", "Exit codes")]
    assert documented == [(code.value, code.name) for code in ExitCode]


def test_options_are_the_real_ones() -> None:
    documented = {
        option: row[1]
        for row in table_after("docs/cli.md", "k3port run")
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", row[0])
    }
    context = click.Context(run, help_option_names=["-h", "--help"])
    real = {
        option: param for param in run.get_params(context) if isinstance(param, click.Option) for option in param.opts
    }
    assert set(documented) == set(real)
    for option, param in real.items():
        if isinstance(param.default, int | float) and not param.is_flag:
            assert float(documented[option]) == param.default, option
    usage = run.get_help(context)
    assert all(option in usage for option in documented)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^(```+).*?^\1$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings], target


def test_enforcers_named_in_the_documents_exist() -> None:
    tests = (ROOT / "tests" / "test_architecture.py").read_text(encoding="utf-8")
    for row in table_after("docs/architecture.md", "Rules, and what enforces them"):
        for name in re.findall(r"`((?:check|test)_\w+)`", row[1]):
            assert f"def {name}(" in tests
