"""Checkpoints for the tests of this folder: one to damage, and one per family to load."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from loaded_weights import FAMILIES

from k3port.testing.synthetic import write_checkpoint


@pytest.fixture
def folder(tiny_k3_folder: Path, tmp_path: Path) -> Path:
    """A complete checkpoint that the test may damage."""
    return Path(shutil.copytree(tiny_k3_folder, tmp_path / "k3"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint per family. Tests must not change them."""
    base = tmp_path_factory.mktemp("loader")
    return {name: write_checkpoint(base / name, make()) for name, make in FAMILIES.items()}
