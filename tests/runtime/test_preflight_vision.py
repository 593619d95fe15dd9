"""The vision part of a checkpoint is checked only on demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_faults import INDEX, cut, edit_header, faults_of

from k3port.errors import ConfigError
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import tiny_k3_config, write_checkpoint

BF16 = torch.bfloat16


@pytest.fixture
def with_vision(tmp_path: Path) -> Path:
    values = tiny_k3_config()
    values["vision_config"] = {
        "patch_size": 2,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 4,
        "vt_hidden_size": 8,
        "qkv_hidden_size": 12,
        "vt_intermediate_size": 16,
        "vt_num_hidden_layers": 1,
        "merge_kernel_size": [2, 2],
        "text_hidden_size": 1,  # the text configuration decides
    }

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if "mm_projector.post_norm.weight" in tensors:
            tensors["mm_projector.post_norm.weight"] = torch.ones(64, dtype=BF16)
            tensors["mm_projector.proj.2.weight"] = torch.ones(64, 32, dtype=BF16)

    return write_checkpoint(tmp_path / "vision", values, edit=edit)


def test_vision_is_checked_only_on_demand(with_vision: Path) -> None:
    tower = with_vision / "model-00007-of-000007.safetensors"
    assert check_checkpoint(with_vision, vision=True).total_bytes > 669_200
    cut(tower, 0)
    notes = check_checkpoint(with_vision).notes
    assert f"{tower.name} is empty (vision only: not needed for text)" in notes
    assert faults_of(with_vision, vision=True) == [f"{tower.name} is empty"]


def test_vision_shapes_and_missing_tensors(with_vision: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header["mm_projector.proj.0.weight"]["shape"] = [16, 64]
        header["mm_projector.other"] = header.pop("mm_projector.post_norm.weight")

    projector = with_vision / "model-00006-of-000007.safetensors"
    edit_header(projector, edit)
    (with_vision / INDEX).unlink()
    check_checkpoint(with_vision)
    assert faults_of(with_vision, vision=True) == [
        f"mm_projector.proj.0.weight in {projector.name}: shape [16, 64], expected [32, 32]",
        "mm_projector.post_norm.weight is missing",
        f"mm_projector.other in {projector.name} is not a tensor of this model",
    ]


def test_vision_of_a_text_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no vision_config"):
        check_checkpoint(folder, vision=True)
