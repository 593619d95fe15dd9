"""Files that changed after the check, and files whose tensors are not aligned."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from loaded_weights import load, same, tensor

from k3port.errors import CheckpointError
from k3port.ops.moe_weights import keep_stored
from k3port.runtime.loader import load_weights
from k3port.runtime.preflight import Checkpoint, check_checkpoint

BF16 = torch.bfloat16


def test_a_file_that_changed_after_the_check_is_not_read(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(folders["k3"], tmp_path / "changed"))
    checkpoint = check_checkpoint(folder)
    path = folder / "model-00003-of-000005.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4096])
    with pytest.raises(CheckpointError, match="changed after it was checked"):
        load_weights(checkpoint, dtype=BF16, pack_experts=keep_stored)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        load_weights(checkpoint, dtype=BF16, pack_experts=keep_stored)


def test_unaligned_files_load_the_same(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(folders["k3"], tmp_path / "unaligned"))
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        odd = data[8 : 8 + length].rstrip() + b" "
        odd += b" " * (1 - len(odd) % 2)
        path.write_bytes(struct.pack("<Q", len(odd)) + odd + data[8 + length :])
    checkpoint: Checkpoint = check_checkpoint(folder)
    assert checkpoint.tensors["norm.weight"].offset % 2 == 1
    aligned, unaligned = load(folders["k3"], BF16), load(folder, BF16)
    for name, value in aligned.params.items():
        if isinstance(value, torch.Tensor):
            assert same(tensor(unaligned, name), value), name
    assert unaligned.mapped_bytes == aligned.bytes_by_kind["experts"]  # bytes need no alignment
