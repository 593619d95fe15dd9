"""Imported first by what needs Triton's AMD backend: without Triton such a test module is skipped, with the reason."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.backends.amd.compiler", reason="Triton is not installed", exc_type=ImportError)
