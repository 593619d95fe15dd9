"""Whether a record that a plugin calls a kernel is one: every name in it exists, every field has its type."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from k3port.ops.catalog import OPS
from k3port.oracle.spec import AxisRule, KernelSpec, Requires
from k3port.oracle.symbols import module_file


def spec_faults(spec: KernelSpec) -> list[str]:
    """What is wrong with a kernel's record; empty for one that the oracle can work with. Imports nothing."""
    return [*_types(spec), *_names(spec)] or [*_requires(spec.requires), *_load(spec)]


_TEXT = ("name", "op", "load", "doc", "pack", "rounds", "numerics", "source")
_FLAGS = ("fallback", "graph_safe", "deterministic", "records_drafts")
_FUNCTIONS = ("check", "padding", "workspace_bytes", "note")


def _types(spec: KernelSpec) -> Iterator[str]:
    wanted: list[tuple[Iterable[str], type | tuple[type, ...], str]] = [
        (_TEXT, str, "text"),
        (_FLAGS, bool, "True or False"),
        (("parts", "covers", "phases"), tuple, "a tuple"),
        (("layouts",), Mapping, "a mapping"),
        (("requires",), Requires, "a Requires"),
        (("priority",), int, "a whole number"),
    ]
    for fields, kind, text in wanted:
        for field in fields:
            if not isinstance(value := getattr(spec, field), kind):
                yield f"{field} = {value!r}: expected {text}"
    for field in _FUNCTIONS:
        if (value := getattr(spec, field)) is not None and not callable(value):
            yield f"{field} = {value!r}: expected a function"
    if not callable(spec.tokens) and not (isinstance(spec.tokens, tuple) and len(spec.tokens) == 2):
        yield f"tokens = {spec.tokens!r}: expected (first, last) or a function"


def _names(spec: KernelSpec) -> Iterator[str]:
    if isinstance(spec.name, str) and not all(spec.name.partition(".")):
        yield f"name = {spec.name!r}: expected backend.kernel"
    for field in ("load", "pack"):
        value = getattr(spec, field)
        if isinstance(value, str) and value and not all(value.partition(":")):
            yield f"{field} = {value!r}: expected module:function"
    for field, ops in (("op", (spec.op,)), ("parts", spec.parts), ("covers", spec.covers)):
        for op in ops if isinstance(ops, tuple) else ():
            if op not in OPS:
                near = difflib.get_close_matches(str(op), OPS, n=1)
                yield f"{field}: there is no op {op!r}{f', did you mean {near[0]}?' if near else ''}"
    if isinstance(spec.phases, tuple) and spec.op in OPS:
        for phase in spec.phases:
            if phase not in OPS[spec.op].phases:
                yield f"phases: {spec.op} has no phase {phase!r}"


def _requires(requires: Requires) -> Iterator[str]:
    for text in (*requires.packages, *requires.runtime):
        try:
            Requirement(text)
        except (InvalidRequirement, TypeError):
            yield f"requires: {text!r} is no requirement such as package>=1.0"
    for symbol in requires.symbols:
        if not all(str(symbol).partition(":")):
            yield f"requires: {symbol!r} is no package.module:name"
    wrong: list[Any] = [rule for rule in requires.axes if not isinstance(rule, AxisRule)]
    yield from (f"requires: {rule!r} is no AxisRule" for rule in wrong)


def _load(spec: KernelSpec) -> Iterator[str]:
    """The module to load is looked for, not imported: its vendor's library may be slow, or absent on purpose."""
    module = spec.load.partition(":")[0]
    if module and module not in sys.builtin_module_names and module_file(module) is None:
        yield f"load: there is no module {module}"
