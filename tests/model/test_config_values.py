"""config.json with values that no model has: each is named, whatever is there, and nothing but ConfigError comes."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3port.errors import ConfigError
from k3port.model.config import ModelConfig
from k3port.model.config_file import load_config, parse_config
from k3port.model.vision_tensors import vision_tensors
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config

Path_ = tuple[str, ...]
T, L, Q = "text_config", "linear_attn_config", "quantization_config"
NAN, INF = float("nan"), float("inf")


def replaced(path: Path_, value: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config with one value replaced, added, or removed where it is ``...``."""
    values = copy.deepcopy(tiny_k3_config() if base is None else base)
    holder: Any = values
    for name in path[:-1]:
        holder = holder[name]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return values


def reasons_of(values: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    assert caught.value.hint
    assert max(map(len, caught.value.render(None).splitlines())) < 700
    return caught.value.reasons or (caught.value.message,)


GROUP = (T, Q, "config_groups", "group_0")
REFUSED: list[tuple[Path_, Any, str]] = [
    ((T, "activation_situ_beta"), "x", "activation_situ_beta = 'x': expected a number above 0"),
    ((T, "activation_situ_beta"), [4], "activation_situ_beta = [4]"),
    ((T, "activation_situ_beta"), -4.0, "activation_situ_beta = -4.0"),
    ((T, "activation_situ_beta"), NAN, "activation_situ_beta = nan"),
    ((T, "activation_situ_linear_beta"), 0, "activation_situ_linear_beta = 0"),
    ((T, Q), "mxfp4", "quantization_config = 'mxfp4': expected an object or null"),
    ((Q,), 4, ""),  # the one in text_config counts
    ((T, Q, "config_groups"), [1], "config_groups = [1]: expected an object or null"),
    (GROUP, None, "group_0 = None: expected an object"),
    (GROUP, "x", "group_0 = 'x': expected an object or null"),
    ((*GROUP, "weights"), [4], "group_0.weights = [4]"),
    ((*GROUP, "weights"), None, "weights.num_bits = None is not supported: 4"),
    ((T, "num_hidden_layers"), 10**8, "num_hidden_layers = 100000000: expected a whole number of at most 10000"),
    ((T, "num_hidden_layers"), 10_000, "each layer 1..10000 once"),
    ((T, "hidden_size"), 2**31, "hidden_size = 2147483648: expected a whole number of at most"),
    ((T, "hidden_size"), 10**400, "hidden_size = 1"),
    ((T, "hidden_size"), 64.0, "hidden_size = 64.0: expected a whole number of at least 1"),
    ((T, "num_experts"), 2**30, "experts in all"),
    ((T, L, "kda_layers"), [1, 2, "3"], "found 4 entries"),
    ((T, L, "kda_layers"), [1, 2, 2], "found 4 entries"),
    ((T, L, "kda_layers"), [1, 2, {"a": 3}], "found 4 entries"),
    ((T, L, "gate_lower_bound"), NAN, "gate_lower_bound = nan"),
    ((T, L, "gate_lower_bound"), False, "gate_lower_bound = False"),
    ((T, L), "x", "linear_attn_config = 'x': expected an object or null"),
    ((T, "rms_norm_eps"), NAN, "rms_norm_eps = nan: expected a number above 0 and at most 1"),
    ((T, "rms_norm_eps"), -1e-5, "rms_norm_eps = -1e-05"),
    ((T, "rms_norm_eps"), 0, "rms_norm_eps = 0"),
    ((T, "rms_norm_eps"), "1e-5", "rms_norm_eps = '1e-5'"),
    ((T, "routed_scaling_factor"), INF, "routed_scaling_factor = inf"),
    ((T, "routed_scaling_factor"), 10**400, "routed_scaling_factor = 1"),
    ((T, "routed_scaling_factor"), 0.0, "routed_scaling_factor = 0.0"),
    ((T, "max_position_embeddings"), ..., "text_config.max_position_embeddings is missing"),
    ((T, "max_position_embeddings"), 10**12, "max_position_embeddings = 1000000000000"),
    (("eos_token_id",), "126", "eos_token_id = '126': expected a token id in 0..127 or a list of them"),
    (("eos_token_id",), 128, "eos_token_id = 128"),
    (("eos_token_id",), [126, True], "eos_token_id = [126, True]"),
    (("bos_token_id",), [125], "bos_token_id = [125]: expected a token id in 0..127"),
    (("bos_token_id",), -1, "bos_token_id = -1"),
    (("pad_token_id",), 1.5, "pad_token_id = 1.5"),
    (("tie_word_embeddings",), "false", "tie_word_embeddings = 'false': expected true or false"),
    (("vision_config",), "x", "vision_config = 'x': expected an object or null"),
    (("dtype",), 16, "dtype = 16 is not supported"),
    ((T,), ..., "text_config is missing or empty"),
    ((T,), [1], "text_config = [1] is not an object"),
    (("model_type",), ["kimi_k3"], "model_type ['kimi_k3'] is not a model"),
    ((T, "hidden_act"), "x" * 5000, "hidden_act = 'xxx"),
]


@pytest.mark.parametrize(("path", "value", "expected"), REFUSED, ids=[f"{r[0][-1]}-{n}" for n, r in enumerate(REFUSED)])
def test_a_value_that_no_model_has_is_named(path: Path_, value: Any, expected: str) -> None:
    start = time.perf_counter()
    values = replaced(path, value)
    if not expected:
        assert isinstance(parse_config(values), ModelConfig)
        return
    reasons = reasons_of(values)
    assert any(expected in reason for reason in reasons), reasons
    assert time.perf_counter() - start < 2.0


def test_what_null_and_zero_mean() -> None:
    for value in (None, 0, 0.0):
        assert parse_config(replaced((T, "activation_situ_beta"), value)).activation.beta == 1.0
    assert parse_config(replaced((T, "activation_situ_linear_beta"), None)).activation.linear_beta is None
    assert parse_config(replaced(("eos_token_id",), [126, 1])).eos_ids == (126, 1)
    config = parse_config(replaced(("pad_token_id",), None))
    assert config.pad_id in (None, 127)
    assert parse_config(replaced((T, Q), None)).moe is not None


def test_a_bad_size_causes_no_other_fault() -> None:
    assert len(reasons_of(replaced((T, "num_hidden_layers"), 10**8))) == 1
    assert len(reasons_of(replaced((T, "vocab_size"), "128"))) == 1
    assert len(reasons_of(replaced((T, L), [1]))) == 1


def test_kimi_linear_keeps_the_default_context() -> None:
    values = replaced(("max_position_embeddings",), ..., tiny_kimi_linear_config())
    assert parse_config(values).max_context_tokens == 4096


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"model_type": ' + b"9" * 5000 + b"}", "a number in it is too long"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-LFS pointer"),
        (b"\xff\xfe{", "is not UTF-8"),
        (b"", "it is empty"),
        (b"NaN", "holds no JSON object"),
    ],
)
def test_a_file_that_no_parser_reads(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(tmp_path)
    assert caught.value.hint


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory") as caught:
        load_config(tmp_path)
    assert caught.value.hint


def test_vision_sizes_that_are_none() -> None:
    with pytest.raises(ConfigError) as caught:
        vision_tensors({"patch_size": "14", "merge_kernel_size": [2], "vt_num_hidden_layers": 10**9})
    found = caught.value.reasons
    assert any("patch_size = '14'" in reason for reason in found)
    assert any("merge_kernel_size = [2]" in reason for reason in found)
    assert any("vt_num_hidden_layers = 1000000000" in reason for reason in found)


def paths_of(value: Any, prefix: Path_ = ()) -> list[Path_]:
    """Every place in a config, the objects themselves included."""
    if not isinstance(value, dict):
        return [prefix]
    inner = [path for key, item in value.items() for path in paths_of(item, (*prefix, key))]
    return [prefix, *inner] if prefix else inner


BASES = {"k3": tiny_k3_config(), "linear": tiny_kimi_linear_config()}
PATHS = {name: paths_of(values) for name, values in BASES.items()}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 10**400, 1e308, -0.0])
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_values_give_a_config_or_a_config_error(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(BASES)))
    values = copy.deepcopy(BASES[name])
    for path in data.draw(st.lists(st.sampled_from(PATHS[name]), min_size=1, max_size=3)):
        holder: Any = values
        for key in path[:-1]:
            holder = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            holder[path[-1]] = data.draw(JSON)
    parsed = json.loads(json.dumps(values))
    try:
        config = parse_config(parsed)
    except ConfigError as error:
        found = error
    else:
        assert all(0 <= i < config.vocab_size for i in config.eos_ids)
        return
    assert found.hint
    found.render(None).encode()  # a lone surrogate could not be printed
