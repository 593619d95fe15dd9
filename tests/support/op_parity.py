"""Checks of ops against the bundles of ``../shared/parity/ops``: independent float64 results for the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from shared_data import shared_tensors

from k3port.ops.catalog import Phase
from k3port.ops.contract import relative_rms
from k3port.ops.mla import MlaParams
from k3port.ops.moe import RouterParams
from k3port.ops.segment import Segment, make_segment

Op = Callable[..., Any]
Check = Callable[[Op, torch.dtype], float]
CHECKS: dict[str, tuple[str, Phase | None, Check]] = {}
"""Name to op, phase and check; a check returns the worst relative RMS error and raises where one is too large."""

BOUND = {torch.float64: 1e-7, torch.float32: 2e-6}
"""Relative RMS. In float64 the inputs are exact and some results were rounded to float32 (3e-8); float32 shows 5e-7."""


def parity(name: str, op: str, phase: Phase | None = None) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[name] = (op, phase, check)
        return check

    return register


class Worst:
    """Compares, remembers the largest error."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.error, self.bound = 0.0, BOUND[dtype]

    def __call__(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        error = relative_rms(actual, expected)
        assert error <= self.bound, f"{what}: relative RMS error {error:.2e} above {self.bound:.0e}"
        self.error = max(self.error, error)


def bundle(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs (bfloat16 and float32) in ``dtype``, exactly; float64 results stay."""
    tensors = shared_tensors(f"parity/ops/{name}.safetensors")
    return {k: t.to(dtype) if t.dtype == torch.bfloat16 else t for k, t in tensors.items()}


@parity("rms_norm", "rms_norm")
def check_rms_norm(rms_norm: Op, dtype: torch.dtype) -> float:
    data, worst = bundle("rms_norm", dtype), Worst(dtype)
    for name, eps in (("1e-05", 1e-5), ("1e-06", 1e-6), ("1.19e-07", 2.0**-23)):
        y, expected = rms_norm(data["x"], data["weight"], eps), data[f"y_eps{name}"]
        for row in range(y.shape[0]):
            worst(y[row], expected[row], f"eps {name}, row {row}")
    return worst.error


@parity("gated_norm", "gated_norm")
def check_gated_norm(gated_norm: Op, dtype: torch.dtype) -> float:
    data, worst = bundle("gated_norm", dtype), Worst(dtype)
    y = gated_norm(data["x"], data["gate"], data["weight"].to(dtype), 1e-5)
    for row in range(y.shape[0]):
        worst(y[row], data["y"][row], f"row {row}")
    assert not y[0].any(), "row 0 is zero"
    return worst.error


@parity("situ", "situ_mul")
def check_situ(situ_mul: Op, dtype: torch.dtype) -> float:
    data, worst = bundle("situ", dtype), Worst(dtype)
    rows = torch.stack((data["a"], data["b"]), dim=-1)
    for name, beta, linear_beta in (
        ("y", 4.0, 25.0),
        ("y_uncapped", 4.0, None),
        ("y_beta1", 1.0, 25.0),
        ("swiglu", None, None),
    ):
        worst(situ_mul(rows, beta, linear_beta)[:, 0], data[name], name)
    return worst.error


@parity("attn_res", "attn_res")
def check_attn_res(attn_res: Op, dtype: torch.dtype) -> float:
    data, worst = bundle("attn_res", dtype), Worst(dtype)
    blocks, partial = data["sources"][:, :8].transpose(0, 1), data["sources"][:, 8]
    for sources in range(1, 10):
        mix = attn_res(partial, None, blocks, sources - 1, False, data["gamma"], data["w"][0], None, 1e-5)
        worst(mix, data[f"mix_{sources}"], f"{sources} sources")
    return worst.error


def _conv(short_conv: Op, dtype: torch.dtype, phase: Phase) -> float:
    data, worst = bundle("short_conv", dtype), Worst(dtype)
    weight = data["weight"].to(dtype).flatten(1)
    for tokens in (1, 2, 3, 70):
        tail = torch.zeros(3, 3, 96, dtype=dtype)
        tail[2] = data["tail"]
        x = data["x"][:tokens]
        if phase == "prefill":
            y = short_conv(x, weight, tail, make_segment("prefill", [tokens], [2]))
        else:
            y = torch.cat([short_conv(row, weight, tail, make_segment("decode", [1], [2])) for row in x.split(1)])
        worst(y, data[f"y_tail_T{tokens}"], f"{tokens} tokens after a tail")
        assert torch.equal(tail[2], data[f"tail_after_T{tokens}"]), f"tail after {tokens} tokens"
    return worst.error


@parity("short_conv", "short_conv", "prefill")
def check_conv_prefill(short_conv: Op, dtype: torch.dtype) -> float:
    data, worst = bundle("short_conv", dtype), Worst(dtype)
    weight = data["weight"].to(dtype).flatten(1)
    y = short_conv(data["x"], weight, torch.zeros(2, 3, 96, dtype=dtype), make_segment("prefill", [70], [1]))
    worst(y, data["y_zero_tail"], "zero tail")
    lengths = data["cu_seqlens"].diff().tolist()
    assert 0 in lengths, "one of the packed sequences is empty"
    slots = list(range(1, len(lengths) + 1))
    y = short_conv(
        data["x"], weight, torch.zeros(len(slots) + 1, 3, 96, dtype=dtype), make_segment("prefill", lengths, slots)
    )
    worst(y, data["y_packed"], "packed")
    return max(worst.error, _conv(short_conv, dtype, "prefill"))


@parity("short_conv, token by token", "short_conv", "decode")
def check_conv_decode(short_conv: Op, dtype: torch.dtype) -> float:
    return _conv(short_conv, dtype, "decode")


@parity("router", "moe_route")
def check_router(moe_route: Op, dtype: torch.dtype) -> float:
    """Every variant; a choice may differ only where the margin is below the rounding of the scores."""
    data, worst = bundle("router", dtype), Worst(dtype)
    weight, bias = data["weight"].to(dtype), data["bias"].to(dtype)
    logits = data["h"][:4] @ weight.T
    worst(logits, data["logits"], "logits")
    variants: dict[str, dict[str, Any]] = {
        "sigmoid_plain": {"renormalize": False},
        "sigmoid_renorm": {},
        "sigmoid_scaled": {"scaling_factor": 2.446},
        "softmax": {"softmax": True},
        "grouped": {"num_groups": 8, "top_k_groups": 3},
        "top1": {"top_k": 1},
    }
    for name, switches in variants.items():
        settings = {"top_k": 16, "softmax": False, "renormalize": True, "scaling_factor": 1.0, **switches}
        ids, weights = moe_route(data["h"], RouterParams(weight, bias, **settings))
        wanted_ids, wanted = data[f"{name}_idx"].long(), data[f"{name}_weight"]
        margin = data.get(f"{name}_margin", torch.ones(32))
        assert float(margin.min()) > 1e-6
        assert torch.equal(ids.sort(dim=-1).values, wanted_ids.sort(dim=-1).values), f"{name}: other experts"
        worst(weights.gather(-1, ids.argsort(dim=-1)), wanted.gather(-1, wanted_ids.argsort(dim=-1)), name)
    tie = RouterParams(data["tie_weight"], data["tie_bias"].to(dtype), 2, False, True, 1.0)
    ids, weights = moe_route(data["h"], tie)
    assert torch.equal(ids.int(), data["tie_idx"]), "equal scores take the lowest expert first"
    worst(weights, data["tie_weights"], "ties")
    return worst.error


def mla_expanded_case(dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor, Segment]:
    """The bundle, a cache of permuted pages with all 65 rows, and the segment of the 40 new tokens."""
    data = bundle("mla_expanded", dtype)
    total, pages = data["latent_cache"].shape[0], [2, 0]
    cache = torch.full((3, 64, 576), 1e4, dtype=dtype)
    for position in range(total):
        cache[pages[position // 64], position % 64] = data["latent_cache"][position]
    tokens = data["q"].shape[0]
    return data, cache, make_segment("prefill", [tokens], [1], [total - tokens], [pages], 64)


@parity("mla_expanded", "mla_attend", "prefill")
def check_mla_expanded(attend: Op, dtype: torch.dtype) -> float:
    worst = Worst(dtype)
    data, cache, segment = mla_expanded_case(dtype)
    worst(attend(data["q"], data["kv_b"].unflatten(0, (3, 256)), cache, 192**-0.5, segment), data["o"], "o")
    return worst.error


@parity("mla_expanded, gated", "mla", "prefill")
def check_mla_gated(mla: Op, dtype: torch.dtype) -> float:
    worst = Worst(dtype)
    data, cache, segment = mla_expanded_case(dtype)
    # The bundle's rows are normed already: to the append, the new tokens are padding.
    segment = replace(segment, cache_rows=torch.full_like(segment.cache_rows, -1), has_padding=True)
    kv_b = data["kv_b"].unflatten(0, (3, 256))
    params = MlaParams(torch.ones(512, dtype=dtype), kv_b, 128, 512, 192**-0.5, norm_eps=1e-6)
    o = mla(data["q"], data["latent_cache"][-40:], data["gate"], params, cache, segment)
    worst(o, data["o_gated"].flatten(1), "gated")
    return worst.error


@parity("mla_paged_decode", "mla_attend", "decode")
def check_mla_paged_decode(attend: Op, dtype: torch.dtype) -> float:
    """Permuted pages, ragged lengths, garbage of 1e4 in every unused place; 12, 3 and 96 heads; also one by one."""
    data, worst = bundle("mla_paged_decode", dtype), Worst(dtype)
    cache, lengths = data["kv_pages"], data["kv_lens"].tolist()
    tables = [[page for page in row if page >= 0] for row in data["block_table"].tolist()]
    q12 = torch.cat((data["q_lat_h12"], data["q_r_h12"]), dim=-1)
    q96 = torch.cat((data["q_lat_h96"], data["q_r_h96"]), dim=-1)
    few = data["h96_requests"].tolist()
    everyone = list(range(len(lengths)))
    for name, q, expected, requests in (
        ("12 heads", q12, data["o_lat_h12"], everyone),
        ("3 heads", q12[:, :3], data["o_lat_h12"][:, :3], everyone),
        ("96 heads", q96, data["o_lat_h96"], few),
    ):
        for chosen in [list(range(len(requests))), *([i] for i in range(len(requests)))]:
            rows = [requests[i] for i in chosen]
            segment = make_segment(
                "decode",
                [1] * len(rows),
                [r + 1 for r in rows],
                [lengths[r] - 1 for r in rows],
                [tables[r] for r in rows],
                64,
            )
            o = attend(q[chosen], cache, 512, 192**-0.5, segment)
            for i, row in enumerate(chosen):
                worst(o[i], expected[row], f"{name}, request {rows[i]} of {rows}")
    return worst.error
