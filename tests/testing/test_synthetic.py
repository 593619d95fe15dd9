"""The deterministic weights, against the spot values of the specification and an independent reader."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from k3port.model.config_file import load_config, parse_config
from k3port.ops.quant import dequantize_mxfp4
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import full_names, tiny_k3_config, tiny_kimi_linear_config, write_checkpoint

PREFIX = "language_model.model."


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("synthetic") / "k3", tiny_k3_config())


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("synthetic") / "linear", tiny_kimi_linear_config())


def read(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def first(tensor: torch.Tensor, count: int) -> list[float]:
    return tensor.flatten()[:count].tolist()


def test_tiny_k3_has_the_published_size(k3: Path) -> None:
    tensors = read(k3)
    assert len(tensors) == 250
    assert sum(tensor.numel() for tensor in tensors.values()) == 368_560
    assert sum(tensor.nbytes for tensor in tensors.values()) == 669_200
    index = json.loads((k3 / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 669_200
    assert set(index["weight_map"]) == set(tensors)


def test_spot_values_of_the_specification(k3: Path) -> None:
    tensors = read(k3)
    ranks = {name: rank for rank, name in enumerate(sorted(tensors))}
    bf16 = 1e-6  # the specification prints six decimals
    for name, rank, expected, tolerance in (
        ("language_model.lm_head.weight", 0, [0.120605, 0.170898, -0.030273, -0.186523], bf16),
        (PREFIX + "embed_tokens.weight", 1, [0.984375, 0.425781, -0.757812, -0.828125], bf16),
        (PREFIX + "layers.0.self_attn.A_log", 11, [0.427299, -0.136361, -0.499982, -0.127269, 0.0, 0.0], bf16),
        (PREFIX + "layers.0.self_attn.q_proj.weight", 22, [-0.07177734, -0.18652344, -0.02722168], 1e-8),
        (
            PREFIX + "layers.1.block_sparse_moe.gate.e_score_correction_bias",
            73,
            [0.0999342, 0.03013185, -0.08398055],
            1e-7,
        ),
        (PREFIX + "layers.2.self_attn.dt_bias", 165, [-0.9610816], 1e-7),
        (PREFIX + "layers.2.self_attn.k_conv1d.weight", 169, [-0.18570206], 1e-7),
        (PREFIX + "layers.3.self_attn.kv_b_proj.weight", 242, [0.11621094], 1e-8),
        (PREFIX + "norm.weight", 247, [0.85546875, 0.828125, 1.0546875], 0.0),
    ):
        assert ranks[name] == rank, name
        assert first(tensors[name], len(expected)) == pytest.approx(expected, abs=tolerance, rel=0), name
    a_log = tensors[PREFIX + "layers.0.self_attn.A_log"]
    assert a_log.shape == (32,)
    assert torch.count_nonzero(a_log[4:]) == 0


def test_spot_bytes_of_an_expert(k3: Path) -> None:
    tensors = read(k3)
    expert = PREFIX + "layers.1.block_sparse_moe.experts.0.w1."
    assert sorted(tensors).index(expert + "weight_packed") == 25
    packed, scale = tensors[expert + "weight_packed"], tensors[expert + "weight_scale"]
    assert first(packed, 4) == [24, 61, 98, 135]
    assert first(scale, 4) == [123, 122, 121, 124]
    row = dequantize_mxfp4(packed, scale)[0, :6]
    assert row.tolist() == [-0.0, 0.03125, -0.1875, 0.09375, 0.0625, 0.25]
    assert math.copysign(1, row[0].item()) == -1


def test_the_formula_holds_far_into_a_tensor(k3: Path) -> None:
    tensors = read(k3)
    name = PREFIX + "layers.3.self_attn.q_b_proj.weight"
    rank, element = sorted(tensors).index(name), 96 * 24 - 1
    wave = math.sin(0.7 * (rank + 1) + 1.3 * element + 0.001 * element**2)
    expected = torch.tensor(1.5 * wave / math.sqrt(24)).to(torch.bfloat16)
    assert tensors[name].flatten()[element] == expected


def test_types_and_shapes_of_kimi_linear(linear: Path) -> None:
    tensors = read(linear)
    assert len(tensors) == 151
    forms = {name.removeprefix("model.layers.0.self_attn."): (list(t.shape), t.dtype) for name, t in tensors.items()}
    assert forms["A_log"] == ([1, 1, 4, 1], torch.float32)
    assert forms["dt_bias"] == ([128], torch.float32)
    assert forms["k_conv1d.weight"] == ([128, 1, 4], torch.bfloat16)
    assert forms["o_norm.weight"] == ([32], torch.bfloat16)
    assert forms["model.layers.1.block_sparse_moe.experts.7.w2.weight"] == ([64, 32], torch.bfloat16)
    assert forms["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"] == ([8], torch.bfloat16)
    assert "lm_head.weight" in forms
    assert torch.count_nonzero(tensors["model.layers.0.self_attn.A_log"]) == 4


def test_one_file_per_layer_and_one_for_the_head(k3: Path) -> None:
    paths = sorted(k3.glob("*.safetensors"))
    assert [path.name for path in paths] == [f"model-{i:05d}-of-000005.safetensors" for i in range(1, 6)]
    for layer, path in enumerate(paths[:-1]):
        with safe_open(path, "pt") as file:
            assert all(f"layers.{layer}." in name for name in file.keys())  # noqa: SIM118
    assert load_config(k3) == parse_config(tiny_k3_config())
    assert json.loads((k3 / "generation_config.json").read_text()) == {
        "bos_token_id": 125,
        "eos_token_id": 126,
        "pad_token_id": 127,
    }


def test_dequantised_and_vision_variants_pass_the_check(tmp_path: Path) -> None:
    values = tiny_k3_config()
    values["vision_config"] = {
        "patch_size": 14,
        "init_pos_emb_height": 4,
        "init_pos_emb_width": 6,
        "vt_hidden_size": 8,
        "qkv_hidden_size": 12,
        "vt_intermediate_size": 16,
        "vt_num_hidden_layers": 2,
        "merge_kernel_size": [2, 2],
        "text_hidden_size": 64,
    }
    folder = write_checkpoint(tmp_path / "vision", values, mxfp4=False)
    checkpoint = check_checkpoint(folder, vision=True)
    assert not checkpoint.mxfp4
    assert checkpoint.tensors["mm_projector.proj.0.weight"].shape == (32, 32)
    assert checkpoint.tensors["vision_tower.patch_embed.pos_emb.weight"].shape == (4, 6, 8)
    assert len(sorted(folder.glob("*.safetensors"))) == 7
    names = full_names(values, parse_config(values), False)
    assert {tensor.stored_name for tensor in checkpoint.tensors.values()} == set(names)
