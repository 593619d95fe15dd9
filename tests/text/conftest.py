"""The small tokenizer, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tokenizer import BASE, write_folder

from k3port.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the small tokenizer. Tests must not change them."""
    return write_folder(tmp_path_factory.mktemp("tokenizer") / "small")


@pytest.fixture(scope="session")
def tok(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, BASE + 256)
