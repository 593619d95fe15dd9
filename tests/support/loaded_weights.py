"""Small checkpoints to load, and what loading them must give, written out by hand from the stored names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from k3port.model.text_tensors import normalise_name
from k3port.ops.moe_weights import StoredExperts, keep_stored
from k3port.runtime.loader import Weights, load_weights
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import tiny_k3_config, tiny_kimi_linear_config

BF16 = torch.bfloat16


def wide_k3() -> dict[str, Any]:
    """16 KDA and 16 MLA heads, 16 groups of expert width: splits over 16 ranks."""
    values = tiny_k3_config()
    text = values["text_config"]
    text |= {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 160}
    text |= {"moe_intermediate_size": 512, "num_experts": 3, "vocab_size": 144}
    text["linear_attn_config"] |= {"num_heads": 16, "head_dim": 8}
    return values


def wide_kimi_linear() -> dict[str, Any]:
    values = tiny_kimi_linear_config()
    values |= {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 160}
    values |= {"moe_intermediate_size": 48, "num_experts": 3, "vocab_size": 144}
    values["linear_attn_config"] |= {"num_heads": 16, "head_dim": 8}
    return values


FAMILIES = {
    "k3": tiny_k3_config,
    "linear": tiny_kimi_linear_config,
    "wide-k3": wide_k3,
    "wide-linear": wide_kimi_linear,
}


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By normalised name, read by another library."""
    files = sorted(folder.glob("*.safetensors"))
    return {normalise_name(name): tensor for file in files for name, tensor in load_file(file).items()}


def load(folder: Path, dtype: torch.dtype = BF16, rank: int = 0, size: int = 1) -> Weights:
    return load_weights(check_checkpoint(folder), dtype=dtype, pack_experts=keep_stored, tp_rank=rank, tp_size=size)


def tensor(weights: Weights, name: str) -> torch.Tensor:
    value = weights.params[name]
    assert isinstance(value, torch.Tensor)
    return value


def experts(weights: Weights, layer: int) -> StoredExperts:
    value = weights.params[f"layers.{layer}.moe.experts"]
    assert isinstance(value, StoredExperts)
    return value


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, dtype and shape included."""
    return actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected)


def whole_model(stored: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every parameter of an unsplit model, written out by hand from the stored names."""
    expected = {
        "embed.weight": stored["embed_tokens.weight"].to(dtype),
        "lm_head.weight": stored["lm_head.weight"].to(dtype),
        "norm.weight": stored["norm.weight"].to(dtype),
    }
    if "output_attn_res_norm.weight" in stored:
        expected["output_attn_res.norm"] = stored["output_attn_res_norm.weight"].to(dtype)
        expected["output_attn_res.proj"] = stored["output_attn_res_proj.weight"][0].to(dtype)
    for layer in range(4):
        prefix = f"layers.{layer}."
        s = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix) and ".experts." not in n}
        p: dict[str, torch.Tensor] = {
            "input_norm": s["input_layernorm.weight"].to(dtype),
            "post_norm": s["post_attention_layernorm.weight"].to(dtype),
        }
        if "mlp_res_norm.weight" in s:
            p["attn_res.norm"] = s["self_attention_res_norm.weight"].to(dtype)
            p["attn_res.proj"] = s["self_attention_res_proj.weight"].flatten().to(dtype)
            p["mlp_res.norm"] = s["mlp_res_norm.weight"].to(dtype)
            p["mlp_res.proj"] = s["mlp_res_proj.weight"].flatten().to(dtype)
        a = {n.removeprefix("self_attn."): t for n, t in s.items() if n.startswith("self_attn.")}
        full_gate = "g_proj.weight" in a
        if layer < 3:
            order = ["q", "k", "v", "g", "f_a", "b"] if full_gate else ["q", "k", "v", "f_a", "g_a", "b"]
            merged = torch.cat([a[f"{part}_proj.weight"] for part in order])
            p["kda.in_proj"] = torch.cat([merged, merged.new_zeros(-len(merged) % 16, 64)]).to(dtype)
            p["kda.conv"] = torch.cat([a[f"{part}_conv1d.weight"].squeeze(1) for part in "qkv"]).float()
            p["kda.f_b"] = a["f_b_proj.weight"].to(dtype)
            if not full_gate:
                p["kda.g_b"] = a["g_b_proj.weight"].to(dtype)
            heads = a["b_proj.weight"].shape[0]
            p["kda.A_log"] = a["A_log"].flatten()[:heads]
            p["kda.dt_bias"] = a["dt_bias"]
            p["kda.o_norm"] = a["o_norm.weight"].float()
            p["kda.o_proj"] = a["o_proj.weight"].to(dtype)
        else:
            order = ["q_a_proj", "kv_a_proj_with_mqa", "g_proj"] if full_gate else ["q_proj", "kv_a_proj_with_mqa"]
            merged = torch.cat([a[f"{part}.weight"] for part in order])
            p["mla.in_proj"] = torch.cat([merged, merged.new_zeros(-len(merged) % 16, 64)]).to(dtype)
            if full_gate:
                p["mla.q_a_norm"] = a["q_a_layernorm.weight"].to(dtype)
                p["mla.q_b"] = a["q_b_proj.weight"].to(dtype)
            p["mla.kv_a_norm"] = a["kv_a_layernorm.weight"].to(dtype)
            p["mla.kv_b"] = a["kv_b_proj.weight"].to(dtype)
            p["mla.o_proj"] = a["o_proj.weight"].to(dtype)
        if layer == 0:
            p["mlp.gate_up"] = torch.cat([s["mlp.gate_proj.weight"], s["mlp.up_proj.weight"]]).to(dtype)
            p["mlp.down"] = s["mlp.down_proj.weight"].to(dtype)
        else:
            m = {n.removeprefix("block_sparse_moe."): t for n, t in s.items() if n.startswith("block_sparse_moe.")}
            p["moe.router"] = m["gate.weight"].float()
            p["moe.correction_bias"] = m["gate.e_score_correction_bias"].float()
            if "routed_expert_norm.weight" in m:
                p["moe.latent_down"] = m["routed_expert_down_proj.weight"].to(dtype)
                p["moe.latent_norm"] = m["routed_expert_norm.weight"].to(dtype)
                p["moe.latent_up"] = m["routed_expert_up_proj.weight"].to(dtype)
            halves = [m[f"shared_experts.{half}_proj.weight"] for half in ("gate", "up")]
            p["moe.shared_gate_up"] = torch.cat(halves).to(dtype)
            p["moe.shared_down"] = m["shared_experts.down_proj.weight"].to(dtype)
        expected |= {prefix + name: value for name, value in p.items()}
    return expected
