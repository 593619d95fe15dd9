"""The portable kernels inside the whole model, chosen by a plan for a GPU: in Triton's interpreter, in a process apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be interpreted")

ROOT = Path(__file__).parents[2]
BOUND = 6e-6
"""Relative RMS in float32 against the CPU's own kernels, as for results of the official code."""


def interpreted(folder: Path) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/interpreted_run.py"), str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("folder", ["tiny_k3_folder", "tiny_linear_folder"])
def test_a_plan_for_a_gpu_gives_the_numbers_of_the_cpu(request: pytest.FixtureRequest, folder: str) -> None:
    found = interpreted(request.getfixturevalue(folder))
    portable = {slot for slot, kernel in found["kernels"].items() if kernel.startswith("portable.")}
    assert {"linear", "logits", "embed", "rms_norm", "situ_mul", "sample"} <= portable
    assert "attn_res" in portable or "linear" in folder
    assert not any(kernel.startswith("cpu.") for kernel in found["kernels"].values())
    assert max(found["errors"].values()) < BOUND, found["errors"]
    assert found["tokens"]["gpu"] == found["tokens"]["cpu"]
    # Steps of 5, 1 and 2 prompt tokens share three steps; then two more. The reference of the experts looks its rows up.
    assert set(found["waits"]) <= {"tolist", "nonzero"}, found["waits"]
    assert found["waits"]["tolist"] <= 6
    halves = found["bfloat16"]
    assert halves["dtype"] == "bfloat16"
    assert halves["error"] < 2 * halves["plain"], halves
