"""platforms.yaml: what is known of a platform without having it, and how user files extend it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from packaging.utils import canonicalize_name

from k3port.errors import K3Error, UsageError
from k3port.oracle.schema import Entry, Faults, did_you_mean, leaves, own_source, read_file
from k3port.oracle.spec import Device, KernelSpec, Target, Vendor

_REQUIRED = ("vendor", "arch", "activations")


@dataclass(frozen=True)
class Profile:
    """One platform, everything it extends included. Sizes are 0 and rates empty where unknown.

    Attributes:
        name: id in the platform file.
        aliases: other names of it.
        activations: default dtype of a run.
        memory_bytes: memory of one device, as the vendor states it.
        usable_share: share of it that a plan may use; what a plan counts itself (captured graphs) is not taken off.
        memory_bytes_per_s: memory bandwidth of one device.
        lds_bytes: shared memory per block (NVIDIA) or LDS per workgroup (AMD).
        fp8: flavour of 8-bit floats in hardware: ``e4m3fn``, ``e4m3fnuz`` or ``none``.
        peak_tflops: dense peak by ``bfloat16``, ``fp8``, ``fp4``.
        domain_gpus: devices that reach each other without leaving the scale-up network.
        interconnect_bytes_per_s: both directions of one device's links together.
        packages: versions that plans assume, by canonical name.
        validated: range of versions that people have measured as good, by canonical name.
        kernels: preferences by op; disable: why, by kernel name.
        settings: defaults of settings that differ on this platform.
        sources: where each value comes from, by dotted path of the file.
        places: ``file:line`` of each value.
    """

    name: str
    vendor: Vendor
    arch: str
    activations: str
    product: str = ""
    description: str = ""
    aliases: tuple[str, ...] = ()
    memory_bytes: int = 0
    usable_share: float = 1.0
    memory_bytes_per_s: int = 0
    memory_kind: str = ""
    lds_bytes: int = 0
    compute_units: int = 0
    wavefront: int = 0
    fp8: str = "none"
    native_fp4: bool = False
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    gpus_per_node: int = 1
    domain_gpus: int = 1
    interconnect: str = ""
    interconnect_bytes_per_s: int = 0
    runtime: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    validated: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    disable: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def target(
        self,
        packages: Mapping[str, str] | None = None,
        packages_source: str = "profile",
        *,
        missing_symbols: frozenset[str] = frozenset(),
        disabled: Mapping[str, str] | None = None,
        allow_reference: bool = True,
    ) -> Target:
        """The platform as a target of the resolver.

        Args:
            packages: versions to assume; None takes the profile's.
            packages_source: where they come from, for messages.
            missing_symbols: what the installed packages lack.
            disabled: kernels to leave out beside those of the profile, with the reason.
            allow_reference: whether fallbacks may run on a GPU.
        """
        versions = self.packages if packages is None else packages
        return Target(
            platform=self.name,
            device=Device(
                self.vendor,
                self.arch,
                self.product or self.name,
                "profile",
                count=self.gpus_per_node,
                memory_bytes=self.memory_bytes,
                lds_bytes=self.lds_bytes,
                compute_units=self.compute_units,
            ),
            packages={canonicalize_name(name): version for name, version in versions.items()},
            packages_source=packages_source,
            runtime=self.runtime,
            features=self.features,
            preferences=self.kernels,
            disabled={**self.disable, **(disabled or {})},
            missing_symbols=missing_symbols,
            allow_reference=allow_reference,
        )


def builtin_file() -> Path:
    """The packaged ``platforms.yaml``; in a source checkout, the one at its root."""
    packaged = Path(str(resources.files("k3port"))) / "platforms.yaml"
    return packaged if packaged.exists() else packaged.parent.parent / "platforms.yaml"


def load_profiles(files: Sequence[Path] = ()) -> dict[str, Profile]:
    """All profiles by name: the built-in ones and those of ``files``, which may extend them.

    Raises:
        UsageError: a file of ``files`` is absent, is not YAML, or has faults; all of them are listed with their lines.
        K3Error: the same of the built-in file.
    """
    return dict(_load((builtin_file(), *(Path(file) for file in files))))


@cache
def load_entries(file: Path) -> tuple[Entry, ...]:
    """The entries of one file as they stand there, without what they extend.

    Raises:
        K3Error: as :func:`load_profiles`.
    """
    faults = Faults()
    entries = tuple(_read(file, faults))
    _raise_faults(faults)
    return entries


@cache
def _load(files: tuple[Path, ...]) -> dict[str, Profile]:
    faults = Faults()
    entries = [entry for file in files for entry in _read(file, faults)]
    by_name: dict[str, Entry] = {}
    for entry in entries:
        if (first := by_name.setdefault(entry.name, entry)) is not entry:
            faults.add(entry.file, entry.line, f"{entry.name} is already defined in {first.place()}")
    _check_names(by_name, faults)
    profiles: dict[str, Profile] = {}
    for entry in by_name.values():
        chain = _chain(entry, by_name, faults)
        if entry.kind == "platform" and chain is not None:
            profile = _merge(chain, faults)
            if profile is not None:
                profiles[entry.name] = profile
    _raise_faults(faults)
    return profiles


def _read(file: Path, faults: Faults) -> list[Entry]:
    try:
        return read_file(file, file.read_text(encoding="utf-8"), faults)
    except OSError as exc:
        raise _error(file, f"cannot read {file}", exc.strerror or type(exc).__name__) from None
    except UnicodeDecodeError:
        raise _error(file, f"{file} is not valid YAML", "not UTF-8 text") from None
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(exc, "problem", None) or " ".join(str(exc).split())
        raise _error(file, f"{file} is not valid YAML", f"{line}{problem}") from None


def _error(file: Path, message: str, *reasons: str) -> K3Error:
    if file == builtin_file():
        return K3Error(message, reasons=reasons, hint="reinstall k3port")
    return UsageError(message, reasons=reasons, hint="correct it, or leave it out of --profiles and K3PORT_PROFILES")


def _raise_faults(faults: Faults) -> None:
    if not faults.found:
        return
    files = sorted({file for file, _, _ in faults.found})
    count = len(faults.lines())
    what = f"{count} fault{'s' if count > 1 else ''}"
    # A user's file is named first: the built-in one has faults only because of it.
    users = [file for file in files if file != builtin_file()]
    raise _error(
        (users or files)[0], f"{' and '.join(map(str, files))} {'has' if len(files) == 1 else 'have'} {what}",
        *faults.lines(),
    )  # fmt: skip


def normalise(name: str) -> str:
    """Names are compared without case, spaces, hyphens and underscores."""
    return re.sub(r"[-_ ]", "", name.casefold())


def _check_names(by_name: Mapping[str, Entry], faults: Faults) -> None:
    """No two names or aliases may read the same."""
    taken: dict[str, tuple[str, Entry]] = {}
    for entry in by_name.values():
        other = taken.setdefault(normalise(entry.name), (entry.name, entry))
        if other[1] is not entry:
            faults.add(entry.file, entry.line, f"{entry.name} reads like {other[0]} in {other[1].place()}")
    for entry in by_name.values():
        for alias in entry.values.get("aliases") or ():
            name, other_entry = taken.setdefault(normalise(alias), (alias, entry))
            if other_entry is not entry:
                line = entry.lines["aliases"]
                owner = f"the name {name}" if name == other_entry.name else f"an alias of {other_entry.name}"
                faults.add(
                    entry.file, line, f"{entry.name}.aliases: {alias} is already {owner} in {other_entry.place()}"
                )


def _chain(entry: Entry, by_name: Mapping[str, Entry], faults: Faults) -> list[Entry] | None:
    """The entry after everything it extends, the farthest first; None where that is impossible."""
    chain = [entry]
    while (base := chain[0].values.get("extends")) is not None:
        first = chain[0]
        line = first.lines["extends"]
        if base not in by_name:
            faults.add(first.file, line, f"{first.name}.extends: no platform {base!r}{did_you_mean(base, by_name)}")
            return None
        if by_name[base] in chain:
            circle = " -> ".join([*(e.name for e in reversed(chain)), base])
            faults.add(first.file, line, f"{first.name}.extends: a circle: {circle}")
            return None
        chain.insert(0, by_name[base])
    return chain


_OWN = ("extends", "aliases", "description", "sources")
"""Keys that belong to one entry and are not passed on."""


def _merge(chain: Sequence[Entry], faults: Faults) -> Profile | None:
    last = chain[-1]
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    places: dict[str, str] = {}
    for entry in chain:
        passed = {key: value for key, value in entry.values.items() if key not in _OWN}
        _overlay(values, passed)
        for path in leaves(passed):
            sources[path] = own_source(entry, path) or f"set in {entry.place(path)}"
            places[path] = entry.place(path)
    present = set(leaves(values))
    missing = [key for key in _REQUIRED if values.get(key) is None]
    if missing:
        # A value of a wrong type has been reported already and is missing only because of that.
        told = {line for file, line, _ in faults.found if file == last.file}
        if not told & {last.line, *last.lines.values()}:
            faults.add(last.file, last.line, f"{last.name}: {' and '.join(missing)} missing")
        return None
    memory, links = values.get("memory", {}), values.get("interconnect", {})
    return Profile(
        name=last.name,
        vendor=values["vendor"],
        arch=values["arch"],
        activations=values["activations"],
        product=values.get("product", ""),
        description=last.values.get("description") or "",
        aliases=tuple(last.values.get("aliases") or ()),
        memory_bytes=memory.get("bytes", 0),
        usable_share=memory.get("usable_share", 1.0),
        memory_bytes_per_s=memory.get("bytes_per_s", 0),
        memory_kind=memory.get("kind", ""),
        lds_bytes=values.get("lds_bytes", 0),
        compute_units=values.get("compute_units", 0),
        wavefront=values.get("wavefront", 0),
        fp8=values.get("fp8", "none"),
        native_fp4=values.get("native_fp4", False),
        peak_tflops=values.get("peak_tflops", {}),
        features=frozenset(values.get("features", ())),
        gpus_per_node=values.get("gpus_per_node", 1),
        domain_gpus=links.get("domain_gpus", values.get("gpus_per_node", 1)),
        interconnect=links.get("kind", ""),
        interconnect_bytes_per_s=links.get("bytes_per_s", 0),
        runtime=values.get("runtime", {}),
        packages={canonicalize_name(name): version for name, version in values.get("packages", {}).items()},
        validated={canonicalize_name(name): text for name, text in values.get("validated", {}).items()},
        kernels={op: tuple(names) for op, names in values.get("kernels", {}).items()},
        disable=values.get("disable", {}),
        settings=values.get("settings", {}),
        notes=tuple(values.get("notes", ())),
        sources={path: source for path, source in sources.items() if path in present},
        places={path: place for path, place in places.items() if path in present},
    )


def _overlay(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Mappings are merged key by key, everything else is replaced, None removes."""
    for key, value in over.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, Mapping):
            inner = dict(base.get(key, {}))
            _overlay(inner, value)
            base[key] = inner
        else:
            base[key] = value


def get_profile(name: str, files: Sequence[Path] = ()) -> Profile:
    """One profile by name or alias, in any case.

    The name of an architecture is accepted where only one platform has it. ``gfx950`` is two products with different
    peaks, so it is refused with both names instead of guessed.

    Raises:
        UsageError: no such platform, or an architecture of several; names the nearest ones.
        K3Error: as :func:`load_profiles`.
    """
    profiles = load_profiles(files)
    wanted = normalise(name)
    spellings = {normalise(text): p for p in profiles.values() for text in (p.name, *p.aliases)}
    if wanted in spellings:
        return spellings[wanted]
    of_arch = [p for p in profiles.values() if normalise(p.arch) == wanted]
    if len(of_arch) == 1:
        return of_arch[0]
    if of_arch:
        names = sorted(p.name for p in of_arch)
        raise UsageError(
            f"{name} is the architecture of {' and '.join(names)}, which differ in size and speed",
            hint=f"choose one: --platform {names[0]}",
        )
    raise UsageError(f"unknown platform {name!r}", hint=_nearest(name, profiles))


def _nearest(name: str, profiles: Mapping[str, Profile]) -> str:
    spellings = {text: p.name for p in profiles.values() for text in (p.name, *p.aliases)}
    near = did_you_mean(name.casefold(), spellings)
    listing = f"platforms: {', '.join(sorted(profiles))}"
    return f"{near.removeprefix('; ')} {listing}" if near.endswith("?") else listing


def check_kernels(profiles: Iterable[Profile], specs: Iterable[KernelSpec]) -> list[str]:
    """Kernel names in ``kernels`` and ``disable`` that the registry does not have, or has for another op, with lines.

    Apart from loading, since profiles must load where no plugin is.
    """
    by_name = {spec.name: spec.op for spec in specs}
    faults: dict[str, None] = {}
    for profile in profiles:
        named = [(f"kernels.{op}", op, kernel) for op, kernels in profile.kernels.items() for kernel in kernels]
        named += [(f"disable.{kernel}", None, kernel) for kernel in profile.disable]
        for path, op, kernel in named:
            place = profile.places[path]
            if kernel not in by_name:
                same = [name for name, other in by_name.items() if op in (None, other)]
                faults[f"{place}: {path}: no kernel {kernel}{did_you_mean(kernel, same)}"] = None
            elif op not in (None, by_name[kernel]):
                faults[f"{place}: {path}: {kernel} is a kernel of {by_name[kernel]}"] = None
    return list(faults)
