"""platforms.yaml: what is known of a platform without having it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import yaml

from k3port.errors import K3Error, UsageError
from k3port.oracle.spec import Device, Target, Vendor

SCHEMA = 1
_FIELDS = {"vendor", "arch", "description", "activations", "sources"}
_ACTIVATIONS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Profile:
    """One platform. ``activations`` is the default dtype of a run on it."""

    name: str
    vendor: Vendor
    arch: str
    description: str
    activations: str

    def target(self) -> Target:
        """The platform as a target of the resolver."""
        return Target(self.name, Device(self.vendor, self.arch, self.name, "profile"))


def builtin_file() -> Path:
    """The packaged ``platforms.yaml``; in a source checkout, the one at its root."""
    packaged = Path(str(resources.files("k3port"))) / "platforms.yaml"
    return packaged if packaged.exists() else packaged.parent.parent / "platforms.yaml"


@cache
def load_profiles(file: Path | None = None) -> dict[str, Profile]:
    """All profiles of a platform file, by name.

    Raises:
        K3Error: the file is absent, is not YAML, or holds an unknown or broken entry; all faults are listed.
    """
    path = builtin_file() if file is None else file
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise K3Error(f"cannot read {path}", reasons=[str(exc.strerror or exc)], hint="reinstall k3port") from None
    except yaml.YAMLError as exc:
        raise K3Error(f"{path} is not valid YAML", reasons=[" ".join(str(exc).split())]) from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("platforms"), dict):
        raise K3Error(f"{path} is not a platform file", reasons=[f"expected schema: {SCHEMA} and platforms:"])
    faults: list[str] = []
    profiles: dict[str, Profile] = {}
    for name, entry in data["platforms"].items():
        if not isinstance(entry, dict):
            faults.append(f"{name}: expected a mapping")
            continue
        for key in entry.keys() - _FIELDS:
            near = difflib.get_close_matches(str(key), _FIELDS, n=1)
            faults.append(f"{name}.{key}: unknown key" + (f", did you mean {near[0]}?" if near else ""))
        if entry.get("vendor") not in get_args(Vendor):
            faults.append(f"{name}.vendor = {entry.get('vendor')!r}: expected {', '.join(get_args(Vendor))}")
        if entry.get("activations") not in _ACTIVATIONS:
            faults.append(f"{name}.activations = {entry.get('activations')!r}: expected {', '.join(_ACTIVATIONS)}")
        profiles[name] = Profile(
            name=name,
            vendor=entry.get("vendor", "cpu"),
            arch=str(entry.get("arch", "")),
            description=str(entry.get("description", "")),
            activations=str(entry.get("activations", "")),
        )
    if faults:
        raise K3Error(f"{path} has faults", reasons=faults)
    return profiles


def get_profile(name: str) -> Profile:
    """One built-in profile.

    Raises:
        UsageError: no such platform; names the nearest one.
    """
    profiles = load_profiles()
    if name not in profiles:
        near = difflib.get_close_matches(name, profiles, n=1)
        listing = f"platforms: {', '.join(sorted(profiles))}"
        raise UsageError(f"unknown platform {name!r}", hint=f"did you mean {near[0]}? {listing}" if near else listing)
    return profiles[name]
