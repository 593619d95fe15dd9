"""config.json: published switches are read, anything that would be another model is refused by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from k3port.errors import ConfigError, ExitCode
from k3port.model.config_file import load_config, parse_config
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config


def changed(path: str, value: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config with one key replaced, or removed where the value is ``...``."""
    config = copy.deepcopy(tiny_k3_config() if base is None else base)
    *parents, key = path.split(".")
    holder = config
    for name in parents:
        holder = holder[name]
    if value is ...:
        del holder[key]
    else:
        holder[key] = value
    return config


def test_kimi_k3_switches_are_read():
    config = parse_config(tiny_k3_config())
    assert config.family == "kimi-k3"
    assert config.kda is not None
    assert config.kda.gate_lower_bound == -5.0
    assert config.kda.full_rank_gate
    assert config.mla is not None
    assert config.mla.output_gate
    assert config.mla.inner_norm_eps == 1e-6
    assert config.mla.scale == (16 + 8) ** -0.5
    assert config.moe is not None
    assert config.moe.latent_norm
    assert (config.activation.kind, config.activation.beta, config.activation.linear_beta) == ("situ", 4.0, 25.0)
    assert config.attn_res_block == 2
    assert config.num_blocks == 2


def test_kimi_linear_switches_are_read():
    config = parse_config(tiny_kimi_linear_config())
    assert config.family == "kimi-linear"
    assert config.kda is not None
    assert config.kda.gate_lower_bound is None
    assert not config.kda.full_rank_gate
    assert config.mla is not None
    assert not config.mla.output_gate
    assert config.mla.q_lora_rank is None
    assert config.moe is not None
    assert config.moe.latent_dim is None
    assert config.moe.scaling_factor == 2.446
    assert config.attn_res_block is None
    assert config.activation.kind == "silu"


def test_layer_lists_are_one_based():
    """B58: full_attn_layers [4, 8] are the 0-based layers 3 and 7."""
    values = tiny_k3_config()
    values["text_config"]["num_hidden_layers"] = 8
    values["text_config"]["linear_attn_config"]["full_attn_layers"] = [4, 8]
    values["text_config"]["linear_attn_config"]["kda_layers"] = [1, 2, 3, 5, 6, 7]
    config = parse_config(values)
    assert config.mla_layers == (3, 7)
    assert not config.is_kda(3)
    assert config.is_kda(0)


def test_b52_blocks_are_counted_in_layers():
    """93 layers with block 12: a block starts at 0, 12, ..., 84, so 8 blocks are banked."""
    values = tiny_k3_config()
    text = values["text_config"]
    text["num_hidden_layers"], text["attn_res_block_size"] = 93, 12
    text["linear_attn_config"] |= {"kda_layers": list(range(1, 93)), "full_attn_layers": [93]}
    config = parse_config(values)
    assert config.num_blocks == 8
    assert [i for i in range(93) if i % 12 == 0] == [0, 12, 24, 36, 48, 60, 72, 84]


REFUSED = {
    "text_config.mla_use_nope": (False, "mla_use_nope = False"),
    "text_config.hidden_act": ("gelu", "hidden_act = 'gelu'"),
    "text_config.moe_router_activation_func": ("relu", "moe_router_activation_func = 'relu'"),
    "text_config.topk_method": ("greedy", "topk_method = 'greedy'"),
    "text_config.num_key_value_heads": (2, "num_key_value_heads = 2"),
    "text_config.num_nextn_predict_layers": (1, "num_nextn_predict_layers = 1"),
    "text_config.linear_attn_config.gate_lower_bound": (-6.0, "gate_lower_bound = -6.0"),
    "text_config.linear_attn_config.kda_layers": ([0, 1, 2], "1-based"),
    "text_config.quantization_config.format": ("nvfp4-pack-quantized", "nvfp4-pack-quantized"),
    "text_config.num_experts_per_token": (9, "exceeds num_experts"),
    "text_config.num_expert_group": (3, "does not divide"),
    "dtype": ("float16", "'float16'"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_an_unsupported_switch_is_refused_by_name(path: str):
    value, expected = REFUSED[path]
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(path, value))
    assert caught.value.exit_code == ExitCode.UNSUPPORTED
    assert any(expected in reason for reason in caught.value.reasons), caught.value.reasons


@pytest.mark.parametrize(
    "path",
    [
        "text_config.mla_use_output_gate",
        "text_config.attn_res_block_size",
        "text_config.latent_moe_use_norm",
        "text_config.linear_attn_config.gate_lower_bound",
        "text_config.rms_norm_eps",
    ],
)
def test_a_missing_structural_key_is_not_defaulted(path: str):
    """The class defaults describe another model, so a K3 file must name every switch itself."""
    with pytest.raises(ConfigError, match="is missing"):
        parse_config(changed(path, ...))


def test_all_faults_are_reported_together():
    values = changed("text_config.mla_use_nope", False)
    values["text_config"]["hidden_act"] = "gelu"
    del values["text_config"]["vocab_size"]
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    assert len(caught.value.reasons) == 3
    assert caught.value.hint


def test_a_foreign_model_is_named():
    with pytest.raises(ConfigError, match="'llama'"):
        parse_config({"model_type": "llama", "hidden_size": 64})


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "no config.json"), ("", "not valid JSON"), ("[1]", "no JSON object"), ("{", "not valid JSON")],
)
def test_a_broken_file_is_named(tmp_path: Path, content: str | None, expected: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=expected):
        load_config(tmp_path)


def test_kimi_linear_context_has_another_key(tmp_path: Path):
    values = tiny_kimi_linear_config()
    values.pop("max_position_embeddings", None)
    values["model_max_length"] = 1048576
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config(tmp_path).max_context_tokens == 1048576
