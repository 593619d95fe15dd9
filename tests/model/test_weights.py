"""What a checkpoint stores and what a rank holds, against the published names, counts and byte totals."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import k3port
from k3port.errors import ConfigError, UsageError
from k3port.model.config import ModelConfig
from k3port.model.config_file import parse_config
from k3port.model.shapes import (
    kda_in_proj_rows,
    legal_tp_sizes,
    mla_in_proj_rows,
    rank_dims,
)
from k3port.model.text_tensors import (
    checkpoint_tensors,
    checkpoint_totals,
    expert_tensors,
    head_tensors,
    layer_tensors,
    normalise_name,
)
from k3port.model.vision_tensors import is_vision_tensor, vision_tensors
from k3port.model.weights import Param, expert_columns, runtime_bytes, runtime_params
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config

ROOT = Path(k3port.__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"published K3 config and index not found in {DATA}")

K3_TOTAL_BYTES = 1_560_860_324_864
K3_NUM_TENSORS = 497_220


@pytest.fixture(scope="module")
def k3_values() -> dict[str, Any]:
    return json.loads((DATA / "kimi-k3.config.json").read_text())


@pytest.fixture(scope="module")
def k3(k3_values: dict[str, Any]) -> ModelConfig:
    return parse_config(k3_values)


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


TINY_K3 = parse_config(tiny_k3_config())
TINY_LINEAR = parse_config(tiny_kimi_linear_config())


# --- the checkpoint view -------------------------------------------------------------------------------------------


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


# --- the runtime view ----------------------------------------------------------------------------------------------


def by_name(config: ModelConfig, rank: int = 0, size: int = 1, mxfp4: bool | None = None) -> dict[str, Param]:
    return {param.name: param for param in runtime_params(config, rank, size, mxfp4=mxfp4)}


def test_tiny_k3_parameters_on_rank_1_of_2() -> None:
    params = by_name(TINY_K3, 1, 2)
    layer0 = {n.removeprefix("layers.0."): p.shape for n, p in params.items() if n.startswith("layers.0.")}
    norms = {name: (64,) for name in ("input_norm", "post_norm", "attn_res.norm", "attn_res.proj", "mlp_res.norm")}
    norms["mlp_res.proj"] = (64,)
    assert layer0 == {
        **norms,
        "kda.in_proj": (304, 64),
        "kda.conv": (192, 4),
        "kda.f_b": (64, 32),
        "kda.A_log": (2,),
        "kda.dt_bias": (64,),
        "kda.o_norm": (32,),
        "kda.o_proj": (64, 64),
        "mlp.gate_up": (96, 64),
        "mlp.down": (64, 48),
    }
    layer3 = {n.removeprefix("layers.3."): p.shape for n, p in params.items() if n.startswith("layers.3.")}
    assert layer3 == {
        **norms,
        "mla.in_proj": (96, 64),  # 24 + 40 + 32
        "mla.q_a_norm": (24,),
        "mla.q_b": (48, 24),
        "mla.kv_a_norm": (32,),
        "mla.kv_b": (64, 32),
        "mla.o_proj": (64, 32),
        "moe.router": (8, 64),
        "moe.correction_bias": (8,),
        "moe.latent_down": (32, 64),
        "moe.latent_norm": (32,),
        "moe.latent_up": (64, 32),
        "moe.shared_gate_up": (128, 64),
        "moe.shared_down": (64, 64),
    }
    outside = {name: param.shape for name, param in params.items() if not name.startswith("layers.")}
    assert outside == {
        "embed.weight": (64, 64),
        "lm_head.weight": (64, 64),
        "norm.weight": (64,),
        "output_attn_res.norm": (64,),
        "output_attn_res.proj": (64,),
    }
    islands = {name.rsplit(".", 1)[1] for name, param in params.items() if param.kind == "float32"}
    assert islands == {"conv", "A_log", "dt_bias", "o_norm", "router", "correction_bias"}
    assert [piece.start for piece in params["layers.0.kda.A_log"].pieces] == [2]  # heads 2, 3 of the 32 stored


def test_kimi_linear_parameters() -> None:
    params = by_name(TINY_LINEAR)
    assert params["layers.0.kda.in_proj"].shape == (464, 64)  # 3*128 + 32 + 32 + 4 = 452
    assert [piece.source.split(".")[-2] for piece in params["layers.0.kda.in_proj"].pieces] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "f_a_proj",
        "g_a_proj",
        "b_proj",
    ]
    assert params["layers.0.kda.g_b"].shape == (128, 32)
    assert params["layers.3.mla.in_proj"].shape == (144, 64)  # 96 + 40 = 136
    assert not any("attn_res" in name or "latent" in name or "q_b" in name for name in params)


def test_row_splits_of_the_specification(request: pytest.FixtureRequest) -> None:
    dims = rank_dims(TINY_K3, 1, 2)
    assert kda_in_proj_rows(dims) == {"q": 64, "k": 64, "v": 64, "g": 64, "f_a": 32, "b": 2, "pad": 14}
    assert mla_in_proj_rows(dims) == {"q_a": 24, "kv_a": 40, "g": 32, "pad": 0}
    if not DATA.is_dir():
        pytest.skip(f"published K3 config not found in {DATA}")
    k3 = request.getfixturevalue("k3")
    for size, rows, padded in ((8, 6284, 6288), (16, 3206, 3216)):
        parts = kda_in_proj_rows(rank_dims(k3, 0, size))
        assert sum(parts.values()) == padded
        assert parts["pad"] == padded - rows
        assert parts["f_a"] == 128  # replicated, not divided


WIDE_K3: dict[str, Any] = tiny_k3_config()
WIDE_K3["text_config"] |= {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 160,
    "moe_intermediate_size": 512,
    "linear_attn_config": WIDE_K3["text_config"]["linear_attn_config"] | {"num_heads": 16, "head_dim": 8},
}


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("config", [parse_config(WIDE_K3)])
def test_pieces_fill_every_row_once_and_ranks_tile_every_split_tensor(config: ModelConfig, size: int) -> None:
    slices: dict[str, list[tuple[int, int]]] = {}
    replicated: dict[str, set[tuple[int, int]]] = {}
    specs = dict(checkpoint_tensors(config))
    for rank in range(size):
        for param in runtime_params(config, rank, size):
            row = 0
            for piece in param.pieces:
                assert piece.row == row
                row += param.shape[0] if piece.axis else piece.stop - piece.start
                if piece.replicated:
                    replicated.setdefault(piece.source, set()).add((piece.start, piece.stop))
                else:
                    slices.setdefault(piece.source, []).append((piece.start, piece.stop))
            assert param.shape[0] - row == (-row % 16 if param.name.endswith("in_proj") else 0)
    for source, found in slices.items():
        assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])], source
        extent = 16 if source.endswith("A_log") else max(specs[source].shape) if len(specs[source].shape) == 1 else 0
        axis = 1 if source.endswith(("o_proj.weight", "mlp.down_proj.weight", "shared_experts.down_proj.weight")) else 0
        assert found[-1][1] == (extent or specs[source].shape[axis]), source
    for source, found in replicated.items():
        assert len(found) == 1, source
        assert found.pop()[0] == 0
    stored = {name for name in specs if ".experts." not in name}
    assert {*slices, *replicated} == stored


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_expert_slices_tile_the_width(size: int) -> None:
    config = parse_config(WIDE_K3)
    bounds = [expert_columns(rank_dims(config, rank, size)) for rank in range(size)]
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
    assert bounds[-1][1] == 512


def test_tp4_of_tiny_k3_is_refused_because_of_the_scale_groups() -> None:
    with pytest.raises(ConfigError) as caught:
        runtime_params(TINY_K3, 0, 4)
    assert caught.value.reasons == ("expert width 64 / 4 = 16 is not a multiple of 32 (MXFP4 scale groups)",)
    assert caught.value.hint.endswith(": 1, 2")
    assert legal_tp_sizes(TINY_K3) == (1, 2)
    assert legal_tp_sizes(TINY_K3, mxfp4=False) == (1, 2, 4)
    assert by_name(TINY_K3, 3, 4, mxfp4=False)["embed.weight"].shape == (32, 64)


@pytest.mark.parametrize("size", [0, -1, 3, 6, 32])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="legal tensor-parallel sizes") as caught:
        rank_dims(TINY_K3, 0, size)
    assert f"tp = {size} is not one of 1, 2, 4, 8, 16" in caught.value.reasons


def test_everything_that_does_not_divide_is_named() -> None:
    assert TINY_LINEAR.kda and TINY_LINEAR.mla and TINY_LINEAR.moe
    config = replace(
        TINY_LINEAR,
        vocab_size=127,
        dense_width=97,
        kda=replace(TINY_LINEAR.kda, num_heads=3),
        mla=replace(TINY_LINEAR.mla, num_heads=5),
        moe=replace(TINY_LINEAR.moe, width=33),
    )
    with pytest.raises(ConfigError) as caught:
        rank_dims(config, 0, 2)
    assert caught.value.reasons == (
        "vocab_size 127 does not divide by 2",
        "KDA heads 3 does not divide by 2",
        "MLA heads 5 does not divide by 2",
        "dense width 97 does not divide by 2",
        "shared expert width 33 does not divide by 2",
        "expert width 33 does not divide by 2",
    )
    assert caught.value.hint.endswith(": 1")


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    with pytest.raises(UsageError, match=r"ranks are 0\.\.1"):
        rank_dims(TINY_K3, rank, 2)


@needs_data
def test_b36_bytes_per_rank_fall_with_the_size(k3: ModelConfig) -> None:
    whole = runtime_bytes(k3, 1, 2)
    for size in (2, 4, 8, 16):
        assert runtime_bytes(k3, size, 2)["experts"] * size == whole["experts"]  # no padding of the expert width
        assert rank_dims(k3, 0, size).expert_width == 3072 // size
    assert whole["model"] == sum(p.num_elements for p in runtime_params(k3) if p.kind == "model") * 2


def test_tied_embeddings_have_no_head_of_their_own() -> None:
    config = replace(TINY_LINEAR, tie_embeddings=True)
    assert "lm_head.weight" not in by_name(config)
    assert not head_tensors(config)["lm_head.weight"].required
    assert checkpoint_totals(config).num_bytes == checkpoint_totals(TINY_LINEAR).num_bytes - 128 * 64 * 2


def test_vision_tensors_name_what_the_config_lacks() -> None:
    with pytest.raises(ConfigError) as caught:
        vision_tensors({"patch_size": 14})
    assert "vision_config.qkv_hidden_size is missing" in caught.value.reasons


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, k3port.model.weights, k3port.model.vision_tensors, k3port.runtime.preflight;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
