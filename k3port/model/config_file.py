"""Reading ``config.json``: every switch that k3port does not support is refused by name, all faults together.

Nothing here imports torch: plans and preflight checks read a config on any machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from k3port.errors import ConfigError
from k3port.model.config import ActivationConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig

K3_MODEL_TYPE = "kimi_k3"
TEXT_MODEL_TYPE = "kimi_linear"

# Keys of text_config that change what the model computes. A key in neither table is boilerplate and is ignored.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "mla_use_nope",
    "linear_attn_config",
)
_REQUIRED_K3 = (
    "mla_use_output_gate",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "first_k_dense_replace",
    "moe_router_activation_func",
    "moe_renormalize",
    "routed_scaling_factor",
    "attn_res_block_size",
    "q_lora_rank",
)
_REQUIRED_MOE = ("num_experts_per_token", "moe_intermediate_size", "moe_router_activation_func")
_REQUIRED_LINEAR = ("full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size")
_REQUIRED_LINEAR_K3 = ("gate_lower_bound", "use_full_rank_gate")


class _Reader:
    """Typed access to one JSON object that collects every fault instead of stopping at the first."""

    def __init__(self, values: Mapping[str, Any], where: str, faults: list[str]) -> None:
        self.values, self.where, self.faults = values, where, faults

    def require(self, keys: Iterable[str]) -> None:
        self.faults += [f"{self.where}.{key} is missing" for key in keys if key not in self.values]

    def fault(self, text: str) -> None:
        self.faults.append(f"{self.where}.{text}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            if key in self.values:
                self.fault(f"{key} = {value!r}: expected a whole number of at least {minimum}")
            return minimum if default is None else default
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fault(f"{key} = {value!r}: expected a number")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.fault(f"{key} = {value!r}: expected true or false")
            return default
        return value

    def choice(self, key: str, legal: tuple[str, ...], default: str) -> str:
        value = self.values.get(key, default)
        if value not in legal:
            self.fault(f"{key} = {value!r} is not supported: k3port knows {', '.join(legal)}")
            return default
        return value


def load_config(path: str | Path) -> ModelConfig:
    """Reads ``config.json`` (a file, or the folder that holds it).

    Raises:
        ConfigError: the file is absent, is not JSON, or describes a model that k3port does not run.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no config.json at {file}", hint="give the folder of a Kimi K3 checkpoint") from None
    except OSError as exc:
        raise ConfigError(f"cannot read {file}", reasons=[str(exc.strerror or exc)]) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{file} is not valid JSON", reasons=[str(exc)], hint="download the file again") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no JSON object", hint="give the folder of a Kimi K3 checkpoint")
    return parse_config(values, str(file))


def parse_config(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Turns the JSON of ``config.json`` into a :class:`ModelConfig`; reports all faults together.

    Raises:
        ConfigError: an unknown model type, a missing structural key, or a switch that k3port does not support.
    """
    model_type = values.get("model_type")
    if model_type not in (K3_MODEL_TYPE, TEXT_MODEL_TYPE):
        raise ConfigError(
            f"{source}: model_type {model_type!r} is not a model that k3port runs",
            hint=f"k3port runs model_type {K3_MODEL_TYPE} (Kimi K3) and {TEXT_MODEL_TYPE} (Kimi-Linear)",
        )
    text = values.get("text_config", {}) if model_type == K3_MODEL_TYPE else values
    # A Kimi-Linear file and the text part of a K3 file share one schema; Attention Residuals tell them apart.
    is_k3 = model_type == K3_MODEL_TYPE or text.get("attn_res_block_size") is not None
    faults: list[str] = []
    if not isinstance(text, dict) or not text:
        raise ConfigError(f"{source}: text_config is missing or empty")
    reader = _Reader(text, "text_config" if text is not values else "config", faults)
    reader.require((*_REQUIRED, *(_REQUIRED_K3 if is_k3 else ())))
    linear = text.get("linear_attn_config")
    if linear is not None and not isinstance(linear, dict):
        reader.fault(f"linear_attn_config = {linear!r}: expected an object or null")
        linear = None
    num_layers = reader.integer("num_hidden_layers")
    kda, kda_layers = _read_kda(linear, num_layers, is_k3, faults)
    mla = _read_mla(reader)
    moe = _read_moe(reader)
    _check_quantization(values, text, faults)
    if text.get("num_nextn_predict_layers"):
        reader.fault(f"num_nextn_predict_layers = {text['num_nextn_predict_layers']!r} is not supported: must be 0")
    top = _Reader(values, "config", faults)
    eos = values.get("eos_token_id", text.get("eos_token_id"))
    eos_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(isinstance(i, int) for i in eos_ids):
        top.fault(f"eos_token_id = {eos!r}: expected a token id or a list of them")
    config = ModelConfig(
        family="kimi-k3" if is_k3 else "kimi-linear",
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        num_layers=num_layers,
        dense_width=reader.integer("intermediate_size"),
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        max_context_tokens=reader.integer(
            "max_position_embeddings" if "max_position_embeddings" in text else "model_max_length", 4096
        ),
        attn_res_block=reader.optional_integer("attn_res_block_size"),
        kda_layers=kda_layers,
        kda=kda,
        mla=mla if len(kda_layers) < num_layers else None,
        moe=moe,
        activation=ActivationConfig(
            kind="situ" if reader.choice("hidden_act", ("situ", "silu"), "silu") == "situ" else "silu",
            # null and 0 both mean 1.0 in the official code
            beta=float(text.get("activation_situ_beta") or 1.0),
            linear_beta=None
            if text.get("activation_situ_linear_beta") is None
            else reader.number("activation_situ_linear_beta", 25.0),
        ),
        tie_embeddings=bool(values.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        dtype="float32" if _dtype_name(values, text, faults) == "float32" else "bfloat16",
        bos_id=values.get("bos_token_id", text.get("bos_token_id")),
        eos_ids=tuple(i for i in eos_ids if isinstance(i, int)),
        pad_id=values.get("pad_token_id", text.get("pad_token_id")),
        has_vision=values.get("vision_config") is not None,
    )
    if faults:
        raise ConfigError(
            f"{source} describes a model that k3port cannot run",
            reasons=faults,
            hint="compare the file with the published config.json of Kimi K3 or Kimi-Linear-48B-A3B",
        )
    return config


def _dtype_name(values: Mapping[str, Any], text: Mapping[str, Any], faults: list[str]) -> str:
    for holder in (values, text):
        for key in ("dtype", "torch_dtype"):
            if isinstance(holder.get(key), str):
                name = holder[key].removeprefix("torch.")
                if name not in ("bfloat16", "float32"):
                    faults.append(f"config.{key} = {name!r} is not supported: k3port knows bfloat16, float32")
                return name
    return "bfloat16"


def _read_kda(
    linear: Mapping[str, Any] | None, num_layers: int, is_k3: bool, faults: list[str]
) -> tuple[KdaConfig | None, frozenset[int]]:
    if linear is None:
        return None, frozenset()
    reader = _Reader(linear, "linear_attn_config", faults)
    reader.require((*_REQUIRED_LINEAR, *(_REQUIRED_LINEAR_K3 if is_k3 else ())))
    kda_1based, mla_1based = (
        linear.get("kda_layers", []),
        linear.get("full_attn_layers", []),
    )
    if not (isinstance(kda_1based, list) and isinstance(mla_1based, list)):
        reader.fault("kda_layers and full_attn_layers must be lists of 1-based layer numbers")
        return None, frozenset()
    if sorted([*kda_1based, *mla_1based], key=str) != sorted(range(1, num_layers + 1), key=str):
        reader.fault(
            f"kda_layers and full_attn_layers must together name each layer 1..{num_layers} once "
            f"(they are 1-based); found {sorted([*kda_1based, *mla_1based], key=str)[:8]}..."
        )
    bound = linear.get("gate_lower_bound")
    if bound is not None and not (isinstance(bound, int | float) and -5.0 <= bound < 0.0):
        reader.fault(f"gate_lower_bound = {bound!r} is not supported: null, or a number in [-5, 0)")
        bound = None
    config = KdaConfig(
        num_heads=reader.integer("num_heads"),
        head_dim=reader.integer("head_dim"),
        conv_width=reader.integer("short_conv_kernel_size", minimum=2),
        gate_lower_bound=None if bound is None else float(bound),
        full_rank_gate=reader.flag("use_full_rank_gate", False),
    )
    return (config if kda_1based else None), frozenset(i - 1 for i in kda_1based if isinstance(i, int))


def _read_mla(reader: _Reader) -> MlaConfig:
    values = reader.values
    if values.get("mla_use_nope") is not True and "mla_use_nope" in values:
        reader.fault(f"mla_use_nope = {values['mla_use_nope']!r} is not supported: rotary MLA is another model")
    heads = reader.integer("num_attention_heads")
    kv_heads = values.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        reader.fault(f"num_key_value_heads = {kv_heads!r} is not supported: MLA needs num_attention_heads = {heads}")
    return MlaConfig(
        num_heads=heads,
        q_lora_rank=reader.optional_integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=reader.integer("qk_rope_head_dim"),
        v_dim=reader.integer("v_head_dim"),
        output_gate=reader.flag("mla_use_output_gate", False),
    )


def _read_moe(reader: _Reader) -> MoeConfig | None:
    values = reader.values
    if values.get("num_experts") is None:
        return None
    reader.require(_REQUIRED_MOE)
    num_experts = reader.integer("num_experts")
    top_k = reader.integer("num_experts_per_token")
    groups, top_groups = reader.integer("num_expert_group", 1), reader.integer("topk_group", 1)
    if top_k > num_experts:
        reader.fault(f"num_experts_per_token = {top_k} exceeds num_experts = {num_experts}")
    if num_experts % groups:
        reader.fault(f"num_expert_group = {groups} does not divide num_experts = {num_experts}")
    elif top_groups > groups or top_k > top_groups * (num_experts // groups):
        reader.fault(f"topk_group = {top_groups} of {groups} groups cannot supply {top_k} experts")
    elif top_groups < groups and num_experts // groups < 2:
        reader.fault(f"num_expert_group = {groups}: group scores need at least two experts per group")
    latent = reader.optional_integer("routed_expert_hidden_size")
    method = reader.choice("topk_method", ("noaux_tc",), "noaux_tc")
    activation = reader.choice("moe_router_activation_func", ("sigmoid", "softmax"), "sigmoid")
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        num_shared=reader.integer("num_shared_experts", 0, minimum=0),
        width=reader.integer("moe_intermediate_size"),
        latent_dim=latent,
        latent_norm=reader.flag("latent_moe_use_norm", False) and latent is not None,
        router_activation="softmax" if activation == "softmax" else "sigmoid",
        correction_bias=method == "noaux_tc",
        renormalize=reader.flag("moe_renormalize", True),
        scaling_factor=reader.number("routed_scaling_factor", 1.0),
        num_groups=groups,
        top_k_groups=top_groups,
        first_dense_layers=reader.integer("first_k_dense_replace", 0, minimum=0),
        layer_freq=reader.integer("moe_layer_freq", 1),
    )


_MXFP4_FORMAT = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
}


def _check_quantization(values: Mapping[str, Any], text: Mapping[str, Any], faults: list[str]) -> None:
    """The config only tells the format; which modules are quantised is read off the tensor names."""
    quant = text.get("quantization_config") or values.get("quantization_config")
    if quant is None:
        return
    where = "quantization_config"
    if quant.get("quant_method") != "compressed-tensors" or quant.get("format") != "mxfp4-pack-quantized":
        faults.append(
            f"{where}: {quant.get('quant_method')!r} / {quant.get('format')!r} is not supported: "
            "k3port reads compressed-tensors / mxfp4-pack-quantized"
        )
        return
    if quant.get("kv_cache_scheme") is not None:
        faults.append(f"{where}.kv_cache_scheme is not supported: must be null")
    for name, group in (quant.get("config_groups") or {}).items():
        for side in ("input_activations", "output_activations"):
            if group.get(side) is not None:
                faults.append(f"{where}.{name}.{side} is not supported: must be null")
        weights = group.get("weights") or {}
        for key, expected in _MXFP4_FORMAT.items():
            if weights.get(key) != expected:
                faults.append(f"{where}.{name}.weights.{key} = {weights.get(key)!r} is not supported: {expected!r}")
