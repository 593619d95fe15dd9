"""KDA decode, interpreted, under many configurations: ``interpreted_kda_decode`` runs it in a process of its own."""

from __future__ import annotations

import pytest
from interpreted import interpreted

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")


def test_every_division_of_a_head_gives_the_same() -> None:
    errors = interpreted("interpreted_kda_decode")
    assert len(errors) == 11
    assert max(errors.values()) < 2e-6, errors
