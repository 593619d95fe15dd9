"""Whether values read from a file have the types that their dataclass declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def misfit(value: Any) -> str:
    """The first field of a dataclass instance, as a path, whose value is not of its declared type; empty where all
    are."""
    for name, kind in get_type_hints(type(value)).items():
        if found := _misfit(getattr(value, name), kind):
            return f"{name}{'' if found == '.' else found}"
    return ""


def _misfit(value: Any, kind: Any) -> str:
    """Empty, ``.`` for the value itself, or the way to the part that does not fit."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return "" if not all(_misfit(value, one) for one in args) else _misfit(value, args[0])
    if origin is Literal:
        return "" if value in args and not isinstance(value, bool | float) else "."
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return "."
        kinds = [args[0]] * len(value) if args[1:] == (Ellipsis,) else args
        return "." if len(kinds) != len(value) else _first(enumerate(value), kinds)
    if origin is not None and issubclass(origin, Mapping):
        return _first(value.items(), [args[1]] * len(value)) if isinstance(value, Mapping) else "."
    if dataclasses.is_dataclass(kind):
        found = misfit(value) if isinstance(value, kind) else "."  # type: ignore[arg-type]
        return f".{found}" if found not in ("", ".") else found
    if kind in (int, float):
        return "" if isinstance(value, int | kind) and not isinstance(value, bool) else "."
    return "" if kind is Any or isinstance(value, kind) else "."


def _first(parts: Any, kinds: Any) -> str:
    for (key, part), kind in zip(parts, kinds, strict=True):
        if found := _misfit(part, kind):
            return f"[{key}]{'' if found == '.' else found}"
    return ""
