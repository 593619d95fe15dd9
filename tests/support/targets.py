"""Targets without the platform file: what one GPU of a kind offers, with package versions that the test chooses."""

from __future__ import annotations

from functools import cache

from k3port.model.config import ModelConfig
from k3port.model.config_file import parse_config
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import Device, KernelSpec, OpQuery, Plan, Selection, Target, Vendor
from k3port.plugins import make_registry
from k3port.runtime.planner import Workload, model_queries

_NVIDIA: dict[str, tuple[str, int, str]] = {
    "h100": ("sm_90", 227 << 10, "multicast nvlink nvswitch"),
    "h200": ("sm_90", 227 << 10, "multicast nvlink nvswitch"),
    "b200": ("sm_100", 227 << 10, "multicast nvlink nvswitch"),
    "b300": ("sm_103", 227 << 10, "multicast nvlink nvswitch"),
    "gb200": ("sm_100", 227 << 10, "multicast nvlink nvswitch mnnvl"),
    "gb300": ("sm_103", 227 << 10, "multicast nvlink nvswitch mnnvl"),
    "rtx-pro-6000": ("sm_120", 99 << 10, "pcie"),
}
_AMD: dict[str, tuple[str, int, str]] = {
    "mi300x": ("gfx942", 64 << 10, "xgmi"),
    "mi325x": ("gfx942", 64 << 10, "xgmi"),
    "mi355x": ("gfx950", 160 << 10, "xgmi"),
    "mi450": ("gfx1250", 320 << 10, "xgmi"),
}
PLATFORMS = ("cpu", *_NVIDIA, *_AMD)
_CANONICAL = {"flashinfer": "flashinfer-python", "aiter": "amd-aiter", "fla": "fla-core"}
_PACKAGES = {
    "nvidia": {"flashinfer-python": "0.7.4", "fla-core": "0.6.0", "triton": "3.7.0", "torch": "2.14.0"},
    "amd": {"amd-aiter": "0.1.26", "flydsl": "0.3.1", "fla-core": "0.6.0", "triton": "3.7.0", "torch": "2.14.0"},
    "cpu": {"torch": "2.14.0"},
}


def target(platform: str, **packages: str) -> Target:
    """A platform with everything installed; ``flashinfer="0.6.16"`` changes a version, ``flashinfer=""`` removes it."""
    vendor: Vendor = "nvidia" if platform in _NVIDIA else "amd" if platform in _AMD else "cpu"
    arch, lds, features = (_NVIDIA | _AMD).get(platform, ("cpu", 0, ""))
    changed = {_CANONICAL.get(name, name.replace("_", "-")): version for name, version in packages.items()}
    versions = {name: version for name, version in {**_PACKAGES[vendor], **changed}.items() if version}
    return Target(
        platform=platform,
        device=Device(vendor, arch, platform, "fake", count=8, lds_bytes=lds),
        packages=versions,
        packages_source="test",
        runtime={"nvidia": {"cuda": "13.0"}, "amd": {"rocm": "7.2"}, "cpu": {}}[vendor],
        features=frozenset(features.split()),
    )


_FULL_ATTENTION = [*range(4, 93, 4), 93]
_K3 = {
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 12,
    "first_k_dense_replace": 1,
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "kv_lora_rank": 512,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "full_attn_layers": _FULL_ATTENTION,
        "kda_layers": [layer for layer in range(1, 94) if layer not in _FULL_ATTENTION],
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_position_embeddings": 1048576,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_intermediate_size": 3072,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "num_expert_group": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "num_shared_experts": 2,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}


@cache
def k3_config() -> ModelConfig:
    """Kimi K3 at its published sizes."""
    return parse_config(_K3)


@cache
def kernels() -> tuple[KernelSpec, ...]:
    return make_registry(entry_points=False).kernels


def k3_queries(tp: int = 8, **changes: object) -> list[OpQuery]:
    """The slots of Kimi K3 at its published sizes on ``tp`` ranks."""
    fields: dict[str, object] = {"dtype": "bfloat16", "weight_format": "mxfp4", **changes}
    return model_queries(k3_config(), Workload(tp=tp, **fields))  # type: ignore[arg-type]


def would(plan: Plan, op: str, phase: str | None = None, tokens: int = 1) -> Selection:
    return plan.selection(op, phase, tokens=tokens, would=True)  # type: ignore[arg-type]


def k3_plan(where: Target, tp: int = 8, pins: dict[str, str] | None = None, **changes: object) -> Plan:
    return resolve(k3_queries(tp, **changes), kernels(), where, pins=pins, allow_gaps=True)


def codes(selection: Selection) -> dict[str, str]:
    return {rejection.kernel: rejection.code for rejection in selection.rejected}


def detail(selection: Selection, kernel: str) -> str:
    return next(r.detail for r in selection.rejected if r.kernel == kernel)
