"""Whether a record that a plugin calls a kernel is one: every field has its type, every name in it exists.

The resolver, the planner and the command line compute with records and do not look at their types again: what is let in
here must not be able to stop the plan of all other kernels.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from packaging.requirements import InvalidRequirement, Requirement

from k3port.ops.catalog import OPS
from k3port.oracle.schema import FEATURES
from k3port.oracle.spec import AxisRule, KernelSpec, Requires, Vendor
from k3port.oracle.symbols import module_file

VENDORS: tuple[str, ...] = get_args(Vendor)
DTYPES = ("float32", "bfloat16", "float16", "float64")
CACHE_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8", "uint8")
WEIGHT_FORMATS = ("mxfp4", *DTYPES)
RUNTIMES = ("cuda", "rocm", "driver")
AXES = ("C", "D", "E", "H", "I", "K", "L", "N", "R", "V", "W", "X", "Y", "bounded", "page", "ranks")
"""Names of sizes in the queries of the planner."""
LAYOUTS = ("kda_state", "conv_state", "mla_cache", "experts")
"""What outlives a call, so that several kernels have to agree on its layout."""

_SHOWN = 80


def spec_faults(spec: KernelSpec) -> list[str]:
    """What is wrong with a kernel's record; empty for one that the oracle can work with. Imports nothing.

    Types come first: names are looked up only in a record whose fields are what they should be.
    """
    return [*_types(spec)] or [*_names(spec), *_requires(spec.requires)] or [*_load(spec)]


def spec_doubts(spec: KernelSpec, archs: Collection[str]) -> list[str]:
    """What is probably a typing error in a record without faults, and could be right on a platform of tomorrow.

    Args:
        archs: the architectures that are known.
    """
    strange = [arch for arch in spec.requires.archs if arch not in archs]
    idle = [rule.axis for rule in spec.requires.axes if rule.axis not in AXES]
    return [
        *(f"requires.archs: no platform has {_unknown(arch, archs)}" for arch in strange),
        *(f"requires.axes: a rule that limits nothing, no query has {_unknown(axis, AXES)}" for axis in idle),
    ]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a field holds. ``items``: of a tuple, what each of its items is."""

    text: str
    accepts: Callable[[Any], bool]
    items: bool = False


def _is_int(value: object, least: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and (value.isprintable() or not value)


def _is_tags(value: object) -> bool:
    return isinstance(value, Mapping) and all(_is_line(k) and _is_line(v) and v for k, v in value.items())


def _is_window(value: object) -> bool:
    if callable(value):
        return True
    if not isinstance(value, tuple) or len(value) != 2 or not _is_int(value[0], 1):
        return False
    return value[1] is None or _is_int(value[1], value[0])


_LINE = _Kind("one line of text", _is_line)
_FLAG = _Kind("True or False", lambda value: isinstance(value, bool))
_FUNCTION = _Kind("a function", lambda value: value is None or callable(value))
_NAMES = _Kind("text", lambda value: _is_line(value) and bool(value), items=True)
_RANKS = _Kind("positive whole numbers", lambda value: _is_int(value, 1), items=True)
_LIMIT = _Kind("a positive whole number or None", lambda value: value is None or _is_int(value, 1))
_BOUND = _Kind("a whole number or None", lambda value: value is None or _is_int(value))

_SPEC: Mapping[str, _Kind] = {
    **dict.fromkeys(("name", "op", "load", "doc", "pack", "rounds", "numerics", "source"), _LINE),
    **dict.fromkeys(("fallback", "graph_safe", "deterministic", "records_drafts"), _FLAG),
    **dict.fromkeys(("parts", "covers", "phases"), _NAMES),
    **dict.fromkeys(("check", "padding", "workspace_bytes", "note"), _FUNCTION),
    "layouts": _Kind("a mapping of text to text", _is_tags),
    "requires": _Kind("a Requires", lambda value: isinstance(value, Requires)),
    "priority": _Kind("a whole number", _is_int),
    "tokens": _Kind("(first, last) with 1 <= first <= last, last None for no end, or a function", _is_window),
}
_REQUIRES: Mapping[str, _Kind] = {
    **dict.fromkeys(("vendors", "archs", "dtypes", "weight_formats", "kv_dtypes", "state_dtypes"), _NAMES),
    **dict.fromkeys(("packages", "symbols", "runtime", "features"), _NAMES),
    **dict.fromkeys(("tp", "ep"), _RANKS),
    **dict.fromkeys(("max_nodes", "query_tokens"), _LIMIT),
    "axes": _Kind("AxisRule", lambda value: isinstance(value, AxisRule), items=True),
    "min_lds_bytes": _Kind("a number of bytes", lambda value: _is_int(value, 0)),
}
_RULE: Mapping[str, _Kind] = {
    "axis": _Kind("the name of an axis", lambda value: _is_line(value) and bool(value)),
    "allowed": _Kind("whole numbers", _is_int, items=True),
    **dict.fromkeys(("minimum", "maximum"), _BOUND),
    "multiple_of": _Kind("a whole number of at least 1", lambda value: _is_int(value, 1)),
    "why": _LINE,
}


def _types(spec: KernelSpec) -> Iterator[str]:
    yield from _wrong(spec, _SPEC, "")
    if isinstance(spec.requires, Requires):
        yield from _wrong(spec.requires, _REQUIRES, "requires.")
        rules = spec.requires.axes if isinstance(spec.requires.axes, tuple) else ()
        for number, rule in enumerate(rules):
            if isinstance(rule, AxisRule):
                where = f"requires.axes[{number}]."
                yield from _wrong(rule, _RULE, where)
                low, high = rule.minimum, rule.maximum
                if isinstance(low, int) and isinstance(high, int) and low > high:
                    yield f"{where}minimum = {low} is above maximum = {high}"


def _wrong(record: object, kinds: Mapping[str, _Kind], where: str) -> Iterator[str]:
    """The fields of a record that are not what they should be."""
    for field, kind in kinds.items():
        value = getattr(record, field)
        if not kind.items:
            if not kind.accepts(value):
                yield f"{where}{field} = {_shown(value)}: expected {kind.text}"
        elif not isinstance(value, tuple):
            # ("amd") is the text "amd", and (8) the number 8: parentheses alone make no tuple.
            comma = f"; a comma is missing: ({_shown(value)},)" if isinstance(value, str | int | AxisRule) else ""
            yield f"{where}{field} = {_shown(value)}: expected a tuple of {kind.text}{comma}"
        else:
            wrong = [item for item in value if not kind.accepts(item)]
            yield from (f"{where}{field} has {_shown(item)} in it: expected {kind.text}" for item in wrong)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _unknown(value: str, known: Iterable[str]) -> str:
    """The value with what was probably meant."""
    names = sorted(known)
    near = difflib.get_close_matches(value.lower(), names, n=1, cutoff=0.5)
    return f"{value!r}, did you mean {near[0]}?" if near else f"{value!r}; known: {', '.join(names)}"


def _names(spec: KernelSpec) -> Iterator[str]:
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)+", spec.name):
        yield f"name = {spec.name!r}: expected backend.kernel of letters, digits, hyphens and underscores"
    for field in ("load", "pack"):
        value = getattr(spec, field)
        if value and not re.fullmatch(r"\w+(\.\w+)*:\w+", value):
            yield f"{field} = {value!r}: expected module:function"
    for field, ops in (("op", (spec.op,)), ("parts", spec.parts), ("covers", spec.covers)):
        yield from (f"{field}: there is no op {_near(op)}" for op in ops if op not in OPS)
    if spec.op in OPS:
        phases = tuple(str(phase) for phase in OPS[spec.op].phases if phase is not None)
        yield from (f"phases: {spec.op} has no phase {phase!r}" for phase in spec.phases if phase not in phases)
        # Parts are bound by calling their kernels' factories in turn: an op that is a part of itself would never end.
        foreign = [part for part in spec.parts if part in OPS and part not in OPS[spec.op].parts]
        made = ", ".join(OPS[spec.op].parts) or "nothing"
        yield from (f"parts: {spec.op} is not made of {part}; of {made}" for part in foreign)
    yield from (f"layouts: there is no {_unknown(key, LAYOUTS)}" for key in spec.layouts if key not in LAYOUTS)


def _near(op: str) -> str:
    near = difflib.get_close_matches(op, OPS, n=1)
    return f"{op!r}{f', did you mean {near[0]}?' if near else ''}"


def _requires(requires: Requires) -> Iterator[str]:
    closed = (
        ("vendors", VENDORS),
        ("dtypes", DTYPES),
        ("state_dtypes", DTYPES),
        ("kv_dtypes", CACHE_DTYPES),
        ("weight_formats", WEIGHT_FORMATS),
        ("features", FEATURES),
    )
    for field, known in closed:
        values = getattr(requires, field)
        yield from (f"requires.{field}: there is no {_unknown(value, known)}" for value in values if value not in known)
    for field in ("packages", "runtime"):
        for text in getattr(requires, field):
            try:
                name = Requirement(text).name
            except InvalidRequirement:
                yield f"requires.{field}: {text!r} is no requirement such as package>=1.0"
                continue
            # A key that no target has would never be looked at.
            if field == "runtime" and name not in RUNTIMES:
                yield f"requires.runtime: there is no {_unknown(name, RUNTIMES)}"
    for symbol in requires.symbols:
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", symbol):
            yield f"requires.symbols: {symbol!r} is no package.module:name"


def _load(spec: KernelSpec) -> Iterator[str]:
    """The module to load is looked for, not imported: its vendor's library may be slow, or absent on purpose."""
    for field in ("load", "pack"):
        module = getattr(spec, field).partition(":")[0]
        if module and module not in sys.builtin_module_names and module_file(module) is None:
            yield f"{field}: there is no module {module}"
