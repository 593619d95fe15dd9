"""What a checkpoint stores, against the published names, counts and byte totals."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_k3 import DATA, needs_data

from k3port.errors import ConfigError
from k3port.model.config import ModelConfig
from k3port.model.config_file import parse_config
from k3port.model.text_tensors import (
    checkpoint_tensors,
    checkpoint_totals,
    expert_tensors,
    head_tensors,
    layer_tensors,
    normalise_name,
)
from k3port.model.vision_tensors import is_vision_tensor, vision_tensors
from k3port.model.weights import runtime_bytes, runtime_params
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config

K3_TOTAL_BYTES = 1_560_860_324_864
K3_NUM_TENSORS = 497_220
TINY_K3 = parse_config(tiny_k3_config())
TINY_LINEAR = parse_config(tiny_kimi_linear_config())


def kimi_linear_48b() -> ModelConfig:
    mla_layers = [4, 8, 12, 16, 20, 24, 27]
    return parse_config(
        {
            **tiny_kimi_linear_config(),
            "vocab_size": 163840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "moe_intermediate_size": 1024,
            "linear_attn_config": {
                "full_attn_layers": mla_layers,
                "kda_layers": [i for i in range(1, 28) if i not in mla_layers],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        }
    )


@needs_data
def test_every_published_k3_name_is_accounted_for_exactly_once(k3: ModelConfig, k3_values: dict[str, Any]) -> None:
    with gzip.open(DATA / "kimi-k3.model.safetensors.index.json.gz") as file:
        index = json.load(file)
    published = [normalise_name(name) for name in index["weight_map"]]
    assert len(published) == len(set(published)) == K3_NUM_TENSORS
    text = [name for name, _ in checkpoint_tensors(k3)]
    vision = vision_tensors(k3_values["vision_config"])
    assert len(text) == len(set(text))
    assert set(text).isdisjoint(vision)
    assert set(published) == {*text, *vision}
    assert {name for name in published if is_vision_tensor(name)} == set(vision)
    total = sum(spec.num_bytes for _, spec in checkpoint_tensors(k3)) + sum(s.num_bytes for s in vision.values())
    assert total == index["metadata"]["total_size"] == K3_TOTAL_BYTES


@needs_data
def test_k3_totals(k3: ModelConfig, k3_values: dict[str, Any]) -> None:
    totals = checkpoint_totals(k3)
    vision = vision_tensors(k3_values["vision_config"])
    assert totals.num_parameters == 2_779_484_478_208
    assert totals.bytes_by_dtype["U8"] == 1_446_456_066_048
    assert totals.num_tensors + len(vision) == K3_NUM_TENSORS
    assert totals.num_bytes + sum(spec.num_bytes for spec in vision.values()) == K3_TOTAL_BYTES
    assert len(vision) == 168
    assert sum(s.num_elements for n, s in vision.items() if n.startswith("vision_tower.")) == 401_214_464
    assert sum(s.num_elements for n, s in vision.items() if n.startswith("mm_projector.")) == 46_144_512


@needs_data
def test_k3_parameters_of_each_piece(k3: ModelConfig) -> None:
    def count(layer: int, part: str) -> int:
        return sum(spec.num_elements for name, spec in layer_tensors(k3, layer).items() if name.startswith(part))

    assert count(0, "self_attn.") == 443_740_416
    assert count(3, "self_attn.") == count(92, "self_attn.") == 232_196_096
    assert count(0, "mlp.") == 726_663_168
    assert count(1, "block_sparse_moe.") == 189_927_808
    vectors = ("input_layernorm", "post_attention_layernorm", "self_attention_res", "mlp_res")
    assert sum(count(1, name) for name in vectors) == 43_008
    assert sum(spec.num_elements for spec in head_tensors(k3).values()) == 2_348_831_744
    expert = expert_tensors(k3, True)
    assert sum(2 * s.num_elements for name, s in expert.items() if name.endswith("packed")) == 33_030_144
    assert sum(spec.num_bytes for spec in expert.values()) == 17_547_264


@needs_data
def test_k3_bytes_and_tensors_of_each_layer_file(k3: ModelConfig) -> None:
    per_layer: dict[int, tuple[int, int]] = {}
    for name, spec in checkpoint_tensors(k3):
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        tensors, size = per_layer.get(layer, (0, 0))
        per_layer[layer] = tensors + 1, size + spec.num_bytes
    assert per_layer[-1] == (5, 4_697_663_488)
    assert per_layer[0] == (23, 2_341_213_184)
    assert all(per_layer[i] == (5404, 16_990_092_800) for i in k3.kda_layers if i)
    assert all(per_layer[i] == (5398, 16_566_684_160) for i in k3.mla_layers)


def test_kimi_linear_total_bytes() -> None:
    totals = checkpoint_totals(kimi_linear_48b())
    assert totals.num_bytes == 98_245_528_576
    assert round(totals.num_parameters / 1e9, 2) == 49.12
    assert set(totals.bytes_by_dtype) == {"BF16", "F32"}


@pytest.mark.parametrize(("config", "tensors", "num_bytes"), [(TINY_K3, 250, 669_200), (TINY_LINEAR, 151, None)])
def test_totals_agree_with_the_list(config: ModelConfig, tensors: int, num_bytes: int | None) -> None:
    totals, listed = checkpoint_totals(config), list(checkpoint_tensors(config))
    assert totals.num_tensors == len(listed) == tensors
    assert totals.num_bytes == sum(spec.num_bytes for _, spec in listed)
    assert num_bytes in (None, totals.num_bytes)


def test_tiny_k3_stores_the_elements_it_should() -> None:
    assert sum(spec.num_elements for _, spec in checkpoint_tensors(TINY_K3)) == 368_560


@given(st.sampled_from(["norm.weight", "layers.12.self_attn.A_log", "lm_head.weight", "vision_tower.patch_embed.x"]))
def test_names_are_normalised_from_every_spelling(name: str) -> None:
    for prefix in ("", "model.", "language_model.", "language_model.model."):
        assert normalise_name(prefix + name) == name


def test_float32_checkpoints_may_keep_bfloat16_tensors() -> None:
    spec = layer_tensors(replace(TINY_K3, dtype="float32"), 0)["self_attn.q_proj.weight"]
    assert spec.dtype == "F32"
    assert spec.dtypes == ("F32", "BF16")
    assert layer_tensors(TINY_K3, 0)["self_attn.q_proj.weight"].dtypes == ("BF16",)


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (5,), (32,), (127,), (1, 1, 32, 1)])
def test_b57_a_log_layouts_that_mean_one_number_per_head(shape: tuple[int, ...]) -> None:
    assert layer_tensors(TINY_K3, 0)["self_attn.A_log"].accepts_shape(shape)  # 4 heads of 32 channels
    assert layer_tensors(TINY_LINEAR, 0)["self_attn.A_log"].accepts_shape(shape)


@pytest.mark.parametrize("shape", [(3,), (128,), (1, 1, 128, 1), (1, 4, 1, 1), (4, 32), (4, 1), (1, 1, 3, 1), ()])
def test_b57_other_a_log_layouts_are_refused(shape: tuple[int, ...]) -> None:
    spec = layer_tensors(TINY_K3, 0)["self_attn.A_log"]
    assert not spec.accepts_shape(shape)
    assert "n >= 4" in spec.expected_shape()


def test_b58_conv_ranks() -> None:
    spec = layer_tensors(TINY_K3, 0)["self_attn.k_conv1d.weight"]
    assert spec.accepts_shape((128, 1, 4))
    assert spec.accepts_shape((128, 4))
    assert not spec.accepts_shape((4, 128))
    assert not spec.accepts_shape((128, 4, 1))


def test_b58_layer_lists_are_one_based_and_g_proj_follows_the_layer_type() -> None:
    values = tiny_kimi_linear_config()
    values["num_hidden_layers"] = 8
    values["mla_use_output_gate"] = True
    values["linear_attn_config"] |= {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "use_full_rank_gate": True,
    }
    config = parse_config(values)
    names = {param.name: param for param in runtime_params(config)}
    for layer in range(8):
        is_mla = layer in (3, 7)
        assert ("self_attn.kv_b_proj.weight" in layer_tensors(config, layer)) is is_mla
        assert ("self_attn.A_log" in layer_tensors(config, layer)) is not is_mla
        param = names[f"layers.{layer}.{'mla' if is_mla else 'kda'}.in_proj"]
        sources = [piece.source.removeprefix(f"layers.{layer}.self_attn.") for piece in param.pieces]
        assert sources[2 if is_mla else 3] == "g_proj.weight"
        # The two gates differ in width here (4 heads x 16, 4 heads x 32), so a swap cannot pass the shape check.
        assert layer_tensors(config, layer)["self_attn.g_proj.weight"].shape == ((64, 64) if is_mla else (128, 64))


@needs_data
def test_b62_layer_kinds_and_experts_are_counted_layer_by_layer(k3: ModelConfig) -> None:
    assert [k3.is_moe(i) for i in range(93)] == [False] + [True] * 92
    assert len(k3.mla_layers) == 24
    assert k3.mla_layers[-2:] == (91, 92)
    assert not any("block_sparse_moe" in name for name in layer_tensors(k3, 0))
    assert sum("experts.0.w1.weight_packed" in name for name, _ in checkpoint_tensors(k3)) == 92
    assert runtime_bytes(k3, 1, 2)["experts"] == 92 * 896 * 17_547_264
    params = runtime_params(k3)
    assert sum(param.name.endswith("kda.A_log") for param in params) == 69
    assert sum(param.name.endswith("mla.kv_b") for param in params) == 24


def test_vision_tensors_name_what_the_config_lacks() -> None:
    with pytest.raises(ConfigError) as caught:
        vision_tensors({"patch_size": 14})
    assert "vision_config.qkv_hidden_size is missing" in caught.value.reasons
