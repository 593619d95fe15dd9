"""Everything that k3port imports is in its list of dependencies: development tools must not hide a missing one."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULE_OF = {"pyyaml": "yaml"}
OPTIONAL = {"transformers"}
"""Imported inside a function, with an error that names the extra."""
ROOMS = {"triton": ("backends/portable/", "testing/"), "fla": ("testing/bench/peers/",)}
"""Optional packages, and the folders that may import them: all that is loaded without them lies elsewhere."""


def imported() -> set[str]:
    names: set[str] = set()
    for file in (ROOT / "k3port").rglob("*.py"):
        place = file.relative_to(ROOT / "k3port").as_posix()
        names |= {name for name in _imports(file) if not place.startswith(ROOMS.get(name, ("/",)))}
    return names - set(sys.stdlib_module_names) - {"k3port"}


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=~!\[; ]", text, maxsplit=1)[0].lower() for text in project["dependencies"]}
    return {MODULE_OF.get(name, name) for name in names}


def test_every_import_is_declared() -> None:
    assert imported() - OPTIONAL - declared() == set()


def test_every_dependency_is_used() -> None:
    unused = declared() - imported()
    assert unused <= {"numpy"}, unused  # torch warns at every start without NumPy
