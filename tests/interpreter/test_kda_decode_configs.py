"""KDA decode, interpreted, under many configurations: ``interpreted_kda_decode`` runs it in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")


def test_every_division_of_a_head_gives_the_same() -> None:
    path = f"PYTHONPATH={os.pathsep.join(sys.path)}"
    command = ["env", "TRITON_INTERPRET=1", path, sys.executable, "-m", "interpreted_kda_decode"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 11
    assert max(errors.values()) < 2e-6, errors
