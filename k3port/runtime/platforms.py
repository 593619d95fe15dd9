"""Platforms by name, from every place that can define one. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from k3port.errors import UsageError
from k3port.oracle.profile import Profile, builtin_file, check_kernels, get_profile
from k3port.plugins import Registry, default_registry
from k3port.settings import get_settings


def platform_files(extra: Sequence[Path] = (), *, registry: Registry | None = None) -> tuple[Path, ...]:
    """Platform files beside the built-in one: of plugins, of ``K3PORT_PROFILES``, then ``extra`` (``--profiles``)."""
    registry = default_registry() if registry is None else registry
    return tuple(dict.fromkeys((*registry.platforms, *get_settings().profiles, *map(Path, extra))))


def find_profile(name: str, extra: Sequence[Path] = (), *, registry: Registry | None = None) -> Profile:
    """One profile by name or alias, built-in or not.

    Args:
        extra: further platform files.
        registry: whose plugins may define platforms, and whose kernels a profile may name.

    Raises:
        UsageError: no such platform, a file with faults, or one that names a kernel which the registry does not have.
    """
    registry = default_registry() if registry is None else registry
    profile = get_profile(name, platform_files(extra, registry=registry))
    # The built-in file may name kernels that a given registry leaves out; what a user wrote is meant.
    own = [fault for fault in check_kernels([profile], registry.kernels) if not fault.startswith(f"{builtin_file()}:")]
    if own:
        raise UsageError(f"platform {profile.name} names kernels that do not exist", reasons=own)
    return profile
