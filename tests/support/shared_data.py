"""Data outside the repository, beside it in ``../shared``: tests that need it are skipped where it is absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SHARED = Path(__file__).resolve().parents[3] / "shared"


def has_shared(relative: str) -> bool:
    return (SHARED / relative).exists()


def shared(relative: str) -> Path:
    """A path below ``../shared``; skips the test where it does not exist."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the repository")
    return path


def shared_tensors(relative: str) -> dict[str, torch.Tensor]:
    """All tensors of one safetensors file below ``../shared``."""
    return load_file(shared(relative))
