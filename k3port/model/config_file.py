"""Reading ``config.json``: every switch that k3port does not support is refused by name, all faults together.

Nothing here imports torch: plans and preflight checks read a config on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3port.errors import ConfigError
from k3port.model.config import ActivationConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig
from k3port.model.config_reader import Reader
from k3port.model.json_file import BrokenJsonError, read_json, shown

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


_HINT = "compare the file with the published config.json of Kimi K3 or Kimi-Linear-48B-A3B"

MAX_LAYERS = 10_000
MAX_EXPERTS = 1 << 22
"""Routed experts of all layers together: checks and plans take time in their number. Kimi K3 has 83,328."""


def load_config(path: str | Path) -> ModelConfig:
    """Reads ``config.json`` (a file, or the folder that holds it).

    Raises:
        ConfigError: the file is absent, is not JSON, or describes a model that k3port does not run.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        values = read_json(file)
    except FileNotFoundError:
        raise ConfigError(f"no config.json at {file}", hint="give the folder of a Kimi K3 checkpoint") from None
    except BrokenJsonError as exc:
        raise ConfigError(f"{file} {exc}", hint="download the file again") from None
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
            f"{source}: model_type {shown(model_type)} is not a model that k3port runs",
            hint=f"k3port runs model_type {K3_MODEL_TYPE} (Kimi K3) and {TEXT_MODEL_TYPE} (Kimi-Linear)",
        )
    text = values.get("text_config") if model_type == K3_MODEL_TYPE else values
    if not isinstance(text, dict) or not text:
        what = "is missing or empty" if not text else f"= {shown(text)} is not an object"
        raise ConfigError(f"{source}: text_config {what}", hint=_HINT)
    # A Kimi-Linear file and the text part of a K3 file share one schema; Attention Residuals tell them apart.
    is_k3 = model_type == K3_MODEL_TYPE or text.get("attn_res_block_size") is not None
    faults: list[str] = []
    reader = Reader(text, "text_config" if text is not values else "config", faults)
    top = Reader(values, "config", faults)
    reader.require((*_REQUIRED, *(_REQUIRED_K3 if is_k3 else ())))
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    known_layers = None if "num_hidden_layers" in reader.bad else num_layers
    kda, kda_layers = _read_kda(reader.mapping("linear_attn_config"), known_layers, is_k3, faults)
    mla = _read_mla(reader)
    moe = _read_moe(reader)
    if moe is not None and moe.num_experts * num_layers > MAX_EXPERTS:
        reader.fault(f"num_experts = {moe.num_experts} in {num_layers} layers: more than {MAX_EXPERTS} experts in all")
    _check_quantization(top, reader)
    if text.get("num_nextn_predict_layers"):
        found = shown(text["num_nextn_predict_layers"])
        reader.fault(f"num_nextn_predict_layers = {found} is not supported: must be 0")
    vocab_size = reader.integer("vocab_size")
    known_vocab = None if "vocab_size" in reader.bad else vocab_size
    bos, eos, pad = (_either(values, text, f"{role}_token_id") for role in ("bos", "eos", "pad"))
    config = ModelConfig(
        family="kimi-k3" if is_k3 else "kimi-linear",
        vocab_size=vocab_size,
        hidden_size=reader.integer("hidden_size"),
        num_layers=num_layers,
        dense_width=reader.integer("intermediate_size"),
        norm_eps=reader.positive("rms_norm_eps", 1e-5, maximum=1.0),
        max_context_tokens=_read_context(reader, is_k3),
        attn_res_block=reader.optional_integer("attn_res_block_size"),
        kda_layers=kda_layers,
        kda=kda,
        mla=mla if len(kda_layers) < num_layers else None,
        moe=moe,
        activation=_read_activation(reader),
        tie_embeddings=(top if "tie_word_embeddings" in values else reader).flag("tie_word_embeddings", False),
        dtype="float32" if _dtype_name(values, text, faults) == "float32" else "bfloat16",
        bos_id=next(iter(top.token_ids("bos_token_id", bos, known_vocab)), None),
        eos_ids=top.token_ids("eos_token_id", eos, known_vocab, many=True),
        pad_id=next(iter(top.token_ids("pad_token_id", pad, known_vocab)), None),
        has_vision=top.mapping("vision_config") is not None,
    )
    if faults:
        raise ConfigError(f"{source} describes a model that k3port cannot run", reasons=faults, hint=_HINT)
    return config


def _either(values: Mapping[str, Any], text: Mapping[str, Any], key: str) -> Any:
    """The value at the top, or else in ``text_config``."""
    return text.get(key) if values.get(key) is None else values[key]


def _read_context(reader: Reader, is_k3: bool) -> int:
    keys = ("max_position_embeddings", "model_max_length")
    key = next((key for key in keys if key in reader.values), keys[0])
    if is_k3:
        reader.require((key,))
    return reader.integer(key, 4096)  # the default of the official Kimi-Linear class


def _read_activation(reader: Reader) -> ActivationConfig:
    beta, linear_beta = reader.values.get("activation_situ_beta"), reader.values.get("activation_situ_linear_beta")
    # null and 0 both mean 1.0 in the official code
    is_default = beta is None or (beta == 0 and not isinstance(beta, bool))
    return ActivationConfig(
        kind="situ" if reader.choice("hidden_act", ("situ", "silu"), "silu") == "situ" else "silu",
        beta=1.0 if is_default else reader.positive("activation_situ_beta", 1.0),
        linear_beta=None if linear_beta is None else reader.positive("activation_situ_linear_beta", 25.0),
    )


def _dtype_name(values: Mapping[str, Any], text: Mapping[str, Any], faults: list[str]) -> str:
    for holder in (values, text):
        for key in ("dtype", "torch_dtype"):
            name = holder.get(key)
            if name is None:
                continue
            if isinstance(name, str):
                name = name.removeprefix("torch.")
            if name not in ("bfloat16", "float32"):
                faults.append(f"config.{key} = {shown(name)} is not supported: k3port knows bfloat16, float32")
            return str(name) if isinstance(name, str) else "bfloat16"
    return "bfloat16"


def _read_kda(
    linear: Mapping[str, Any] | None, num_layers: int | None, is_k3: bool, faults: list[str]
) -> tuple[KdaConfig | None, frozenset[int]]:
    if linear is None:
        return None, frozenset()
    reader = Reader(linear, "linear_attn_config", faults)
    reader.require((*_REQUIRED_LINEAR, *(_REQUIRED_LINEAR_K3 if is_k3 else ())))
    kda_1based, mla_1based = (
        linear.get("kda_layers", []),
        linear.get("full_attn_layers", []),
    )
    if not (isinstance(kda_1based, list) and isinstance(mla_1based, list)):
        reader.fault("kda_layers and full_attn_layers must be lists of 1-based layer numbers")
        return None, frozenset()
    named = [*kda_1based, *mla_1based]
    is_partition = num_layers is None or (  # by length first: sorting what cannot fit may take minutes
        len(named) == num_layers and all(type(i) is int for i in named) and sorted(named) == [*range(1, num_layers + 1)]
    )
    if not is_partition and not reader.bad & {"kda_layers", "full_attn_layers"}:
        reader.fault(
            f"kda_layers and full_attn_layers must together name each layer 1..{num_layers} once "
            f"(they are 1-based); found {len(named)} entries, {shown(kda_1based)} and {shown(mla_1based)}"
        )
    bound = linear.get("gate_lower_bound")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not -5.0 <= bound < 0.0):
        reader.fault(f"gate_lower_bound = {shown(bound)} is not supported: null, or a number in [-5, 0)")
        bound = None
    config = KdaConfig(
        num_heads=reader.integer("num_heads"),
        head_dim=reader.integer("head_dim"),
        conv_width=reader.integer("short_conv_kernel_size", minimum=2),
        gate_lower_bound=None if bound is None else float(bound),
        full_rank_gate=reader.flag("use_full_rank_gate", False),
    )
    return (config if kda_1based else None), frozenset(i - 1 for i in kda_1based if type(i) is int)


def _read_mla(reader: Reader) -> MlaConfig:
    values = reader.values
    if values.get("mla_use_nope") is not True and "mla_use_nope" in values:
        reader.fault(f"mla_use_nope = {shown(values['mla_use_nope'])} is not supported: rotary MLA is another model")
    heads = reader.integer("num_attention_heads")
    kv_heads = values.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        reader.fault(
            f"num_key_value_heads = {shown(kv_heads)} is not supported: MLA needs num_attention_heads = {heads}"
        )
    return MlaConfig(
        num_heads=heads,
        q_lora_rank=reader.optional_integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank"),
        nope_dim=reader.integer("qk_nope_head_dim"),
        rope_dim=reader.integer("qk_rope_head_dim"),
        v_dim=reader.integer("v_head_dim"),
        output_gate=reader.flag("mla_use_output_gate", False),
    )


def _read_moe(reader: Reader) -> MoeConfig | None:
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
        scaling_factor=reader.positive("routed_scaling_factor", 1.0),
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


def _check_quantization(top: Reader, text: Reader) -> None:
    """The config only tells the format; which modules are quantised is read off the tensor names."""
    quant = text.mapping("quantization_config")
    if quant is None and top.values is not text.values:
        quant = top.mapping("quantization_config")
    if not quant:
        return
    where, faults = "quantization_config", text.faults
    if quant.get("quant_method") != "compressed-tensors" or quant.get("format") != "mxfp4-pack-quantized":
        faults.append(
            f"{where}: {shown(quant.get('quant_method'))} / {shown(quant.get('format'))} is not supported: "
            "k3port reads compressed-tensors / mxfp4-pack-quantized"
        )
        return
    if quant.get("kv_cache_scheme") is not None:
        faults.append(f"{where}.kv_cache_scheme is not supported: must be null")
    groups = Reader(Reader(quant, where, faults).mapping("config_groups") or {}, f"{where}.config_groups", faults)
    for name in groups.values:
        group = groups.mapping(name)
        if group is None:
            if name not in groups.bad:
                groups.fault(f"{name} = None: expected an object")
            continue
        reader = Reader(group, f"{where}.{name}", faults)
        for side in ("input_activations", "output_activations"):
            if group.get(side) is not None:
                reader.fault(f"{side} is not supported: must be null")
        weights = reader.mapping("weights")
        if "weights" in reader.bad:
            continue
        for key, expected in _MXFP4_FORMAT.items():
            value = (weights or {}).get(key)
            if value != expected:
                reader.fault(f"weights.{key} = {shown(value)} is not supported: {expected!r}")
