"""Planting faults in the tiny Kimi K3 checkpoint, and what the check of a checkpoint says about them."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3port.errors import CheckpointError
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import EditFile, tiny_k3_config, write_checkpoint

LAYERS = "language_model.model.layers."
ATTENTION = LAYERS + "0.self_attn."
EXPERT = LAYERS + "2.block_sparse_moe.experts.3."
INDEX = "model.safetensors.index.json"
FILE_1, FILE_2, FILE_3, FILE_4 = (f"model-0000{number}-of-000005.safetensors" for number in (1, 2, 3, 4))


def faults_of(folder: Path, **options: bool) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder, **options)
    assert str(folder) in caught.value.message
    assert caught.value.hint
    return list(caught.value.reasons)


def edited(tmp_path: Path, edit: EditFile, values: dict[str, Any] | None = None) -> Path:
    return write_checkpoint(tmp_path / "edited", values or tiny_k3_config(), edit=edit)


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def drop(name: str) -> EditFile:
    return lambda tensors: tensors.pop(name, None)


def put(name: str, tensor: torch.Tensor) -> EditFile:
    """Adds or replaces a tensor in the file of its layer (or of the head)."""
    marker = name.split("layers.")[1].split(".")[0] if "layers." in name else None

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if any(f"layers.{marker}." in other if marker else "lm_head" in other for other in tensors):
            tensors[name] = tensor

    return edit
