"""Runs a module of this folder in Triton's interpreter: in its own process, as Triton chooses it when imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def interpreted(module: str) -> Any:
    """What the module prints, read as JSON."""
    path = f"PYTHONPATH={os.pathsep.join(sys.path)}"
    command = ["env", "TRITON_INTERPRET=1", path, sys.executable, "-m", module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
