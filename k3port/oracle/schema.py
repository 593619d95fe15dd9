"""The form of a platform file: keys, types and line numbers. Every fault of a file is found before any is reported."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from k3port.ops.catalog import OPS
from k3port.oracle.spec import Vendor

SCHEMA = 2
ACTIVATIONS = ("float32", "bfloat16")
EXPERT_ACTIVATIONS = ("bf16", "mxfp8", "mxfp4")
FP8_FLAVOURS = ("none", "e4m3fn", "e4m3fnuz")
FEATURES = (
    "multicast",
    "nvlink",
    "nvswitch",
    "mnnvl",
    "xgmi",
    "pcie",
    "ethernet",
    "unified_memory",
    "tcgen05",
    "mfma",
    "wmma",
)  # fmt: skip
SOURCE_KINDS = ("datasheet", "documentation", "package", "measured", "derived", "assumed", "unconfirmed")

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SCALARS = yaml.constructor.SafeConstructor()


@dataclass(frozen=True)
class Leaf:
    """One value: what is expected, and whether a value is that."""

    expected: str
    accepts: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """A mapping with known keys."""

    fields: Mapping[str, Field]


@dataclass(frozen=True)
class Table:
    """A mapping whose keys are free, or names from a list."""

    value: Leaf
    keys: tuple[str, ...] = ()


Field = Leaf | Group | Table


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_version(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(Version(value))
    except InvalidVersion:
        return False


def _is_range(value: Any) -> bool:
    try:
        return isinstance(value, str) and len(SpecifierSet(value)) > 0
    except InvalidSpecifier:
        return False


def _strings(allowed: tuple[str, ...] = ()) -> Leaf:
    def accepts(value: Any) -> bool:
        names = value if isinstance(value, list) else [None]
        return all(isinstance(name, str) and name and (not allowed or name in allowed) for name in names)

    return Leaf(f"a list of {', '.join(allowed)}" if allowed else "a list of names", accepts, allowed)


def _one_of(*allowed: str) -> Leaf:
    return Leaf(f"one of {', '.join(allowed)}", lambda value: value in allowed, allowed)


_TEXT = Leaf("text", lambda value: isinstance(value, str) and bool(value.strip()))
_INT = Leaf("a positive whole number", _is_int)
_NUMBER = Leaf("a positive number", _is_number)
_SHARE = Leaf("a number above 0 and at most 1", lambda value: _is_number(value) and value <= 1)
_BOOL = Leaf("true or false", lambda value: isinstance(value, bool))
_VERSION = Leaf('a version in quotes, such as "3.7.0"', _is_version)
_RANGE = Leaf('a range of versions in quotes, such as ">=3.7,<3.8"', _is_range)
_SOURCE = Leaf(
    f"a kind and a source, such as 'datasheet: NVIDIA H200'; kinds: {', '.join(SOURCE_KINDS)}",
    lambda value: isinstance(value, str) and bool(re.match(rf"({'|'.join(SOURCE_KINDS)}): \S", value)),
)

FIELDS: dict[str, Field] = {
    "extends": _TEXT,
    "aliases": _strings(),
    "description": _TEXT,
    "vendor": _one_of(*get_args(Vendor)),
    "arch": _TEXT,
    "product": _TEXT,
    "memory": Group({"bytes": _INT, "usable_share": _SHARE, "bytes_per_s": _INT, "kind": _TEXT}),
    "lds_bytes": _INT,
    "compute_units": _INT,
    "wavefront": _INT,
    "fp8": _one_of(*FP8_FLAVOURS),
    "native_fp4": _BOOL,
    "peak_tflops": Group({"bfloat16": _NUMBER, "fp8": _NUMBER, "fp4": _NUMBER}),
    "features": _strings(FEATURES),
    "gpus_per_node": _INT,
    "interconnect": Group({"kind": _TEXT, "bytes_per_s": _INT, "domain_gpus": _INT}),
    "runtime": Table(_VERSION, ("cuda", "rocm", "driver")),
    "packages": Table(_VERSION),
    "validated": Table(_RANGE),
    "activations": _one_of(*ACTIVATIONS),
    "kernels": Table(_strings(), tuple(OPS)),
    "disable": Table(_TEXT),
    "settings": Group({"activations": _one_of(*EXPERT_ACTIVATIONS)}),
    "notes": _strings(),
    "sources": Table(_SOURCE),
}

Kind = Literal["family", "platform"]
_SECTIONS: dict[str, Kind] = {"families": "family", "platforms": "platform"}


@dataclass(frozen=True)
class Entry:
    """One family or platform as its file has it. ``lines`` gives the line of every key by dotted path."""

    name: str
    kind: Kind
    file: Path
    line: int
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def place(self, path: str = "") -> str:
        return f"{self.file}:{self.lines.get(path, self.line)}"


@dataclass
class Faults:
    """What is wrong in which file and line; collected, then raised together."""

    found: list[tuple[Path, int, str]] = field(default_factory=list)

    def add(self, file: Path, line: int, text: str) -> None:
        self.found.append((file, line, text))

    def lines(self) -> list[str]:
        return [f"{file}:{line}: {text}" for file, line, text in sorted(set(self.found))]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``, did you mean X?`` for a name that is close to a known one, or else the known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"


def read_file(file: Path, text: str, faults: Faults) -> list[Entry]:
    """The entries of a platform file whose text is YAML; what is wrong with them goes to ``faults``.

    Raises:
        yaml.YAMLError: the text is not YAML.
    """
    root = yaml.compose(text, Loader=_LOADER)
    if not isinstance(root, yaml.MappingNode):
        faults.add(file, 1, f"not a platform file: expected schema: {SCHEMA} and platforms:")
        return []
    reader = _Reader(file, faults)
    entries: list[Entry] = []
    schema: Any = None
    for key, node, line in reader.pairs(root, ""):
        if key == "schema":
            schema = _plain(node)
        elif key not in _SECTIONS:
            faults.add(file, line, f"unknown key {key}{did_you_mean(key, ['schema', *_SECTIONS])}")
        elif not isinstance(node, yaml.MappingNode):
            faults.add(file, line, f"{key}: expected entries by name")
        else:
            for name, entry, entry_line in reader.pairs(node, key):
                entries.append(reader.entry(name, _SECTIONS[key], entry, entry_line))
    if schema != SCHEMA:
        faults.add(file, 1, f"schema: expected {SCHEMA}, found {'nothing' if schema is None else repr(schema)}")
    return entries


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, file: Path, faults: Faults) -> None:
        self.file, self.faults = file, faults

    def fault(self, node: yaml.Node | int, text: str) -> None:
        self.faults.add(self.file, node if isinstance(node, int) else node.start_mark.line + 1, text)

    def pairs(self, node: yaml.MappingNode, path: str) -> Iterator[tuple[str, yaml.Node, int]]:
        """Keys with their values and lines; a key that comes twice is a fault and its second value is dropped."""
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            where = f"{path}.{key}" if path else key
            if key in seen:
                self.fault(line, f"{where} is a duplicate, first in line {seen[key]}")
                continue
            seen[key] = line
            yield key, value, line

    def entry(self, name: str, kind: Kind, node: yaml.Node, line: int) -> Entry:
        lines: dict[str, int] = {}
        values: Any = {}
        if isinstance(node, yaml.MappingNode):
            values = self.value(node, Group(FIELDS), name, "", lines)
        else:
            self.fault(line, f"{name}: expected keys and values")
        entry = Entry(name, kind, self.file, line, values, lines)
        known = set(leaves(values)) | set(lines)
        for path in values.get("sources", {}):
            if path not in known:
                self.fault(lines[f"sources.{path}"], f"{name}.sources.{path}: no such key{did_you_mean(path, known)}")
        return entry

    def value(self, node: yaml.Node, form: Field, name: str, path: str, lines: dict[str, int]) -> Any:
        """The checked value of a node. A null stays None: it removes what an extended entry says."""
        where = f"{name}.{path}" if path else name
        if isinstance(form, Leaf):
            value = _plain(node)
            if value is not None and not form.accepts(value):
                wrong = [v for v in (value if isinstance(value, list) else [value]) if v not in form.choices]
                near = did_you_mean(str(wrong[0]), form.choices) if form.choices and wrong else ""
                advice = near if near.endswith("?") else ""
                self.fault(node, f"{where} = {_short(value)}: expected {form.expected}{advice}")
                return None
            return value
        if not isinstance(node, yaml.MappingNode):
            if _plain(node) is not None:
                self.fault(node, f"{where} = {_short(_plain(node))}: expected keys and values")
            return None
        result: dict[str, Any] = {}
        for key, child, line in self.pairs(node, where):
            inner = f"{path}.{key}" if path else key
            known = form.fields if isinstance(form, Group) else form.keys
            if known and key not in known:
                self.fault(line, f"{where}: unknown key {key}{did_you_mean(key, known)}")
                continue
            lines[inner] = line
            result[key] = self.value(
                child, form.fields[key] if isinstance(form, Group) else form.value, name, inner, lines
            )
        return result


def _plain(node: yaml.Node) -> Any:
    """A scalar or a list of scalars as Python values; anything deeper as text that no check accepts."""
    if isinstance(node, yaml.ScalarNode):
        try:
            return _SCALARS.construct_object(node)
        except (yaml.YAMLError, ValueError):
            return node.value
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) if isinstance(item, yaml.ScalarNode) else {} for item in node.value]
    return {}


def _short(value: Any) -> str:
    return "a mapping" if value == {} else repr(value) if len(repr(value)) < 60 else repr(value)[:57] + "..."


def leaves(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Dotted paths of all values that are not mappings."""
    for key, value in values.items():
        inner = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            yield from leaves(value, inner)
        else:
            yield inner


def at(values: Mapping[str, Any], path: str) -> Any:
    """The value of a dotted path. Keys may have dots themselves (kernel names), so the longest match counts."""
    if path in values:
        return values[path]
    key, _, rest = path.partition(".")
    while rest:
        if isinstance(values.get(key), Mapping):
            return at(values[key], rest)
        step, _, rest = rest.partition(".")
        key = f"{key}.{step}"
    return None


def own_source(entry: Entry, path: str) -> str:
    """The source that the entry gives for a path: its own, or that of the mapping around it; empty where none."""
    sources = entry.values.get("sources") or {}
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return ""


_NUMBERS_AS_TEXT = ("runtime", "packages", "validated")


def unsourced(entry: Entry) -> list[str]:
    """``file:line: path`` of every number and version in an entry that names no source."""
    missing = []
    for path in leaves({key: value for key, value in entry.values.items() if key != "sources"}):
        value = at(entry.values, path)
        counts = _is_number(value) or (value is not None and path.partition(".")[0] in _NUMBERS_AS_TEXT)
        if counts and not own_source(entry, path):
            missing.append(f"{entry.place(path)}: {entry.name}.{path}")
    return missing
