"""Gathers what doctor's checks judge: the system, settings, devices, packages, plugins, platform and model.

Nothing here imports torch or a vendor package. What cannot be gathered becomes a fact too; only a name that the user
gave and that does not exist is an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform as host_platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3port import __version__
from k3port.cli.inputs import EMBEDDED_NAME
from k3port.cli.question import ask, read_model
from k3port.errors import CheckpointError, K3Error, UsageError
from k3port.model.config import ModelConfig
from k3port.oracle.checks import Facts, ModelFacts, SystemFacts, gib
from k3port.oracle.detect import Detection
from k3port.oracle.host import fitting_profiles, is_here
from k3port.oracle.package_checks import MODULES, OPTIONAL
from k3port.oracle.packages import host_versions, needed_packages
from k3port.oracle.profile import Profile, check_kernels, get_profile, load_profiles
from k3port.oracle.sources import ask_child
from k3port.oracle.spec import Plan
from k3port.plugins import ENTRY_POINT_GROUP, Registry, default_registry
from k3port.runtime.preflight import GENERATION_NAME, check_checkpoint, generation_eos_ids
from k3port.runtime.prepare import detect_here
from k3port.settings import Settings, get_environment, get_settings, settings_report
from k3port.text.loading import load_tokenizer

REQUIRED = ("click", "packaging", "pluggy", "pyyaml", "tiktoken")
ROOT = Path("/")
_IMPORT_SECONDS = 60.0


@dataclass(frozen=True)
class DoctorOptions:
    """What the command line asks for."""

    platform: str | None = None
    model: str | None = None
    tp: int | None = None
    deep: bool = False
    profiles: tuple[Path, ...] = ()


def gather(options: DoctorOptions) -> tuple[Facts, Registry]:
    """All facts, and the registry whose checks judge them.

    Raises:
        UsageError: ``--platform`` names no platform.
    """
    settings, settings_error = Settings(), ""
    rows: tuple[Any, ...] = ()
    try:
        settings = get_settings()
        rows = tuple(settings_report())
    except UsageError as exc:
        settings_error = _sentence(exc)
    registry = default_registry()
    detection = detect_here(registry)
    files = (*registry.platforms, *settings.profiles, *options.profiles)
    profiles, profiles_error = _profiles(options, files)
    choice = _platform(options, settings, detection, profiles, files)
    profile = choice.profile
    here = profile is None or is_here(profile, detection.devices)
    plan, plan_error = None, ""
    if profile is not None and not settings_error:
        plan, plan_error = _plan(options, profile)
    names = {"torch", *REQUIRED, *(name for names in OPTIONAL.values() for name in names)}
    names |= needed_packages(registry.kernels)
    if profile is not None:
        names |= {*profile.packages, *profile.validated}
    packages = host_versions(names)
    return (
        Facts(
            version=__version__,
            system=_system(ROOT),
            settings=rows,
            settings_digest=settings.digest(),
            settings_error=settings_error,
            detection=detection,
            packages=packages,
            required=REQUIRED,
            imports=_try_imports(packages) if options.deep else None,
            plugins=_installed_plugins(),
            plugin_problems=registry.problems,
            clash="; ".join(registry.clashes),
            profiles=tuple(sorted(profiles)),
            profiles_error=profiles_error,
            profile_faults=tuple(check_kernels(profiles.values(), registry.kernels)),
            profile=profile,
            platform_source=choice.source,
            platform_choices=choice.fitting,
            platform_error=choice.error,
            here=here,
            tp=options.tp or 1,
            kernels=registry.kernels,
            plan=plan,
            plan_error=plan_error,
            model=None if options.model is None else _model(options.model),
        ),
        registry,
    )


def _sentence(error: K3Error) -> str:
    return "; ".join(part for part in (error.message, *error.reasons, error.hint) if part)


def _installed_plugins() -> tuple[str, ...]:
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return tuple(f"{p.name} ({p.dist.name} {p.dist.version})" if p.dist else p.name for p in points)


def _try_imports(packages: Mapping[str, str]) -> dict[str, str]:
    """Why an installed package cannot be imported, by name; each is tried in a process of its own."""
    optional = dict.fromkeys(("torch", *(name for names in OPTIONAL.values() for name in names)))
    return {
        name: ask_child(f"import {MODULES.get(name, name.replace('-', '_'))}", _IMPORT_SECONDS).error
        for name in optional
        if name in packages
    }


def _system(root: Path) -> SystemFacts:
    rdma = list((root / "sys/class/infiniband").glob("*"))
    verbs = list((root / "dev/infiniband").glob("uverbs*"))
    return SystemFacts(
        python=host_platform.python_version(),
        system=f"{host_platform.system()} {host_platform.machine()}",
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        rdma_devices=len(rdma),
        rdma_openable=any(os.access(path, os.R_OK | os.W_OK) for path in verbs),
        shared_memory_bytes=_file_system_bytes(root / "dev/shm"),
        address=get_environment(["MASTER_ADDR"]).get("MASTER_ADDR", ""),
    )


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def _file_system_bytes(path: Path) -> int | None:
    try:
        found = os.statvfs(path)
    except (AttributeError, OSError):
        return None
    return found.f_frsize * found.f_blocks


def _profiles(options: DoctorOptions, files: tuple[Path, ...]) -> tuple[dict[str, Profile], str]:
    """All platforms, or why their files cannot be read; files of the command line have to be right."""
    try:
        return load_profiles(files), ""
    except K3Error as exc:
        if options.profiles and isinstance(exc, UsageError):
            raise
        return {}, _sentence(exc)


@dataclass(frozen=True)
class _Choice:
    """The platform to look at, why this one, and what else would fit; ``error`` where there is none."""

    profile: Profile | None = None
    source: str = ""
    fitting: tuple[str, ...] = ()
    error: str = ""


def _platform(
    options: DoctorOptions,
    settings: Settings,
    detection: Detection,
    profiles: Mapping[str, Profile],
    files: tuple[Path, ...],
) -> _Choice:
    if options.platform is not None:
        return _Choice(get_profile(options.platform, files), "from --platform")
    if not profiles:
        return _Choice()
    if settings.platform:
        try:
            return _Choice(get_profile(settings.platform, files), "from K3PORT_PLATFORM")
        except UsageError as exc:
            return _Choice(error=f"K3PORT_PLATFORM: {_sentence(exc)}")
    gpus = next((detection.visible[vendor] for vendor in detection.vendors if detection.visible.get(vendor)), ())
    fitting = fitting_profiles(gpus[0], profiles) if gpus else []
    if fitting:
        names = tuple(profile.name for profile in fitting)
        return _Choice(fitting[0], f"recognised by its architecture {fitting[0].arch}", names)
    reason = f"no platform is known for {gpus[0].device.arch}" if gpus else "no GPU is visible"
    return _Choice(profiles.get("cpu"), reason)


def _plan(options: DoctorOptions, profile: Profile) -> tuple[Plan | None, str]:
    given = {
        "model": options.model,
        "platform": profile.name,
        "dtype": None,
        "kv_dtype": None,
        "activations": None,
        "tp": options.tp,
        "ep": None,
        "pp": None,
        "draft_tokens": 0,
        "graphs": None,
        "deterministic": False,
        "packages": None,
        "profiles": options.profiles,
        "kernels": (),
    }
    try:
        return ask(given, profile.name).plan(), ""
    except CheckpointError as exc:
        # An installation without the embedded model can still be looked at; a model that was named has to be there.
        return None, "" if options.model is None and EMBEDDED_NAME in exc.message else _sentence(exc)
    except K3Error as exc:
        return None, _sentence(exc)


def _model(path: str) -> ModelFacts:
    try:
        config = read_model(path).config
    except K3Error as exc:
        return ModelFacts(path, error=_sentence(exc))
    place = Path(path)
    folder = place if place.is_dir() else place.parent
    weights, faults = "config.json alone: no weight files to check", ()
    if place.is_dir() and any(folder.glob("*.safetensors*")):
        try:
            checkpoint = check_checkpoint(folder)
            weights = f"{len(checkpoint.files)} weight file(s) complete, {gib(checkpoint.total_bytes)}"
        except K3Error as exc:
            weights, faults = "", (exc.message, *exc.reasons)
    broken: list[str] = []
    stop_ids = _stop_ids(folder, config, broken)
    # The check of a whole checkpoint has named these already.
    faults = tuple(dict.fromkeys((*faults, *broken)))
    return ModelFacts(path, "", _layers(config), stop_ids, weights, faults)


def _layers(config: ModelConfig) -> str:
    kda = len(config.kda_layers)
    parts = [f"{config.num_layers} layers: {kda} KDA, {config.num_layers - kda} MLA"]
    if config.moe is not None:
        moe = config.moe
        count = sum(config.is_moe(layer) for layer in range(config.num_layers))
        parts.append(f"{count} of them with {moe.num_experts} experts, {moe.top_k} per token, {moe.num_shared} shared")
    parts.append(f"context {config.max_context_tokens} tokens")
    return f"{config.family}, {'; '.join(parts)}"


def _stop_ids(folder: Path, config: ModelConfig, faults: list[str]) -> dict[str, tuple[int, ...]]:
    """Where a text ends, by the place that says so; what cannot be read is added to ``faults``."""
    found = {"config.json": config.eos_ids}
    found[GENERATION_NAME] = tuple(sorted(generation_eos_ids(folder, config.vocab_size, faults)))
    try:
        tokenizer = load_tokenizer(folder, config.vocab_size)
        found["tokenizer"] = tuple(sorted(tokenizer.stop_ids)) if tokenizer is not None else ()
    except K3Error:
        pass
    return {source: ids for source, ids in found.items() if ids}
