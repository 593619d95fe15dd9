"""Fixtures of the oracle's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from k3port.oracle.schema import SCHEMA

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write(text)`` makes a platform file with the right schema line above ``text``."""

    def run(text: str, name: str = "own.yaml", schema: str = f"schema: {SCHEMA}\n") -> Path:
        file = tmp_path / name
        file.write_text(schema + text, encoding="utf-8")
        return file

    return run
