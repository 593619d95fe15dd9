"""Several faults at once, and folders that hold another model: what the report says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_faults import (
    EXPERT,
    FILE_1,
    FILE_2,
    FILE_3,
    FILE_4,
    INDEX,
    LAYERS,
    cut,
    drop,
    edit_index,
    edited,
    faults_of,
    put,
)

from k3port.errors import CheckpointError, ConfigError
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import write_safetensors

BF16 = torch.bfloat16


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for plant in (
            drop(LAYERS + "2.input_layernorm.weight"),
            drop(EXPERT + "w1.weight_scale"),
            put(LAYERS + "3.self_attn.q_b_proj.weight", torch.zeros(96, 25, dtype=BF16)),
        ):
            plant(tensors)

    folder = edited(tmp_path, edit)
    cut(folder / FILE_1, 0)
    cut(folder / FILE_2, (folder / FILE_2).stat().st_size - 64)
    edit_index(folder, lambda weight_map: weight_map.update({"language_model.model.norm.weight": FILE_3}))
    faults = faults_of(folder)
    assert faults[0] == f"{FILE_1} is empty"
    assert faults[1].startswith(f"{FILE_2} is truncated: its header promises")
    assert sorted(faults[2:]) == sorted(
        [
            f"{INDEX} places language_model.model.norm.weight in {FILE_3}, which does not hold it",
            "layers.2.input_layernorm.weight is missing",
            "layers.2.block_sparse_moe.experts.3.w1 has weight_packed without weight_scale",
            f"{LAYERS}3.self_attn.q_b_proj.weight in {FILE_4}: shape [96, 25], expected [96, 24]",
        ]
    )


def test_a_bad_config_does_not_hide_bad_files(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError):
        check_checkpoint(folder)
    cut(folder / FILE_1, 0)
    faults = faults_of(folder)
    assert faults[0] == f"{FILE_1} is empty"
    assert "config.json is not valid JSON" in faults[1]


def test_many_faults_print_briefly_and_are_all_kept(tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda t: [t.pop(n) for n in list(t) if n.endswith("norm.weight")])
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder)
    assert len(caught.value.reasons) > 20
    assert f"and {len(caught.value.reasons) - 20} more" in str(caught.value)


@pytest.mark.parametrize("indexed", [True, False])
def test_weights_of_another_model_give_one_sentence(folder: Path, indexed: bool) -> None:
    for path in (*folder.glob("*.safetensors"), folder / INDEX):
        path.unlink()
    llama = {
        f"model.layers.{i}.{name}.weight": torch.zeros(2, 2)
        for i in range(30)
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm")
    }
    write_safetensors(folder / "model.safetensors", llama)
    if indexed:
        (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(llama, "model.safetensors")}))
    (fault,) = faults_of(folder)
    assert "none of the 120 tensors belongs to Kimi K3 or Kimi-Linear" in fault
    assert "model.layers.0.input_layernorm.weight" in fault


def test_gpt_config_is_refused_by_its_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type 'llama'"):
        check_checkpoint(folder)
