"""Write a k3-nano model in the official Kimi K3 checkpoint layout (text part only).

Usage: ``python export.py --weights FILE.safetensors --tokenizer DIR --out DIR``; ``--random`` exports an untrained
model. One safetensors file per layer, then the head file, index, config and tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model import Config, K3Nano
from mxfp4 import pack
from tokenizer import BOS, END, RANKS, SLOTS

CONTEXT = 8192
PREFIX = "language_model."
FLOAT32 = ("A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias", "conv1d.weight")


def config_json(c: Config) -> dict[str, object]:
    """The two-level ``config.json``."""
    ids = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": RANKS + SLOTS - 1}
    weights = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    quantisation = {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    full = [i + 1 for i in range(c.layers) if i + 1 not in c.kda_layers]
    text = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.heads,
        "intermediate_size": c.dense,
        "hidden_act": "situ",
        "activation_situ_beta": c.beta,
        "activation_situ_linear_beta": c.linear_beta,
        "rms_norm_eps": c.eps,
        "initializer_range": 0.02,
        "use_cache": True,
        "q_lora_rank": c.q_rank,
        "kv_lora_rank": c.kv_rank,
        "qk_nope_head_dim": c.nope,
        "qk_rope_head_dim": c.rope,
        "v_head_dim": c.value,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": c.experts,
        "num_experts_per_token": c.top_k,
        "num_shared_experts": c.shared,
        "moe_intermediate_size": c.expert_width,
        "routed_expert_hidden_size": c.latent,
        "latent_moe_use_norm": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "routed_scaling_factor": 1.0,
        "attn_res_block_size": c.block,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        **ids,
        "linear_attn_config": {
            "kda_layers": list(c.kda_layers),
            "full_attn_layers": full,
            "num_heads": c.heads,
            "head_dim": c.head_dim,
            "short_conv_kernel_size": c.conv,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": quantisation,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        **ids,
        "ignore_index": -100,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def model_tensors(model: K3Nano) -> dict[str, torch.Tensor]:
    """Plain tensors by internal name, router biases included (the format of ``master.safetensors``)."""
    tensors = {name: p.detach().cpu() for name, p in model.named().items()}
    for i in range(1, model.config.layers):
        tensors[f"model.layers.{i}.block_sparse_moe.gate.e_score_correction_bias"] = model.bias(i).detach().cpu()
    return tensors


def load_tensors(model: K3Nano, tensors: dict[str, torch.Tensor]) -> None:
    """Inverse of :func:`model_tensors`."""
    named = model.named()
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name.endswith("e_score_correction_bias"):
                model.bias(int(name.split(".")[2])).copy_(tensor)
            else:
                named[name].copy_(tensor)


def checkpoint_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Final names and dtypes: experts packed to MXFP4, float32 islands kept, everything else bfloat16."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts.w" in name:
            base, which = name.rsplit(".", 1)
            packed, scale = pack(tensor)
            for e in range(tensor.shape[0]):
                out[f"{PREFIX}{base}.{e}.{which}.weight_packed"] = packed[e].clone()
                out[f"{PREFIX}{base}.{e}.{which}.weight_scale"] = scale[e].clone()
        elif name.endswith("A_log"):
            padded = torch.zeros(128)
            padded[: tensor.numel()] = tensor.float()
            out[PREFIX + name] = padded
        elif name.endswith(FLOAT32):
            out[PREFIX + name] = tensor.float().contiguous().clone()
        else:
            out[PREFIX + name] = tensor.to(torch.bfloat16).contiguous().clone()
    return out


def write_checkpoint(tensors: dict[str, torch.Tensor], config: Config, tokenizer: Path, out: Path) -> int:
    """Write the folder; returns the number of tensor bytes."""
    out.mkdir(parents=True, exist_ok=True)
    final = checkpoint_tensors(tensors)
    count = config.layers + 1
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name in sorted(final):
        parts = name.split(".")
        files[int(parts[3]) if parts[2] == "layers" else count - 1][name] = final[name]
    weight_map, total = {}, 0
    for number, content in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{count:06d}.safetensors"
        save_file(content, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
        total += sum(t.numel() * t.element_size() for t in content.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(config_json(config), indent=1))
    ids = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": RANKS + SLOTS - 1}
    (out / "generation_config.json").write_text(json.dumps(ids))
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, out / name)
    return total


def read_checkpoint(folder: Path, config: Config | None = None) -> K3Nano:
    """A model with the weights of an exported folder (experts dequantised)."""
    from mxfp4 import unpack

    config = config or Config()
    flat: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        flat |= {name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in flat.items():
        if ".experts." not in name:
            tensors[name] = tensor.flatten()[: config.heads] if name.endswith("A_log") else tensor.float()
        elif name.endswith(".0.w1.weight_packed"):
            base = name.removesuffix("0.w1.weight_packed")
            for which in ("w1", "w2", "w3"):
                tensors[base + which] = torch.stack(
                    [
                        unpack(flat[f"{base}{e}.{which}.weight_packed"], flat[f"{base}{e}.{which}.weight_scale"])
                        for e in range(config.experts)
                    ]
                )
    model = K3Nano(config)
    load_tensors(model, tensors)
    return model


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, nargs="+", help="master weights (parts are merged)")
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.random:
        tensors = model_tensors(K3Nano(Config()))
    else:
        tensors = {name: t for file in args.weights for name, t in load_file(file).items()}
    print("tensor bytes", write_checkpoint(tensors, Config(), args.tokenizer, args.out))


if __name__ == "__main__":
    main()
