"""The tokenizer in other processes: it needs no torch, and loads eight times at once without running foreign code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from small_tokenizer import config_of, write_folder

from k3port.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_import_needs_no_torch() -> None:
    code = "import sys, k3port.text.tokenizer; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


LOAD_TEN_TIMES = """
import sys
from k3port.text.tokenizer import Tokenizer
for _ in range(10):
    tokenizer = Tokenizer.from_folder(sys.argv[1])
assert not {"transformers", "probe_remote_code"} & set(sys.modules)
print(tokenizer.encode_control(sys.argv[2]))
"""


def test_b64_eight_processes_load_at_once_and_run_nothing(tmp_path: Path, tok: Tokenizer) -> None:
    folder, cache, ran = write_folder(tmp_path / "checkpoint"), tmp_path / "modules", tmp_path / "ran"
    cache.mkdir()
    config = config_of() | {"auto_map": {"AutoTokenizer": ["probe_remote_code.Tokenizer", None]}}
    write_folder(folder, config=config)
    (folder / "probe_remote_code.py").write_text(f"open({str(ran)!r}, 'w')\n")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    text = "<|open|>the theme<|sep|>"
    environment = os.environ | {"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOAD_TEN_TIMES, str(folder), text]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert json.loads(out) == tok.encode_control(text)
    assert not list(cache.iterdir()) and not ran.exists()
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
