"""Which package versions a plan assumes: the platform's, this machine's, or those of a file. No package is imported."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from k3port.errors import UsageError
from k3port.oracle.profile import Profile
from k3port.oracle.spec import KernelSpec
from k3port.oracle.symbols import missing_symbols

PROFILE, HOST = "profile", "host"


@dataclass(frozen=True)
class Packages:
    """Versions by canonical name, where they come from, and which symbols of kernels the installed ones lack."""

    versions: Mapping[str, str]
    source: str
    missing_symbols: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Outside:
    """A version outside the range that people have measured as good on a platform. A warning, never a refusal."""

    package: str
    version: str
    validated: str
    evidence: str

    def __str__(self) -> str:
        return (
            f"{self.package} {self.version} is outside the validated range {self.validated} of this platform "
            f"({self.evidence})"
        )


def assume_packages(choice: str | None, profile: Profile, specs: Iterable[KernelSpec], *, here: bool) -> Packages:
    """The versions that a plan for ``profile`` assumes.

    Args:
        choice: ``profile``, ``host``, or a file; None takes the host's where the platform is this machine.
        specs: all kernels of the registry; only their packages and symbols are looked up.
        here: whether this machine is the platform.

    Raises:
        UsageError: the file cannot be read.
    """
    if choice is None:
        choice = HOST if here else PROFILE
    if choice == PROFILE:
        return Packages(profile.packages, PROFILE)
    specs = list(specs)
    needed = needed_packages(specs) | set(profile.packages)
    if choice == HOST:
        symbols = {symbol for spec in specs for symbol in spec.requires.symbols}
        return Packages(host_versions(needed), HOST, frozenset(missing_symbols(symbols)))
    path = Path(choice)
    return Packages(read_packages(path, needed), path.name)


def needed_packages(specs: Iterable[KernelSpec]) -> set[str]:
    """Canonical names of all packages that some kernel requires."""
    return {canonicalize_name(Requirement(text).name) for spec in specs for text in spec.requires.packages}


def host_versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed here, from their metadata."""
    versions = {}
    for name in sorted(names):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # A folder of metadata without a version is left behind by a broken uninstall.
        if version:
            versions[canonicalize_name(name)] = version
    return versions


def outside_validated(profile: Profile, versions: Mapping[str, str]) -> list[Outside]:
    """Which of the assumed versions lie outside the ranges that the profile calls validated, with the evidence."""
    found = []
    for name, text in profile.validated.items():
        version = versions.get(name)
        if version is not None and not _within(version, text):
            evidence = profile.sources.get(f"validated.{name}", "no source")
            found.append(Outside(name, version, text, evidence))
    return found


def _within(version: str, text: str) -> bool:
    try:
        # A vendor's build of a release (3.7.0+rocm) is that release.
        return SpecifierSet(text).contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False


class _Line(ValueError):
    """What is wrong with one line."""


def read_packages(path: Path, needed: Iterable[str] = ()) -> dict[str, str]:
    """Versions by canonical name from a file: requirements with ``==``, the output of ``pip freeze``, or JSON.

    JSON is an object of versions by name, or the list of ``pip list --format json``.

    Args:
        needed: names that must come with a version if they are in the file; others without one are left out.

    Raises:
        UsageError: the file is absent or has a faulty line; names the first one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as exc:
        raise UsageError(
            f"cannot read the package file {path}", reasons=[exc.strerror or str(exc)], hint=_HINT
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read the package file {path}", reasons=["not UTF-8 text"], hint=_HINT) from None
    needed = {canonicalize_name(name) for name in needed}
    found: dict[str, str] = {}
    is_json = text.lstrip()[:1] in ("{", "[")
    for number, name, version in _from_json(path, text) if is_json else _from_lines(path, text):
        if version is None:
            if name in needed:
                raise _error(path, number, f"{name} has no exact version: write {name}==VERSION")
            continue
        try:
            Version(version)
        except InvalidVersion:
            raise _error(path, number, f"{name}: {version!r} is not a version") from None
        if found.setdefault(name, version) != version:
            raise _error(path, number, f"{name} is both {found[name]} and {version}")
    if not found:
        raise _error(path, 1, "no package with a version")
    return found


_HINT = "--packages takes profile, host, or a file such as pip freeze writes"


def _error(path: Path, line: int, text: str) -> UsageError:
    return UsageError(f"{path}:{line}: {text}", hint=_HINT)


def _from_json(path: Path, text: str) -> Iterable[tuple[int, str, str | None]]:
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as exc:
        raise _error(path, exc.lineno, f"not JSON: {exc.msg}") from None
    if isinstance(data, list):
        pairs = [(e.get("name"), e.get("version")) if isinstance(e, dict) else (e, None) for e in data]
    else:
        pairs = list(data.items())
    lines = text.splitlines()
    for name, version in pairs:
        # JSON keeps no positions: the first line with the name is where a reader would look.
        number = next((i for i, line in enumerate(lines, 1) if json.dumps(name) in line), 1)
        if not isinstance(name, str) or not isinstance(version, str):
            raise _error(path, number, f"expected a name and a version as text, found {name!r}: {version!r}")
        yield number, canonicalize_name(name), version


def _from_lines(path: Path, text: str) -> Iterable[tuple[int, str, str | None]]:
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = _requirement_line(line)
        except _Line as exc:
            raise _error(path, number, str(exc)) from None
        if entry is not None:
            yield number, *entry


def _requirement_line(line: str) -> tuple[str, str | None] | None:
    """Name and exact version of one line; None for a line that names no package."""
    line = re.sub(r"(^|\s)#.*", "", line).strip().rstrip("\\").strip()
    if not line or line.startswith("--hash"):
        return None
    if re.match(r"(-r|-c|--requirement|--constraint)\b", line):
        raise _Line("other files are not followed; write all packages into one file")
    if re.match(r"(-e|--editable)\b", line):
        egg = re.search(r"[#&]egg=([\w.-]+)", line)
        return (canonicalize_name(egg[1]), None) if egg else None
    if line.startswith("-"):
        return None
    try:
        requirement = Requirement(re.sub(r"\s--hash=.*", "", line))
    except InvalidRequirement as exc:
        raise _Line(f"not a requirement: {str(exc).splitlines()[0]}") from None
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    name = canonicalize_name(requirement.name)
    if requirement.url:
        return name, _wheel_version(requirement.url)
    exact = [s.version for s in requirement.specifier if s.operator in ("==", "===") and not s.version.endswith(".*")]
    return name, exact[0] if len(requirement.specifier) == 1 and exact else None


def _wheel_version(url: str) -> str | None:
    file = url.partition("#")[0].rpartition("/")[2].replace("%2B", "+")
    try:
        return str(parse_wheel_filename(file)[1])
    except InvalidWheelFilename:
        return None
