"""The example in the emulator's document runs as it stands (from a file: Triton reads the source of kernels)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import amd_needs  # noqa: F401

from k3port.testing.amd_isa.registry import _MODULES, FAMILIES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "amd-emulator.md").read_text(encoding="utf-8")


def test_the_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```py\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{example}")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"double \d+ \(\)\n", done.stdout)


def test_every_family_has_its_file_in_the_table() -> None:
    assert len(FAMILIES) == len(_MODULES)
    for module in _MODULES:
        assert f"`{module.__name__.rsplit('.', 1)[1]}.py`" in TEXT
