"""The environment variables that k3port knows, and the only code that reads the environment.

Everything is read once per process and frozen. Command-line options and function arguments come before it.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from k3port.errors import UsageError

PREFIX = "K3PORT_"
MAX_THREADS = 1024

Activations = Literal["bf16", "mxfp8", "mxfp4"]
"""What routed experts round their input to before multiplying with MXFP4 weights; ``bf16`` rounds nothing."""
_AITER_MODES: dict[Activations, str] = {"bf16": "a16w4", "mxfp8": "a8w4", "mxfp4": "a4w4"}

RowKind = Literal["set", "default", "unknown", "retired", "not read", "owned"]


@dataclass(frozen=True)
class SettingRow:
    """One line of ``doctor --settings``: a variable, its value, where that comes from, and what it does."""

    name: str
    value: str
    source: str
    effect: str
    kind: RowKind


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. A field holds its default where the variable is not set or empty.

    Attributes:
        kernels: pins, kernel name by op or ``op@phase``.
        disable: kernels that no plan may use, by name or pattern (``rocm.aiter_*``).
        platform: profile of ``platforms.yaml``.
        profiles: platform files beside the built-in one.
        packages: versions that plans assume: ``profile``, ``host``, a file, or None for what fits the platform.
        activations: rounding of expert activations; None leaves it to the platform.
        threads: CPU threads of both phases.
        plain: whether output stays without colour (``NO_COLOR``, or a terminal that has none).
        warnings: names that look like ours and are not, or that we own and others set; with what to use instead.
        rows: all of this as a table.
    """

    kernels: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    platform: str | None = None
    plain: bool = False
    warnings: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    profiles: tuple[Path, ...] = ()
    packages: str | None = None
    activations: Activations | None = None
    rows: tuple[SettingRow, ...] = field(default=(), compare=False, repr=False)

    def digest(self) -> str:
        """A short hash of everything that can change a plan or a result; colour and warnings do not count."""
        values = {v.field: getattr(self, v.field) for v in VARIABLES}
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Variable:
    """One environment variable: the field it fills, how it is read, and what people are told about it."""

    name: str
    field: str
    expected: str
    doc: str
    parse: Callable[[str], Any]
    unset: str
    """What happens where it is not set."""


class _Contradiction(ValueError):
    """A value that can be read and makes no sense."""


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


def _parts(text: str, separator: str = ",") -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _parse_pins(text: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for target, kernel in map(parse_pin, _parts(text)):
        if pins.setdefault(target, kernel) != kernel:
            raise _Contradiction(f"{target} is pinned to both {pins[target]} and {kernel}")
    return pins


def _parse_disable(text: str) -> tuple[str, ...]:
    names = _parts(text)
    for name in names:
        # A pattern of everything would leave no kernel; a name without a backend is a typo.
        if "." not in name or "=" in name:
            raise ValueError(name)
    return tuple(dict.fromkeys(names))


def _parse_threads(text: str) -> int:
    threads = int(text)
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(text)
    return threads


def _parse_activations(text: str) -> Activations | None:
    wanted = text.lower()
    for mode in _AITER_MODES:
        if wanted == mode:
            return mode
    if wanted != "auto":
        raise ValueError(text)
    return None


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "K3PORT_KERNELS",
        "kernels",
        "op[@phase]=kernel, several separated by commas, such as kda@decode=reference.kda,linear=cpu.linear",
        "Pins kernels, like --kernel: a plan keeps a pin or fails. An option --kernel for the same op replaces it.",
        _parse_pins,
        "kernels are chosen by platform and priority",
    ),
    Variable(
        "K3PORT_DISABLE",
        "disable",
        "names or patterns of kernels separated by commas, such as rocm.aiter_*,cuda.flashinfer_mla_trtllm",
        "Kernels that no plan may use. A pin of a kernel that only a pattern names is kept.",
        _parse_disable,
        "every kernel may be chosen",
    ),
    Variable(
        "K3PORT_ACTIVATIONS",
        "activations",
        "auto, bf16 (AITER's a16w4), mxfp8 (a8w4) or mxfp4 (a4w4)",
        "What routed experts may round their input to. AITER's own switches are derived from it.",
        _parse_activations,
        "the platform decides; no built-in one rounds",
    ),
    Variable(
        "K3PORT_PLATFORM",
        "platform",
        "the name of a platform profile, such as cpu",
        "The platform to run on or plan for, like --platform.",
        str,
        "cpu; a run takes this machine's GPU where every op has a kernel there",
    ),
    Variable(
        "K3PORT_PROFILES",
        "profiles",
        f"platform files separated by {os.pathsep!r}",
        "Files with own platforms, which may extend the built-in ones, like --profiles.",
        lambda text: tuple(Path(part) for part in _parts(text, os.pathsep)),
        "only the built-in platforms and those of plugins",
    ),
    Variable(
        "K3PORT_PACKAGES",
        "packages",
        "profile, host, or a file: requirements with exact versions, pip freeze, or JSON",
        "Which package versions a plan assumes, like --packages.",
        str,
        "host where the platform is this machine, else profile",
    ),
    Variable(
        "K3PORT_THREADS",
        "threads",
        f"a whole number from 1 to {MAX_THREADS}",
        "CPU threads of both phases, like --threads.",
        _parse_threads,
        "chosen per phase",
    ),
)

RETIRED: Mapping[str, str] = {}
"""Names that earlier versions read, and what replaced each. A name stays here for good."""

_GUESSES = (
    ("K3PORT_*BACK*ND*", "K3PORT_KERNELS"),
    ("K3PORT_*AITER*", "K3PORT_KERNELS or K3PORT_DISABLE"),
)
"""Names that people of other stacks would try, and what they mean here."""

_CHOICE = "K3PORT_KERNELS to pin a kernel, K3PORT_DISABLE to exclude one"
FOREIGN = (
    ("VLLM_ATTENTION_BACKEND", "K3PORT_KERNELS, such as mla_attend=KERNEL"),
    ("VLLM_ROCM_USE_AITER_MOE_SITUV2*", "K3PORT_ACTIVATIONS"),
    ("VLLM_ROCM_*", _CHOICE),
    ("VLLM_*ALLREDUCE*", "K3PORT_KERNELS, such as all_reduce=KERNEL"),
    ("VLLM_USE_*", _CHOICE),
    ("SGLANG_*AITER*", _CHOICE),
    ("SGLANG_*K3_*", _CHOICE),
)
"""Switches of other stacks that people leave set, and what does the same here. The first pattern that fits counts."""

_BOUND = "AITER_BF16_FP8_MOE_BOUND"
_OWNED = ("AITER_SITUV2_*", _BOUND)


def owned_environment(activations: Activations) -> dict[str, str]:
    """AITER's variables for one rounding of expert activations, to be set before AITER is imported.

    AITER reads each of them for itself, and its kernels read weights in the layout that belongs to the mode, so one
    wrong variable gives wrong numbers without an error. The bound would change the mode by batch size.
    """
    return {
        "AITER_SITUV2_A8W4": str(int(activations == "mxfp8")),
        "AITER_SITUV2_A4W4": str(int(activations == "mxfp4")),
        _BOUND: "0",
    }


def contradictions(environ: Mapping[str, str], activations: Activations) -> list[str]:
    """Variables that k3port owns and that ask for something else: name, value, and what it would have to be."""
    owned = owned_environment(activations)
    found = []
    for name in sorted(name for name in environ if any(fnmatch.fnmatchcase(name, pattern) for pattern in _OWNED)):
        value = environ[name].strip()
        if value and value != owned.get(name):
            wanted = f"must be {owned[name]} or unset" if name in owned else "is not known to k3port"
            found.append(f"{name} = {value}: {wanted}")
    return found


def export_owned(environ: MutableMapping[str, str], activations: Activations) -> None:
    """Sets AITER's variables in ``environ``; the only place where k3port changes an environment.

    For the adapter of AITER's experts, which has to call it with the environment of the process before AITER is
    imported: AITER copies the values once, at import. No such adapter exists in this version.

    Args:
        activations: the mode of the kernel that was chosen.

    Raises:
        UsageError: one of them is set to something else.
    """
    if found := contradictions(environ, activations):
        raise _contradiction_error(found, activations)
    environ.update(owned_environment(activations))


def _contradiction_error(found: Iterable[str], activations: Activations) -> UsageError:
    return UsageError(
        f"K3PORT_ACTIVATIONS = {activations} contradicts variables of AITER that k3port derives from it",
        reasons=found,
        hint="unset them: K3PORT_ACTIVATIONS alone decides",
    )


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Settings from a given environment; :func:`get_settings` uses that of the process.

    Raises:
        UsageError: values that cannot be read, or that contradict each other; all of them are named.
    """
    values: dict[str, Any] = {}
    bad: list[tuple[str, str]] = []
    rows: list[SettingRow] = []
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if not text:
            rows.append(SettingRow(variable.name, "", "default", variable.unset, "default"))
            continue
        rows.append(SettingRow(variable.name, text, "environment", variable.doc, "set"))
        try:
            values[variable.field] = variable.parse(text)
        except _Contradiction as exc:
            bad.append((f"{variable.name} = {text!r}", str(exc)))
        except ValueError:
            bad.append((f"{variable.name} = {text!r}", f"expected {variable.expected}"))
    _raise_bad(bad)
    plain = bool(environ.get("NO_COLOR")) or environ.get("TERM") == "dumb"
    found = Settings(**values, plain=plain)
    if both := [f"{op}={kernel}" for op, kernel in found.kernels.items() if kernel in found.disable]:
        raise UsageError(
            "K3PORT_KERNELS pins what K3PORT_DISABLE excludes", reasons=both, hint="drop it from one of the two"
        )
    others = list(_other_rows(environ, found))
    warnings = tuple(_warning(row) for row in others if row.kind != "not read")
    return Settings(**values, plain=plain, warnings=warnings, rows=(*rows, *others))


def _raise_bad(bad: list[tuple[str, str]]) -> None:
    if not bad:
        return
    first, expected = bad[0]
    if len(bad) == 1:
        raise UsageError(f"cannot read the environment variable {first}", hint=expected)
    raise UsageError(
        f"cannot read {len(bad)} environment variables",
        reasons=[f"{value}: {expected}" for value, expected in bad],
        hint="correct or unset them",
    )


def _other_rows(environ: Mapping[str, str], found: Settings) -> Iterable[SettingRow]:
    """Names that look like ours, switches of other stacks, and variables that k3port owns."""
    known = [variable.name for variable in VARIABLES]
    explicit = found.activations is not None
    mode = found.activations or "bf16"
    clashes = contradictions(environ, mode)
    if explicit and clashes:
        raise _contradiction_error(clashes, mode)
    for name in sorted(environ):
        value = environ[name]
        if name in RETIRED:
            yield SettingRow(name, value, "environment", f"was retired; use {RETIRED[name]}", "retired")
        elif name.startswith(PREFIX) and name not in known:
            yield SettingRow(name, value, "environment", f"is ignored; {_nearest(name, known)}", "unknown")
        elif any(clash.startswith(f"{name} = ") for clash in clashes):
            meant = [
                m for m in _AITER_MODES if value.strip() != "0" and owned_environment(m).get(name) == value.strip()
            ]
            advice = f"K3PORT_ACTIVATIONS{f'={meant[0]}' if meant else ''}"
            yield SettingRow(name, value, "environment", f"belongs to k3port: unset it and use {advice}", "owned")
        elif advice := next((text for pattern, text in FOREIGN if fnmatch.fnmatchcase(name, pattern)), ""):
            yield SettingRow(name, value, "environment", f"not read by k3port; use {advice}", "not read")


def _nearest(name: str, known: list[str]) -> str:
    # The common prefix would make all names look alike.
    suffixes = {k.removeprefix(PREFIX): k for k in known}
    near = difflib.get_close_matches(name.removeprefix(PREFIX), suffixes, n=1)
    guess = next((text for pattern, text in _GUESSES if fnmatch.fnmatchcase(name, pattern)), "")
    if near or guess:
        return f"did you mean {suffixes[near[0]] if near else guess}?"
    return f"known: {', '.join(known)}"


def _warning(row: SettingRow) -> str:
    if row.kind == "unknown":
        return f"unknown environment variable {row.name} {row.effect}"
    return f"environment variable {row.name} {row.effect}"


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


def get_environment(names: Iterable[str]) -> dict[str, str]:
    """Variables of others that detection looks at (device masks), as they are now, without those that are not set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def settings_report() -> list[SettingRow]:
    """All variables of k3port, then names that it noticed: what ``doctor --settings`` prints.

    Raises:
        UsageError: as :func:`read_settings`.
    """
    return list(get_settings().rows)
