"""Results of compilations on disk, one small JSON file each, by everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.jit import JITFunction

from k3port.settings import get_environment
from k3port.testing.launches import Launch
from k3port.testing.xcompile import compiler, compute_units, measure
from k3port.testing.xcompile.compiler import Compiled


def source_hash(*modules: ModuleType) -> str:
    """A hash of the source files of some modules."""
    found = hashlib.sha256()
    for module in modules:
        found.update(Path(str(module.__file__)).read_bytes())
    return found.hexdigest()


RECORD_VERSION = source_hash(compiler, measure, compute_units)
"""Part of every key: whatever says what the records hold, and how it is measured."""


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/k3port/xcompile``, by default below ``~/.cache``."""
    base = get_environment(("XDG_CACHE_HOME",)).get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "k3port" / "xcompile"


def cache_key(launch: Launch) -> str:
    """A hash of the kernel's source with everything that it calls, the launch's form, the target, and Triton."""
    values = [
        RECORD_VERSION,
        triton.__version__,
        sorted(get_cache_invalidating_env_vars().items()),
        launch.arch,
        launch.function.cache_key,
        list(launch.signature.items()),
        [(path, _constant(value)) for path, value in launch.constants.items()],
        list(launch.attributes.items()),
        sorted(launch.options.items()),
    ]
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()


def _constant(value: Any) -> str:
    # The type too: True and 1 are other constants.
    text = value.cache_key if isinstance(value, JITFunction) else str(value)
    return f"{type(value).__name__} {text}"


class Cache:
    """A folder of results. Several processes may share it: files appear whole, and a damaged one counts as absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> Compiled | None:
        try:
            return Compiled.from_dict(json.loads(self._file(key).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, found: Compiled) -> None:
        """Raises:
        OSError: the folder cannot be made or written.
        """
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8") as stream:
            try:
                json.dump(found.to_dict(), stream)
                stream.close()
                os.replace(stream.name, file)
            except BaseException:
                # A full disk, or an interrupt: no half a file stays behind.
                Path(stream.name).unlink(missing_ok=True)
                raise

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
