"""What a rank holds: parameters, the pieces they are made of, splits and bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published_k3 import DATA, needs_data

import k3port
from k3port.errors import ConfigError, UsageError
from k3port.model.config import ModelConfig
from k3port.model.config_file import parse_config
from k3port.model.shapes import kda_in_proj_rows, legal_tp_sizes, mla_in_proj_rows, rank_dims
from k3port.model.text_tensors import checkpoint_tensors, checkpoint_totals, head_tensors
from k3port.model.weights import Param, expert_columns, runtime_bytes, runtime_params
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config

ROOT = Path(k3port.__file__).parents[1]
TINY_K3 = parse_config(tiny_k3_config())
TINY_LINEAR = parse_config(tiny_kimi_linear_config())


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


def test_no_torch_is_needed() -> None:
    code = (
        "import sys, k3port.model.weights, k3port.model.vision_tensors, k3port.runtime.preflight;"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
