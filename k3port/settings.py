"""The environment variables that k3port knows, and the only code that reads the environment.

Everything is read once per process and frozen. Command-line options and function arguments come before it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from k3port.errors import UsageError

PREFIX = "K3PORT_"
MAX_THREADS = 1024


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. A field holds its default where the variable is not set or empty.

    Attributes:
        kernels: pins, kernel name by op or ``op@phase``.
        threads: CPU threads of both phases.
        platform: profile of ``platforms.yaml``.
        plain: whether output stays without colour (``NO_COLOR``, or a terminal that has none).
        warnings: names that look like ours and are not, with the nearest one that is.
    """

    kernels: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    platform: str | None = None
    plain: bool = False
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variable:
    """One environment variable: the field it fills, how it is read, and what people are told about it."""

    name: str
    field: str
    expected: str
    doc: str
    parse: Callable[[str], Any]


def parse_pin(text: str) -> tuple[str, str]:
    """``op[@phase]=kernel`` to its two sides.

    Raises:
        ValueError: another form.
    """
    target, found, kernel = (part.strip() for part in text.partition("="))
    if not (target and found and kernel) or "=" in kernel:
        raise ValueError(text)
    return target, kernel


def merge_pins(lower: Mapping[str, str], higher: Mapping[str, str]) -> dict[str, str]:
    """Both sets of pins; an op that ``higher`` pins, in whichever phase, loses all its pins of ``lower``."""
    ops = {target.partition("@")[0] for target in higher}
    kept = {target: kernel for target, kernel in lower.items() if target.partition("@")[0] not in ops}
    return {**kept, **higher}


def _parse_pins(text: str) -> dict[str, str]:
    return dict(parse_pin(part) for part in text.split(",") if part.strip())


def _parse_threads(text: str) -> int:
    threads = int(text)
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(text)
    return threads


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "K3PORT_KERNELS",
        "kernels",
        "op[@phase]=kernel, several separated by commas, such as kda@decode=reference.kda,linear=cpu.linear",
        "Pins kernels, like --kernel. An option --kernel for the same op replaces it.",
        _parse_pins,
    ),
    Variable(
        "K3PORT_THREADS",
        "threads",
        f"a whole number from 1 to {MAX_THREADS}",
        "CPU threads, like --threads.",
        _parse_threads,
    ),
    Variable(
        "K3PORT_PLATFORM",
        "platform",
        "the name of a platform profile, such as cpu",
        "The platform to run on, like --platform.",
        str,
    ),
)


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from a given environment; :func:`get_settings` uses that of the process.

    Raises:
        UsageError: values that cannot be read; all of them are named.
    """
    values: dict[str, Any] = {}
    bad: list[tuple[str, str]] = []
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if not text:
            continue
        try:
            values[variable.field] = variable.parse(text)
        except ValueError:
            bad.append((f"{variable.name} = {text!r}", f"expected {variable.expected}"))
    if bad:
        first, expected = bad[0]
        if len(bad) == 1:
            raise UsageError(f"cannot read the environment variable {first}", hint=expected)
        raise UsageError(
            f"cannot read {len(bad)} environment variables",
            reasons=[f"{value}: {expected}" for value, expected in bad],
            hint="correct or unset them",
        )
    known = [variable.name for variable in VARIABLES]
    warnings = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            warnings.append(f"unknown environment variable {name} is ignored; {advice}")
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    return Settings(**values, plain=plain, warnings=tuple(warnings))


_current: Settings | None = None


def get_settings() -> Settings:
    """The settings of this process: read at the first call, the same afterwards.

    Raises:
        UsageError: as :func:`read_settings`.
    """
    global _current
    if _current is None:
        _current = read_settings(os.environ)
    return _current


def reload() -> Settings:
    """Reads the environment again: for tests, and for programs that changed it on purpose."""
    global _current
    _current = None
    return get_settings()
