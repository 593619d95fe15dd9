"""Whether ``package.module:name`` exists in what is installed, without importing anything of it.

Vendor packages compile, warn or make a GPU context on import, so their files are read instead.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_STAR_DEPTH = 4
"""How many ``from x import *`` are followed in a row."""


def missing_symbols(symbols: Iterable[str]) -> set[str]:
    """Those of the ``package.module:name`` entries that the installed packages lack, absent packages included."""
    return {symbol for symbol in symbols if not has_symbol(symbol)}


def has_symbol(symbol: str) -> bool:
    """Whether the module's file binds the name: by definition, assignment, import, or a table of lazy names.

    A compiled module is searched for the name as text.
    """
    module, _, name = symbol.partition(":")
    file = module_file(module)
    if file is None:
        return False
    if not name:
        return True
    return _binds(file, module, name.partition(".")[0], _STAR_DEPTH)


def module_file(module: str) -> Path | None:
    """The file of a module, found part by part so that no parent is imported."""
    spec: ModuleSpec | None = None
    path: list[str] | None = None
    prefix = ""
    for part in module.split("."):
        prefix = f"{prefix}.{part}" if prefix else part
        try:
            # Finders of editable installs only know top-level names; below, the folder decides.
            spec = importlib.util.find_spec(prefix) if path is None else PathFinder.find_spec(prefix, path)
        except (ImportError, ValueError, AttributeError):
            return None
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    file = Path(spec.origin)
    return file if file.is_file() else None


def _binds(file: Path, module: str, name: str, depth: int) -> bool:
    if file.suffix != ".py":
        return name.encode() in file.read_bytes()
    names, stars, lazy = _bindings(file)
    if name in names:
        return True
    # A module with __getattr__ keeps its lazy names as text somewhere in the file.
    if lazy and name in lazy:
        return True
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for level, target in stars if depth else ():
        base = package
        for _ in range(level - 1):
            base = base.rpartition(".")[0]
        other = target if not level else f"{base}.{target}" if target else base
        other_file = module_file(other)
        if other_file is not None and other_file != file and _binds(other_file, other, name, depth - 1):
            return True
    # A submodule is a name of its package.
    return file.name == "__init__.py" and module_file(f"{module}.{name}") is not None


@lru_cache(maxsize=256)
def _bindings(file: Path) -> tuple[frozenset[str], tuple[tuple[int, str], ...], frozenset[str]]:
    """Names that a module binds at its top level, modules whose names it takes whole, and its lazy names."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return frozenset(), (), frozenset()
    names: set[str] = set()
    stars: list[tuple[int, str]] = []
    for node in _top_level(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import):
            names.update(a.asname or a.name.partition(".")[0] for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(a.asname or a.name for a in node.names if a.name != "*")
            stars += [(node.level, node.module or "") for a in node.names if a.name == "*"]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
    lazy: set[str] = set()
    if "__getattr__" in names:
        lazy = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return frozenset(names), tuple(stars), frozenset(lazy)


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, those inside ``if``, ``try`` and ``with`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.For | ast.While):
            yield from _top_level(node.body + node.orelse)
        elif isinstance(node, ast.With):
            yield from _top_level(node.body)
        elif isinstance(node, ast.Try):
            inner = [statement for handler in node.handlers for statement in handler.body]
            yield from _top_level(node.body + inner + node.orelse + node.finalbody)
