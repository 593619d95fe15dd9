"""Portable sampling, interpreted, against the reference: ``interpreted_sample`` runs it in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")


def test_rows_with_any_settings_give_the_ids_of_the_reference() -> None:
    path = f"PYTHONPATH={os.pathsep.join(sys.path)}"
    command = ["env", "TRITON_INTERPRET=1", path, sys.executable, "-m", "interpreted_sample"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout)
    assert len(wrong) == 29
    assert not any(wrong.values()), wrong
