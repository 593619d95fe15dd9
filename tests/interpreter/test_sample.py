"""Portable sampling, interpreted, against the reference: ``interpreted_sample`` runs it in a process of its own."""

from __future__ import annotations

import pytest
from interpreted import interpreted

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")


def test_rows_with_any_settings_give_the_ids_of_the_reference() -> None:
    wrong = interpreted("interpreted_sample")
    assert len(wrong) == 29
    assert not any(wrong.values()), wrong
