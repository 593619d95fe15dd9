"""Checkpoints that pass the check: complete ones, other layouts of them, and what is worth a note only."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from checkpoint_faults import ATTENTION, FILE_1, FILE_2, INDEX, LAYERS, edited, faults_of, put
from safetensors.torch import load_file
from shared_data import shared

from k3port.errors import ConfigError
from k3port.model.text_tensors import normalise_name
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config, write_checkpoint, write_safetensors


def test_a_complete_checkpoint_passes_and_is_fast(folder: Path) -> None:
    start = time.perf_counter()
    checkpoint = check_checkpoint(folder)
    assert time.perf_counter() - start < 1.0
    assert len(checkpoint.tensors) == 250
    assert checkpoint.total_bytes == 669_200
    assert checkpoint.mxfp4_layers == {1, 2, 3}
    assert checkpoint.files[FILE_2] == (folder / FILE_2).stat().st_size
    stored = checkpoint.tensors["layers.1.self_attn.dt_bias"]
    assert (stored.file, stored.dtype, stored.shape) == (FILE_2, "F32", (128,))
    raw = (folder / FILE_2).read_bytes()[stored.offset : stored.offset + stored.num_bytes]
    values = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    assert -2.0 <= values.min() <= values.max() <= 0.0  # sin - 1: the offset is right
    assert values[0] != values[1]


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_official_layout_checkpoints_pass(name: str) -> None:
    folder = shared(f"parity/{name}")
    checkpoint = check_checkpoint(folder, vision=name == "tiny-k3")
    index = json.loads((folder / INDEX).read_text())
    assert checkpoint.total_bytes == index["metadata"]["total_size"]
    assert {tensor.stored_name for tensor in checkpoint.tensors.values()} == set(index["weight_map"])
    assert checkpoint.notes == ()


def test_b65_only_a_config_and_one_file_are_required(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", tiny_kimi_linear_config())
    tensors: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        tensors |= load_file(path)
    draft = tmp_path / "draft"
    draft.mkdir()
    shutil.copy(source / "config.json", draft)
    write_safetensors(draft / "model.safetensors", tensors)
    checkpoint = check_checkpoint(draft)
    assert len(checkpoint.tensors) == 151
    assert checkpoint.notes == (
        "generation_config.json is not there (optional)",
        "tokenizer_config.json is not there (optional)",
        "tiktoken.model is not there (optional)",
    )
    (draft / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_checkpoint(draft)


def test_without_an_index_all_headers_are_read(folder: Path) -> None:
    (folder / INDEX).unlink()
    checkpoint = check_checkpoint(folder)
    assert len(checkpoint.tensors) == 250
    assert any(INDEX in note and "optional" in note for note in checkpoint.notes)


@pytest.mark.parametrize("prefix", ["model.", "language_model.", ""])
def test_other_spellings_of_the_names(tmp_path: Path, prefix: str) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers." in name]:
            tensors[prefix + normalise_name(name)] = tensors.pop(name)

    assert len(check_checkpoint(edited(tmp_path, rename)).tensors) == 250


def test_draft_and_buffer_tensors_are_skipped_silently(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        if any("layers.1." in name for name in tensors):
            inside = (
                "1.self_attn.rotary_emb.inv_freq",
                "1.enorm.weight",
                "4.self_attn.q_proj.weight",
                "11.eh_proj.weight",
            )
            for name in (*(LAYERS + name for name in inside), "vision_tower.anything"):
                tensors[name] = torch.zeros(3)

    checkpoint = check_checkpoint(edited(tmp_path, add))
    assert not any("ignored" in note for note in checkpoint.notes)


def test_unknown_tensors_outside_the_layers_are_noted(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        if "language_model.lm_head.weight" in tensors:
            tensors["extra.weight"] = torch.zeros(3)

    checkpoint = check_checkpoint(edited(tmp_path, add))
    assert "1 tensors outside the model are ignored: extra.weight" in checkpoint.notes


def test_plain_and_quantised_layers_may_alternate(tmp_path: Path) -> None:
    def plain_layer_2(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.2." in name and ".experts." in name]:
            tensor = tensors.pop(name)
            if name.endswith("_packed"):
                tensors[name.removesuffix("_packed")] = torch.zeros(
                    tensor.shape[0], tensor.shape[1] * 2, dtype=torch.bfloat16
                )

    assert check_checkpoint(edited(tmp_path, plain_layer_2)).mxfp4_layers == {1, 3}


def test_unknown_tensors_can_be_allowed(tmp_path: Path) -> None:
    folder = edited(tmp_path, put(ATTENTION + "q_proj.bias", torch.zeros(128)))
    assert len(faults_of(folder)) == 1
    checkpoint = check_checkpoint(folder, allow_unknown=True)
    assert f"{ATTENTION}q_proj.bias in {FILE_1} is not a tensor of this model" in checkpoint.notes


def test_tied_embeddings(tmp_path: Path) -> None:
    values = tiny_k3_config()
    values["tie_word_embeddings"] = True
    folder = write_checkpoint(tmp_path / "tied", values)
    assert "lm_head.weight" not in check_checkpoint(folder).tensors
    folder = write_checkpoint(tmp_path / "untied", tiny_k3_config())
    (folder / "config.json").write_text(json.dumps(values))
    (fault,) = faults_of(folder)
    assert fault == (
        "language_model.lm_head.weight in model-00005-of-000005.safetensors is stored, but tie_word_embeddings is "
        "true: set it to false to use the stored head, or remove the tensor"
    )


def test_a_wrong_total_is_noted(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    assert f"{INDEX} says total_size 669201, the tensors hold 669200 bytes" in check_checkpoint(folder).notes
