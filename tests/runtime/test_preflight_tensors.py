"""Faults of tensors: names, shapes and types, each planted alone and named in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_faults import ATTENTION, EXPERT, FILE_1, FILE_2, FILE_3, INDEX, LAYERS, drop, edited, faults_of, put

from k3port.testing.synthetic import EditFile, tiny_k3_config

BF16, U8 = torch.bfloat16, torch.uint8
A_LOG_FORMS = "[n] or [1, 1, n, 1] with n >= 4, one number per head and then padding"

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
