"""The structure of the published Kimi K3, for tests and golden plans: ``config.json`` without its boilerplate."""

from __future__ import annotations

from typing import Any

from k3port.model.config_file import K3_MODEL_TYPE, TEXT_MODEL_TYPE

_LAYERS = 93


def published_k3_config() -> dict[str, Any]:
    """``config.json`` of moonshotai/Kimi-K3, cut to the keys that give the model its shape and its arithmetic."""
    # Every fourth layer attends to everything, and the last one; the numbers count from 1.
    full = [*range(4, _LAYERS, 4), _LAYERS]
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": K3_MODEL_TYPE,
        "dtype": "bfloat16",
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": TEXT_MODEL_TYPE,
            "dtype": "bfloat16",
            "vocab_size": 163840,
            "hidden_size": 7168,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": 96,
            "num_key_value_heads": 96,
            "intermediate_size": 33792,
            "hidden_act": "situ",
            "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "attn_res_block_size": 12,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "linear_attn_config": {
                "kda_layers": [layer for layer in range(1, _LAYERS + 1) if layer not in full],
                "full_attn_layers": full,
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
                "gate_lower_bound": -5.0,
                "use_full_rank_gate": True,
            },
            "num_experts": 896,
            "num_experts_per_token": 16,
            "num_shared_experts": 2,
            "moe_intermediate_size": 3072,
            "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "num_expert_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mxfp4-pack-quantized",
                "quantization_status": "compressed",
                "kv_cache_scheme": None,
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "format": "mxfp4-pack-quantized",
                        "input_activations": None,
                        "output_activations": None,
                        "weights": {
                            "num_bits": 4,
                            "type": "float",
                            "strategy": "group",
                            "group_size": 32,
                            "symmetric": True,
                            "dynamic": False,
                            "scale_dtype": "torch.uint8",
                        },
                    }
                },
                "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*", "re:.*vision_tower.*"],
            },
        },
        "vision_config": {
            "patch_size": 14,
            "init_pos_emb_height": 64,
            "init_pos_emb_width": 64,
            "init_pos_emb_time": 4,
            "vt_hidden_size": 1024,
            "qkv_hidden_size": 1536,
            "vt_intermediate_size": 4096,
            "vt_num_attention_heads": 12,
            "vt_num_hidden_layers": 27,
            "merge_kernel_size": [2, 2],
            "text_hidden_size": 7168,
        },
    }
