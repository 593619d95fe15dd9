"""The check at the real size: seconds, from headers alone, in time linear in the number of tensors."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import time
from pathlib import Path

import pytest
from checkpoint_faults import INDEX
from shared_data import shared

from k3port.model.config_file import parse_config
from k3port.model.text_tensors import checkpoint_tensors, normalise_name
from k3port.model.vision_tensors import vision_tensors
from k3port.runtime.headers import StoredTensor
from k3port.runtime.preflight import check_checkpoint
from k3port.runtime.tensor_check import check_tensors
from k3port.testing.synthetic import tiny_k3_config


def test_the_published_checkpoint_passes_in_seconds_without_reading_weights(tmp_path: Path) -> None:
    """96 sparse files with the real headers and 1.56 TB of holes: only headers can have been read."""
    data = shared("data")
    values = json.loads((data / "kimi-k3.config.json").read_text())
    with gzip.open(data / "kimi-k3.model.safetensors.index.json.gz") as file:
        index = json.load(file)
    specs = {**dict(checkpoint_tensors(parse_config(values))), **vision_tensors(values["vision_config"])}
    by_file: dict[str, list[str]] = {}
    for name, file_name in index["weight_map"].items():
        by_file.setdefault(file_name, []).append(name)
    for file_name, names in by_file.items():
        header, position = {}, 0
        for name in names:
            spec = specs[normalise_name(name)]
            end = position + spec.num_bytes
            header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [position, end]}
            position = end
        raw = json.dumps(header).encode()
        with (tmp_path / file_name).open("wb") as out:
            out.write(struct.pack("<Q", len(raw)) + raw)
            try:
                out.truncate(8 + len(raw) + position)
            except OSError as exc:
                pytest.skip(f"this file system holds no sparse file of {position} bytes: {exc}")
    (tmp_path / INDEX).write_text(json.dumps(index))
    shutil.copy(data / "kimi-k3.config.json", tmp_path / "config.json")
    start = time.process_time()
    checkpoint = check_checkpoint(tmp_path, vision=True)
    seconds = time.process_time() - start
    assert len(checkpoint.tensors) == 497_220
    assert checkpoint.total_bytes == 1_560_860_324_864
    assert checkpoint.mxfp4_layers == set(range(1, 93))
    assert seconds < 15, f"{seconds:.1f} s of processor time"
    shutil.rmtree(tmp_path)


def test_the_time_is_linear_in_the_number_of_experts() -> None:
    def seconds(num_experts: int) -> float:
        values = tiny_k3_config()
        values["text_config"]["num_experts"] = num_experts
        config = parse_config(values)
        tensors = {
            name: StoredTensor(name, "f", 0, spec.num_bytes, spec.dtype, spec.shape)
            for name, spec in checkpoint_tensors(config)
        }
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            report = check_tensors(config, tensors)
            best = min(best, time.process_time() - start)
            assert not report.faults
        return best

    assert seconds(4000) < 12 * seconds(800)  # 5 times the tensors; a quadratic rule would take 25 times as long
