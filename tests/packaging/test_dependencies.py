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


def imported() -> set[str]:
    names: set[str] = set()
    for file in (ROOT / "k3port").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"k3port"}


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=~!\[; ]", text, maxsplit=1)[0].lower() for text in project["dependencies"]}
    return {MODULE_OF.get(name, name) for name in names}


def test_every_import_is_declared() -> None:
    assert imported() - OPTIONAL - declared() == set()


def test_every_dependency_is_used() -> None:
    unused = declared() - imported()
    assert unused <= {"numpy"}, unused  # torch warns at every start without NumPy
