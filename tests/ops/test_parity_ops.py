"""Ops against independent float64 results: reference and CPU kernels in float64 and float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builtin_kernels import KERNELS, dtype_name, runnable, small_table
from kda_parity import GATES, gate_bundle
from op_parity import BOUND, CHECKS, Worst, bundle, mla_expanded_case
from shared_data import SHARED

from k3port.model.config import ActivationConfig, ModelConfig, MoeConfig
from k3port.model.config_file import parse_config
from k3port.model.mlp import LatentMoe
from k3port.model.params import ParamReader
from k3port.ops.conv import short_conv
from k3port.ops.kda import kda_gate
from k3port.ops.linear import linear
from k3port.ops.mla import apply_output_gate, attend
from k3port.ops.moe import moe_experts
from k3port.ops.moe_weights import StoredExperts, stack_dense
from k3port.ops.quant import Mxfp4Tensor, dequantize_mxfp4
from k3port.ops.segment import make_segment
from k3port.oracle.spec import KernelSpec
from k3port.runtime.compare import ForcedRouting
from k3port.testing.harness import build_kernel
from k3port.testing.synthetic import tiny_k3_config

DTYPES = (torch.float64, torch.float32)
CASES = [
    (name, spec, dtype)
    for name, (op, phase, _) in CHECKS.items()
    for dtype in DTYPES
    for spec in runnable(op, phase, dtype)
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)


@pytest.mark.parametrize(("name", "spec", "dtype"), CASES, ids=[f"{n}-{s.name}-{dtype_name(d)}" for n, s, d in CASES])
def test_parity(name: str, spec: KernelSpec, dtype: torch.dtype) -> None:
    _, phase, check = CHECKS[name]
    error = check(build_kernel(spec, KERNELS, phase), dtype)
    # An error of exactly zero against numbers from elsewhere would mean that nothing was compared.
    assert 0 < error <= BOUND[dtype]


def test_every_text_bundle_is_used() -> None:
    """The drafter's bundle is not ours yet; the two MoE bundles are tested below."""
    folder = SHARED / "parity/ops"
    if not folder.exists():
        pytest.skip(f"needs {folder}, which is not part of the repository")
    used = {name.partition(",")[0] for name in CHECKS} | {"latent_moe", "mxfp4"}
    assert {path.stem for path in folder.glob("*.safetensors")} - used == {"spec_verify"}


@each_dtype
def test_kda_gate_formula(dtype: torch.dtype) -> None:
    """Log decays themselves, which no state shows where they are weak."""
    (data, given), worst = gate_bundle(dtype), Worst(dtype)
    for name, bound in GATES:
        g, beta = kda_gate(*given, bound)
        worst(g, data[name if bound is None else f"bounded_{name}"], name)
        worst(beta, data["beta"], "beta")
    assert worst.error > 0


@each_dtype
def test_mla_expanded_with_logsumexp_and_gate(dtype: torch.dtype) -> None:
    data, _, _ = mla_expanded_case(dtype)
    worst = Worst(dtype)
    q, latents, kv_b = data["q"], data["latent_cache"], data["kv_b"].unflatten(0, (3, 256))
    past = latents.shape[0] - q.shape[0]
    expanded = torch.einsum("lc,hec->lhe", latents[:, :512], kv_b)
    shared_key = latents[:, 512:].unsqueeze(1).expand(-1, 3, -1)
    o, lse = attend(q, torch.cat((expanded[..., :128], shared_key), dim=-1), expanded[..., 128:], 192**-0.5, past)
    worst(o, data["o"], "o")
    worst(lse, data["lse"], "natural-log sum of exponentials")
    worst(apply_output_gate(o.flatten(1), data["gate"]), data["o_gated"].flatten(1), "gated")
    # The absorbed form is the same function.
    q_latent = torch.cat((torch.einsum("thn,hnc->thc", q[..., :128], kv_b[:, :128]), q[..., 128:]), dim=-1)
    o_latent, lse = attend(q_latent, latents.unsqueeze(1), latents[:, :512].unsqueeze(1), 192**-0.5, past)
    worst(torch.einsum("thc,hvc->thv", o_latent, kv_b[:, 128:]), data["o"], "absorbed o")
    worst(lse, data["lse"], "absorbed log sum")


@each_dtype
def test_mla_paged_decode_logsumexp(dtype: torch.dtype) -> None:
    data, worst = bundle("mla_paged_decode", dtype), Worst(dtype)
    for name in ("h12", "h96"):
        q = torch.cat((data[f"q_lat_{name}"], data[f"q_r_{name}"]), dim=-1)
        requests = data["h96_requests"].tolist() if name == "h96" else range(6)
        for i, request in enumerate(requests):
            length = int(data["kv_lens"][request])
            pages = [page for page in data["block_table"][request].tolist() if page >= 0]
            rows = data["kv_pages"][pages].flatten(0, 1)[:length].unsqueeze(1)
            _, lse = attend(q[i : i + 1], rows, rows[..., :512], 192**-0.5, length - 1)
            worst(lse[0], data[f"lse_{name}"][i], f"{name}, request {request}")


@each_dtype
def test_conv_tails_of_a_verification(dtype: torch.dtype) -> None:
    """The window after each count of accepted tokens, token by token."""
    data, worst = bundle("kda_verify", dtype), Worst(dtype)
    tail = torch.zeros(2, 3, 24, dtype=dtype)
    tail[1] = data["conv_tail_init"]
    weight = data["conv_weight"].to(dtype).flatten(1)
    step = runnable("short_conv", "decode", dtype)
    for function in (short_conv, *(build_kernel(spec, KERNELS) for spec in step)):
        tails = tail.clone()
        for t in range(8):
            y = function(data["conv_x"][t : t + 1], weight, tails, make_segment("decode", [1], [1]))
            worst(y[0], data["conv_y"][t], f"token {t}")
            assert torch.equal(tails[1], data["conv_tail_after"][t])


@each_dtype
def test_mxfp4(dtype: torch.dtype) -> None:
    data = bundle("mxfp4", torch.float64)
    value = dequantize_mxfp4(data["packed"], data["scale"], torch.float64)
    assert torch.equal(value.isnan(), data["value"].isnan())
    assert data["value"].isnan().all(dim=1).tolist() == [False] * 6 + [True]
    assert torch.equal(value.nan_to_num(), data["value"].nan_to_num())
    random = dequantize_mxfp4(data["rand_packed"], data["rand_scale"], dtype)
    assert torch.equal(random, data["rand_value"].to(dtype))
    Worst(dtype)(linear(data["rand_x"].to(dtype), random), data["rand_y"], "product")


def moe_config() -> tuple[ModelConfig, MoeConfig]:
    values = tiny_k3_config()
    values["text_config"] |= {"hidden_size": 96, "num_experts": 12, "num_experts_per_token": 3}
    values["text_config"] |= {"moe_intermediate_size": 96, "routed_expert_hidden_size": 64}
    config = parse_config(values)
    assert config.moe is not None
    return config, config.moe


def moe_params(data: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, object]:
    def stack(name: str) -> list[Mxfp4Tensor]:
        return [Mxfp4Tensor(p, s) for p, s in zip(data[f"{name}_packed"], data[f"{name}_scale"], strict=True)]

    return {
        "router": data["gate"],
        "correction_bias": data["bias"].to(dtype),
        "latent_down": data["routed_expert_down_proj"],
        "latent_norm": data["routed_expert_norm"],
        "latent_up": data["routed_expert_up_proj"],
        "shared_gate_up": torch.cat((data["shared_gate_proj"], data["shared_up_proj"])),
        "shared_down": data["shared_down_proj"],
        "experts": StoredExperts(gate=stack("w1"), up=stack("w3"), down=stack("w2")),
    }


@pytest.mark.parametrize("references", [True, False], ids=["reference", "cpu"])
@each_dtype
def test_latent_moe_block(dtype: torch.dtype, references: bool) -> None:
    """Router, experts, latent norm and shared experts of a whole block; then all tokens sent to expert 4."""
    data, worst = bundle("latent_moe", dtype), Worst(dtype)
    config, moe = moe_config()
    params = moe_params(data, dtype)
    table = small_table(config, dtype, references)
    if not references:
        params["experts"] = stack_dense(params["experts"], dtype)  # type: ignore[arg-type]

    def block(**overrides: object) -> LatentMoe:
        changed = small_table(config, dtype, references, **overrides)
        activation = ActivationConfig("situ", 4.0, 25.0)
        return LatentMoe(moe, activation, config.norm_eps, ParamReader(dict(params)), changed)

    router = replace(block().router)
    ids, weights = table.moe_route(data["h"], router)
    assert float(data["margin"].min()) > 1e-6
    order = ids.argsort(dim=-1)
    assert torch.equal(ids.gather(-1, order), data["idx"].long().sort(dim=-1).values)
    worst(weights.gather(-1, order), data["weights"].gather(-1, data["idx"].long().argsort(dim=-1)), "weights")
    latent = linear(data["h"], data["routed_expert_down_proj"])
    worst(table.moe_experts(latent, ids, weights, params["experts"], 4.0, 25.0), data["latent_sum"], "latent sum")
    worst(block()(data["h"]), data["y"], "block")
    forced = ForcedRouting(torch.full((1, 17, 1), 4), torch.ones(1, 17, 1, dtype=torch.float64))
    worst(block(moe_route=forced)(data["h"]), data["y_all_to_one"], "all to expert 4")
    assert worst.error > 0


def test_stored_experts_of_the_bundle_match_dense_ones() -> None:
    data = bundle("latent_moe", torch.float64)
    stored = moe_params(data, torch.float64)["experts"]
    assert isinstance(stored, StoredExperts)
    dense = stack_dense(stored, torch.float64)
    assert torch.equal(
        dense.gate_up[4, :96], dequantize_mxfp4(data["w1_packed"][4], data["w1_scale"][4], torch.float64)
    )
    assert torch.equal(
        dense.gate_up[4, 96:], dequantize_mxfp4(data["w3_packed"][4], data["w3_scale"][4], torch.float64)
    )
    assert torch.equal(dense.down[4], dequantize_mxfp4(data["w2_packed"][4], data["w2_scale"][4], torch.float64))
    x = linear(data["h"], data["routed_expert_down_proj"])
    y = moe_experts(x, data["idx"].long(), data["weights"], stored, 4.0, 25.0)
    Worst(torch.float64)(y, data["latent_sum"], "latent sum")
