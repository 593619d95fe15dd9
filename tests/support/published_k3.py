"""The published Kimi K3 configuration, for tests that count what the real model stores and holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from shared_data import SHARED

from k3port.model.config import ModelConfig
from k3port.model.config_file import parse_config

DATA = SHARED / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"published K3 config and index not found in {DATA}")


@pytest.fixture(scope="session")
def k3_values() -> dict[str, Any]:
    return json.loads((DATA / "kimi-k3.config.json").read_text())


@pytest.fixture(scope="session")
def k3(k3_values: dict[str, Any]) -> ModelConfig:
    return parse_config(k3_values)
