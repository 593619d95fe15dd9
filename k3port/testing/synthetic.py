"""Small checkpoints in the official layout with reproducible weights, and two tiny configurations to write.

Every number is a formula of the tensor's name and position, so two programs that follow it hold the same weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from k3port.model.config import ModelConfig
from k3port.model.config_file import K3_MODEL_TYPE, parse_config
from k3port.model.text_tensors import TensorSpec, checkpoint_tensors
from k3port.model.vision_tensors import VISION_PREFIXES, vision_tensors

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}

EditFile = Callable[[dict[str, torch.Tensor]], object]
"""Changes the tensors of one file in place, by full name, before it is written; what it returns is ignored."""


def tiny_k3_config() -> dict[str, Any]:
    """``config.json`` of a four-layer Kimi K3: KDA KDA KDA MLA, one dense and three MoE layers, 250 tensors."""
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": K3_MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": 125,
        "eos_token_id": 126,
        "pad_token_id": 127,
        "tie_word_embeddings": False,
        "text_config": {
            **_tiny_text_config(),
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 2,
            "q_lora_rank": 24,
            "mla_use_output_gate": True,
            "num_shared_experts": 2,
            "moe_intermediate_size": 64,
            "routed_expert_hidden_size": 32,
            "latent_moe_use_norm": True,
            "routed_scaling_factor": 1.0,
            "linear_attn_config": {**_tiny_kda_config(), "gate_lower_bound": -5.0, "use_full_rank_gate": True},
            "quantization_config": _mxfp4_config(),
        },
    }


def tiny_kimi_linear_config() -> dict[str, Any]:
    """``config.json`` of a four-layer Kimi-Linear: softplus and low-rank gates, plain residual, BF16 experts."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        **_tiny_text_config(),
        "hidden_act": "silu",
        "q_lora_rank": None,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 2.446,
        "linear_attn_config": _tiny_kda_config(),
    }


def write_checkpoint(
    folder: str | Path, values: Mapping[str, Any], *, mxfp4: bool | None = None, edit: EditFile | None = None
) -> Path:
    """Writes a complete checkpoint: one file per layer, then the head, then projector and tower where configured.

    Args:
        folder: created if absent.
        values: the JSON of ``config.json``, written as it is.
        mxfp4: how routed experts are stored; None: MXFP4 where ``values`` has a ``quantization_config``.
        edit: called for each file, last, to plant alternative layouts or faults; the index follows what it leaves.

    Returns:
        ``folder``.

    Raises:
        ConfigError: ``values`` is not a configuration that k3port runs.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = parse_config(values)
    specs = full_names(values, config, mxfp4)
    ranks = {name: rank for rank, name in enumerate(sorted(specs))}
    files = [names for names in _files(config, specs) if names]
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, names in enumerate(files, start=1):
        tensors = {name: generate(name, specs[name], ranks[name], config) for name in names}
        if edit is not None:
            edit(tensors)
        file = f"model-{number:05d}-of-{len(files):06d}.safetensors"
        write_safetensors(path / file, tensors)
        weight_map.update(dict.fromkeys(tensors, file))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    ids = {key: getattr(config, attr) for key, attr in (("bos_token_id", "bos_id"), ("pad_token_id", "pad_id"))}
    eos = config.eos_ids[0] if len(config.eos_ids) == 1 else list(config.eos_ids)
    _write_json(path / "config.json", dict(values))
    _write_json(path / "generation_config.json", {**ids, "eos_token_id": eos})
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(path / "model.safetensors.index.json", index)
    return path


def full_names(values: Mapping[str, Any], config: ModelConfig, mxfp4: bool | None = None) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint by the full name it is published under."""
    is_wrapper = values.get("model_type") == K3_MODEL_TYPE
    text = values["text_config"] if is_wrapper else values
    if mxfp4 is None:
        mxfp4 = text.get("quantization_config", values.get("quantization_config")) is not None
    outer = "language_model." if is_wrapper else ""
    specs = {
        outer + ("" if name == "lm_head.weight" else "model.") + name: spec
        for name, spec in checkpoint_tensors(config, mxfp4)
        if spec.required
    }
    if config.has_vision:
        specs.update(vision_tensors(values["vision_config"]))
    return specs


def generate(name: str, spec: TensorSpec, rank: int, config: ModelConfig) -> torch.Tensor:
    """The numbers of one tensor.

    Args:
        name: full name; the first rule that matches it decides the range.
        rank: position of the name among all names of the checkpoint in ASCII order, from 0.

    Returns:
        ``spec.shape`` of ``spec.dtype``; BF16 is rounded to nearest even from float32.
    """
    if name.endswith("weight_packed"):
        index = torch.arange(spec.num_elements)
        return ((37 * index + 11 * rank + 5) % 256).to(torch.uint8).reshape(spec.shape)
    if name.endswith("weight_scale"):
        index = torch.arange(spec.num_elements)
        return (121 + (7 * index + rank) % 4).to(torch.uint8).reshape(spec.shape)
    index = torch.arange(spec.num_elements, dtype=torch.float64)
    wave = torch.sin(0.7 * (rank + 1) + 1.3 * index + 0.001 * index * index)
    if "norm" in name:
        numbers = 1 + 0.2 * wave
    elif name.endswith("A_log"):
        heads = config.kda.num_heads if config.kda else 0
        numbers = torch.where(index < heads, 0.5 * wave, 0.0)
    elif name.endswith("dt_bias"):
        numbers = wave - 1
    elif name.endswith("e_score_correction_bias"):
        numbers = 0.1 * wave
    elif "conv1d" in name:
        numbers = 0.5 * wave
    elif "embed_tokens" in name:
        numbers = wave
    else:
        numbers = 1.5 * wave / math.sqrt(spec.shape[-1])
    return numbers.to(torch.float32).to(_DTYPES[spec.dtype]).reshape(spec.shape)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes one safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _files(config: ModelConfig, specs: Mapping[str, TensorSpec]) -> list[list[str]]:
    by_layer: list[list[str]] = [[] for _ in range(config.num_layers)]
    head, projector, tower = [], [], []
    for name in specs:
        _, found, rest = name.partition("layers.")
        if name.startswith(VISION_PREFIXES):
            (tower if name.startswith("vision_tower.") else projector).append(name)
        elif found:
            by_layer[int(rest.partition(".")[0])].append(name)
        else:
            head.append(name)
    return [*by_layer, head, projector, tower]


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _tiny_text_config() -> dict[str, Any]:
    return {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 4096,
        "bos_token_id": 125,
        "eos_token_id": 126,
        "pad_token_id": 127,
    }


def _tiny_kda_config() -> dict[str, Any]:
    return {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    }


def _mxfp4_config() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "format": "mxfp4-pack-quantized",
                "weights": {**weights, "dynamic": False, "scale_dtype": "torch.uint8"},
            }
        },
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
    }
