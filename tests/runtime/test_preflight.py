"""Every fault of a checkpoint, planted alone and together. What is wrong must be named; what is optional must not stop."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import k3port
from k3port.errors import CheckpointError, ConfigError
from k3port.model.config_file import parse_config
from k3port.model.text_tensors import checkpoint_tensors, normalise_name
from k3port.model.vision_tensors import vision_tensors
from k3port.runtime.headers import StoredTensor, read_header
from k3port.runtime.preflight import check_checkpoint
from k3port.runtime.tensor_check import check_tensors
from k3port.testing.synthetic import (
    EditFile,
    tiny_k3_config,
    tiny_kimi_linear_config,
    write_checkpoint,
    write_safetensors,
)

SHARED = Path(k3port.__file__).parents[2] / "shared"
LAYERS = "language_model.model.layers."
INDEX = "model.safetensors.index.json"
FILE_2 = "model-00002-of-000005.safetensors"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("preflight") / "k3", tiny_k3_config())


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "k3"))


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


# --- what passes ---------------------------------------------------------------------------------------------------


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
    folder = SHARED / "parity" / name
    if not folder.is_dir():
        pytest.skip(f"parity checkpoint not found in {folder}")
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
            number = torch.zeros(3)
            tensors[LAYERS + "1.self_attn.rotary_emb.inv_freq"] = number
            tensors[LAYERS + "1.enorm.weight"] = number
            tensors[LAYERS + "4.self_attn.q_proj.weight"] = number
            tensors[LAYERS + "11.eh_proj.weight"] = number
            tensors["vision_tower.anything"] = number

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


# --- files ---------------------------------------------------------------------------------------------------------


def test_missing_folder_and_file_instead_of_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        check_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        check_checkpoint(tmp_path / "file")


def test_a_folder_without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / INDEX).unlink()
    (folder / "K3-Q4.gguf").write_text("")
    assert faults_of(folder) == ["no *.safetensors files (found K3-Q4.gguf, which k3port does not read)"]


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def corrupt_json(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] = ord("\\")
    path.write_bytes(data)


FILE_FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda p: p.unlink(), f"{FILE_2} is missing"),
    ("empty", lambda p: cut(p, 0), f"{FILE_2} is empty"),
    ("six bytes", lambda p: cut(p, 6), f"{FILE_2} is truncated: 6 bytes"),
    ("cut header", lambda p: cut(p, 100), f"{FILE_2} is truncated inside its header"),
    ("cut data", lambda p: cut(p, p.stat().st_size - 1), f"{FILE_2} is truncated: its header promises"),
    ("longer", lambda p: cut(p, p.stat().st_size + 3), f"{FILE_2} has 3 bytes that no tensor owns"),
    (
        "lfs pointer",
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        f"{FILE_2} is a git-LFS pointer",
    ),
    ("html", lambda p: p.write_text("<!DOCTYPE html><html>Entry not found</html>"), "corrupt header"),
    ("corrupt json", corrupt_json, f"{FILE_2} has a corrupt header"),
    ("list header", lambda p: p.write_bytes(struct.pack("<Q", 2) + b"[]"), "it is not a JSON object"),
]


@pytest.mark.parametrize(("plant", "expected"), [f[1:] for f in FILE_FAULTS], ids=[f[0] for f in FILE_FAULTS])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_damaged_file(folder: Path, plant: Callable[[Path], object], expected: str, indexed: bool) -> None:
    if not indexed:
        (folder / INDEX).unlink()
    plant(folder / FILE_2)
    faults = faults_of(folder)
    if not indexed and not (folder / FILE_2).exists():
        # Nothing says that a file should be there: its tensors are missing.
        assert all("layers.1" in fault or "layer 1" in fault for fault in faults)
        assert "layer 1 lacks routed experts 0, 1, 2, 3, 4, 5, 6, 7 (8 of 8)" in faults
    else:
        assert len(faults) == 1, faults  # the tensors inside are not reported as missing too
        assert expected in faults[0]


HEADER_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("gap", {"data_offsets": [8, 264]}, "leaves a gap before it|overlaps the tensor before it"),
    ("negative", {"data_offsets": [-4, 252]}, r"has the offsets \[-4, 252\]"),
    ("reversed", {"data_offsets": [256, 0]}, r"has the offsets \[256, 0\]"),
    ("wrong size", {"shape": [63]}, r"spans 128 bytes, but BF16 \[63\] needs 126"),
    ("dtype", {"dtype": "F17"}, "has the unknown dtype 'F17'"),
    ("shape", {"shape": "64"}, "has the shape '64'"),
    ("bool", {"shape": [True]}, r"has the shape \[True\]"),
]


@pytest.mark.parametrize(("change", "expected"), [f[1:] for f in HEADER_FAULTS], ids=[f[0] for f in HEADER_FAULTS])
def test_inconsistent_header(folder: Path, change: dict[str, Any], expected: str) -> None:
    def plant(header: dict[str, Any]) -> None:
        entry = header[LAYERS + "1.input_layernorm.weight"]
        if "data_offsets" in change and change["data_offsets"] == [8, 264]:
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = [begin + 2, end + 2]
        else:
            entry.update(change)

    edit_header(folder / FILE_2, plant)
    (fault,) = faults_of(folder)
    assert "input_layernorm" in fault or "starts at byte" in fault
    assert re.search(expected, fault), fault


def test_overlapping_tensors(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(6))
    (fault,) = read_header(path).faults
    assert "b overlaps the tensor before it (starts at byte 2, expected 4)" in fault


# --- the index -----------------------------------------------------------------------------------------------------


def test_index_that_is_not_json(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    (fault,) = faults_of(folder)
    assert fault.startswith(f"{INDEX} is not valid JSON")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]"])
def test_index_without_a_weight_map(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert faults_of(folder) == [f"{INDEX} has no weight_map"]


def test_index_that_names_a_file_without_the_tensor(folder: Path) -> None:
    name = LAYERS + "1.self_attn.A_log"
    edit_index(folder, lambda weight_map: weight_map.update({name: "model-00003-of-000005.safetensors"}))
    assert faults_of(folder) == [f"{INDEX} places {name} in model-00003-of-000005.safetensors, which does not hold it"]


def test_index_that_leaves_the_folder(folder: Path) -> None:
    name = LAYERS + "1.self_attn.A_log"
    edit_index(folder, lambda weight_map: weight_map.update({name: "../model.safetensors"}))
    assert faults_of(folder)[0] == (
        f"{INDEX} names something that is not a file of this folder: {name} in '../model.safetensors'"
    )


def test_a_wrong_total_is_noted(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))
    assert f"{INDEX} says total_size 669201, the tensors hold 669200 bytes" in check_checkpoint(folder).notes


# --- names, shapes, types ------------------------------------------------------------------------------------------


def drop(name: str) -> EditFile:
    return lambda tensors: tensors.pop(name, None)


def put(name: str, tensor: torch.Tensor) -> EditFile:
    """Adds or replaces a tensor in the file of its layer (or of the head)."""
    marker = name.split("layers.")[1].split(".")[0] if "layers." in name else None

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if any(f"layers.{marker}." in other if marker else "lm_head" in other for other in tensors):
            tensors[name] = tensor

    return edit


BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
EXPERT = LAYERS + "2.block_sparse_moe.experts.3."
ATTENTION = LAYERS + "0.self_attn."
A_LOG_FORMS = "[n] or [1, 1, n, 1] with n >= 4, one number per head and then padding"
FILE_1, FILE_3, FILE_4 = (f"model-0000{number}-of-000005.safetensors" for number in (1, 3, 4))

TENSOR_FAULTS: list[tuple[str, EditFile, list[str]]] = [
    ("norm missing", drop(LAYERS + "2.input_layernorm.weight"), ["layers.2.input_layernorm.weight is missing"]),
    ("res proj missing", drop(LAYERS + "3.mlp_res_proj.weight"), ["layers.3.mlp_res_proj.weight is missing"]),
    (
        "correction bias missing",
        drop(LAYERS + "1.block_sparse_moe.gate.e_score_correction_bias"),
        ["layers.1.block_sparse_moe.gate.e_score_correction_bias is missing"],
    ),
    (
        "head missing",
        drop("language_model.lm_head.weight"),
        ["lm_head.weight is missing (tie_word_embeddings is false, so it is not shared with embed_tokens)"],
    ),
    (
        "shape",
        put(ATTENTION + "q_proj.weight", torch.zeros(64, 128, dtype=BF16)),
        [f"{ATTENTION}q_proj.weight in {FILE_1}: shape [64, 128], expected [128, 64]"],
    ),
    (
        "dtype",
        put(ATTENTION + "q_proj.weight", torch.zeros(128, 64, dtype=torch.float16)),
        [f"{ATTENTION}q_proj.weight in {FILE_1}: dtype F16, expected BF16"],
    ),
    (
        "shape and dtype",
        put(ATTENTION + "o_norm.weight", torch.zeros(33, dtype=torch.float64)),
        [
            f"{ATTENTION}o_norm.weight in {FILE_1}: shape [33], expected [32]",
            f"{ATTENTION}o_norm.weight in {FILE_1}: dtype F64, expected F32 or BF16",
        ],
    ),
    (
        "conv taps first",
        put(ATTENTION + "k_conv1d.weight", torch.zeros(4, 128)),
        [f"{ATTENTION}k_conv1d.weight in {FILE_1}: shape [4, 128], expected [128, 1, 4] or [128, 4]"],
    ),
    ("packed without scale", drop(EXPERT + "w1.weight_scale"), [
        "layers.2.block_sparse_moe.experts.3.w1 has weight_packed without weight_scale"]),
    ("scale without packed", drop(EXPERT + "w2.weight_packed"), [
        "layers.2.block_sparse_moe.experts.3.w2 has weight_scale without weight_packed"]),
    ("both forms", put(EXPERT + "w3.weight", torch.zeros(64, 32, dtype=BF16)), [
        "layers.2.block_sparse_moe.experts.3.w3 has both weight and weight_packed: one module, two forms"]),
    ("packed shape", put(EXPERT + "w2.weight_packed", torch.zeros(64, 16, dtype=U8)), [
        f"{EXPERT}w2.weight_packed in {FILE_3}: shape [64, 16], expected [32, 32]"]),
    ("scale dtype", put(EXPERT + "w2.weight_scale", torch.zeros(32, 2, dtype=BF16)), [
        f"{EXPERT}w2.weight_scale in {FILE_3}: dtype BF16, expected U8"]),
    ("expert beyond the last", put(EXPERT.replace("3.", "8.").replace("layers.8", "layers.2") + "w1.weight_packed",
        torch.zeros(64, 16, dtype=U8)), ["layer 2 holds experts that do not exist: 8 (the configuration has 8)"]),
    ("unknown expert tensor", put(EXPERT + "w1.weight_shape", torch.zeros(2, dtype=torch.int64)), [
        f"{EXPERT}w1.weight_shape in {FILE_3} is not a tensor of this model"]),
    ("unknown in a layer", put(ATTENTION + "q_proj.bias", torch.zeros(128)), [
        f"{ATTENTION}q_proj.bias in {FILE_1} is not a tensor of this model"]),
    ("experts in a dense layer", put(LAYERS + "0.block_sparse_moe.experts.0.w1.weight_packed",
        torch.zeros(64, 16, dtype=U8)), [
        ("layer 0 is dense but holds 1 routed expert tensors, "
         f"{LAYERS}0.block_sparse_moe.experts.0.w1.weight_packed first")]),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "expected"), [f[1:] for f in TENSOR_FAULTS], ids=[f[0] for f in TENSOR_FAULTS])
def test_tensor_fault(tmp_path: Path, edit: EditFile, expected: list[str]) -> None:
    folder = edited(tmp_path, edit)
    assert faults_of(folder) == expected


def test_layer_numbers_with_leading_zeros(tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        name = LAYERS + "1.input_layernorm.weight"
        if name in tensors:
            tensors[LAYERS + "01.input_layernorm.weight"] = tensors.pop(name)

    faults = faults_of(edited(tmp_path, rename))
    assert faults == [
        "layers.1.input_layernorm.weight is missing",
        f"{LAYERS}01.input_layernorm.weight in {FILE_2} has no valid layer number",
    ]


def test_two_spellings_of_one_name(tmp_path: Path) -> None:
    folder = edited(tmp_path, put("model.layers.0.self_attn.A_log", torch.zeros(4)))
    (fault,) = faults_of(folder)
    first, second = f"{ATTENTION}A_log in {FILE_1}", f"model.layers.0.self_attn.A_log in {FILE_1}"
    assert fault in {
        f"layers.0.self_attn.A_log is stored twice: {first} and {second}",
        f"layers.0.self_attn.A_log is stored twice: {second} and {first}",
    }


def test_one_tensor_in_two_files(folder: Path) -> None:
    (folder / INDEX).unlink()
    shutil.copy(folder / "model-00005-of-000005.safetensors", folder / "head.safetensors")
    faults = faults_of(folder)
    assert len(faults) == 5
    assert (
        "norm.weight is stored twice: language_model.model.norm.weight in head.safetensors "
        "and language_model.model.norm.weight in model-00005-of-000005.safetensors" in faults
    )


def test_missing_experts_are_listed_once_per_layer(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if ".layers.1." in name and ".experts.2." in name or ".layers.3." in name and ".experts.7.w2" in name:
                del tensors[name]

    assert faults_of(edited(tmp_path, edit)) == [
        "layer 1 lacks routed experts 2 (1 of 8)",
        "layers.3.block_sparse_moe.experts.7.w2.weight_packed is missing",
    ]


def test_mixed_expert_forms_in_one_layer(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if EXPERT + "w1.weight_packed" in tensors:
            del tensors[EXPERT + "w1.weight_packed"], tensors[EXPERT + "w1.weight_scale"]
            tensors[EXPERT + "w1.weight"] = torch.zeros(64, 32, dtype=BF16)

    assert faults_of(edited(tmp_path, edit)) == [
        "layer 2 mixes MXFP4 and plain experts: 1 plain matrices, layers.2.block_sparse_moe.experts.3.w1 first"
    ]


@pytest.mark.parametrize("module", ["self_attn.q_proj", "block_sparse_moe.routed_expert_up_proj", "mlp_res_proj"])
def test_only_routed_experts_may_be_quantised(tmp_path: Path, module: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{LAYERS}1.{module}"
        if tensors.pop(name + ".weight", None) is not None:
            tensors[name + ".weight_packed"] = torch.zeros(128, 32, dtype=U8)
            tensors[name + ".weight_scale"] = torch.zeros(128, 2, dtype=U8)

    (fault,) = faults_of(edited(tmp_path, edit))
    assert fault.startswith(f"layers.1.{module} is stored quantised ({LAYERS}1.{module}.weight_packed, ")
    assert fault.endswith("only routed experts may be")


def test_a_quantised_head_is_a_fault(tmp_path: Path) -> None:
    edit = put("language_model.lm_head.weight_packed", torch.zeros(128, 32, dtype=U8))
    (fault,) = faults_of(edited(tmp_path, edit))
    assert fault.startswith("lm_head is stored quantised")


def test_b57_a_per_channel_a_log_is_refused_by_name_file_and_shape(tmp_path: Path) -> None:
    folder = edited(tmp_path, put(ATTENTION + "A_log", torch.zeros(128)))
    assert faults_of(folder) == [f"{ATTENTION}A_log in {FILE_1}: shape [128], expected {A_LOG_FORMS}"]


def test_b58_a_list_read_with_the_wrong_base_cannot_pass(tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda tensors: None)
    values = tiny_k3_config()
    values["text_config"]["linear_attn_config"] |= {"kda_layers": [1, 2, 4], "full_attn_layers": [3]}
    (folder / "config.json").write_text(json.dumps(values))
    faults = faults_of(folder)
    assert "layers.2.self_attn.kv_b_proj.weight is missing" in faults
    assert "layers.3.self_attn.A_log is missing" in faults
    # The name exists in both kinds of layer; its shape tells.
    assert f"{LAYERS}2.self_attn.g_proj.weight in {FILE_3}: shape [128, 64], expected [64, 64]" in faults


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
    assert "lm_head.weight is stored but ignored: tie_word_embeddings is true" in check_checkpoint(folder).notes


# --- several faults, and other models ------------------------------------------------------------------------------


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


# --- vision --------------------------------------------------------------------------------------------------------


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


# --- the real size -------------------------------------------------------------------------------------------------


def test_the_published_checkpoint_passes_in_seconds_without_reading_weights(tmp_path: Path) -> None:
    """96 sparse files with the real headers and 1.56 TB of holes: only headers can have been read."""
    data = SHARED / "data"
    if not data.is_dir():
        pytest.skip(f"published K3 config and index not found in {data}")
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
