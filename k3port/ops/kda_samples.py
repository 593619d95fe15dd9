"""Samples and invariants of the KDA contracts. Random normals hide KDA faults, so most of these are not normal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Sample, relative_rms
from k3port.ops.segment import make_segment


def gate_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for bound in (-5.0, -1.0, -0.1, -0.01, None):
        for name, tokens, spread in (("ordinary", 12, 1.0), ("saturated", 5, 60.0), ("no tokens", 0, 1.0)):
            args = {
                "gate_raw": (torch.randn(tokens, 3 * 128, generator=gen) * spread).to(dtype),
                "beta_logit": (torch.randn(tokens, 3, generator=gen) * spread).to(dtype),
                "A_log": torch.randn(3, generator=gen),
                "dt_bias": torch.randn(3 * 128, generator=gen),
                "lower_bound": bound,
            }
            yield Sample(f"{name}, bound {bound}", args, adversarial=spread > 1)


def check_gate_values(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Both gate forms at points that can be checked by hand."""
    for a_log, z, bounded, softplus in (
        (0.0, 0.0, -2.5, -math.log(2)),
        (0.5, 1.0, -4.19359076, -2.16520248),
        (0.5, -1.0, -0.806409242, -0.516481208),
        (2.0, 5.0, -5.0, -36.9949),
    ):
        for bound, expected in ((-5.0, bounded), (None, softplus)):
            raw, logit = torch.full((1, 4), z, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
            g, beta = function(raw, logit, torch.tensor([a_log]), torch.zeros(4), bound)
            assert g.shape == (1, 1, 4)
            assert torch.allclose(g.double(), torch.tensor(expected).double(), rtol=2e-6)
            assert float(beta[0, 0]) == 0.5


def core_inputs(
    dtype: torch.dtype,
    gen: torch.Generator,
    lengths: list[int],
    slots: list[int],
    *,
    phase: Phase = "prefill",
    heads: int = 2,
    dim: int = 128,
    gate: float | None = None,
    rho: float | None = None,
) -> dict[str, Any]:
    """Arguments of ``kda_core``.

    Args:
        gate: constant log decay; None draws from (-5, 0).
        rho: correlation of neighbouring keys (1.0: one key repeated), with beta near 0.98; None: independent keys.
    """
    tokens = sum(lengths)
    k = torch.randn(tokens, heads, dim, generator=gen)
    beta = torch.sigmoid(torch.randn(tokens, heads, generator=gen))
    if rho is not None and tokens:
        k = rho * k[:1] + math.sqrt(1 - rho * rho) * k
        beta = torch.full((tokens, heads), 0.98)
    if gate is None:
        g = -5 * torch.sigmoid(2 * torch.randn(tokens, heads, dim, generator=gen))
    else:
        g = torch.full((tokens, heads, dim), gate)
    return {
        "q": torch.randn(tokens, heads, dim, generator=gen).to(dtype),
        "k": k.to(dtype),
        "v": torch.randn(tokens, heads, dim, generator=gen).to(dtype),
        "g": g,
        "beta": beta,
        "state": torch.randn(max([*slots, 1]) + 2, heads, dim, dim, generator=gen) * 0.3,
        "segment": make_segment(phase, lengths, slots),
    }


def core_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 130):
        yield Sample(f"{tokens} tokens", core_inputs(dtype, gen, [tokens], [1]))
    for gate in (-5.0, -3.0, -2.5, -1.0, -0.1, -0.01, 0.0, -30.0):
        args = core_inputs(dtype, gen, [130], [1], gate=gate)
        yield Sample(f"constant log decay {gate:g}", args, adversarial=True)
    mixed = core_inputs(dtype, gen, [64], [1])
    mixed["g"][..., ::2] = -5.0
    mixed["g"][..., 1::2] = -0.01
    yield Sample("log decay mixed per channel", mixed, adversarial=True)
    for rho in (0.9, 1.0):
        for gate in (-0.01, -5.0):
            args = core_inputs(dtype, gen, [130], [1], gate=gate, rho=rho)
            # With one key repeated and hardly any decay the written rows of a chunk cancel in each output: a form that
            # keeps them in 16 bits is off by sqrt(64) roundings.
            allowance = 2.0 if gate > -1 else 1.0
            yield Sample(f"keys correlated {rho}, log decay {gate:g}", args, adversarial=True, allowance=allowance)
    yield Sample("ragged with empty and single", core_inputs(dtype, gen, [1, 0, 64, 1, 65], [5, 2, 1, 4, 3]), True)
    yield Sample("ragged with padding", core_inputs(dtype, gen, [5, 17, 3], [2, 0, 1]), True)
    # Longer than what a kernel may hold at once; a weak decay, so that an error far back is still seen.
    yield Sample("1100 tokens", core_inputs(dtype, gen, [1100], [1], heads=1, dim=16, gate=-0.01), True)
    # The epsilon of the normalisation is as large as these sums of squares.
    faint = core_inputs(dtype, gen, [33], [1])
    faint |= {name: faint[name] * 1e-4 for name in ("q", "k")}
    yield Sample("faint q and k", faint, adversarial=True)
    yield Sample("zero q, k, v", {**core_inputs(dtype, gen, [5], [1]), **_zeros(dtype, 5)}, adversarial=True)
    yield Sample("decode", core_inputs(dtype, gen, [1, 1, 1], [3, 1, 6], phase="decode"))
    yield Sample("decode with padding", core_inputs(dtype, gen, [1] * 4, [0, 2, 0, 1], phase="decode"), True)


def _zeros(dtype: torch.dtype, tokens: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tokens, 2, 128, dtype=dtype) for name in ("q", "k", "v")}


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 2e-5)


def check_core_split(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """A sequence in two calls equals one call, output and state."""
    args = core_inputs(dtype, gen, [70], [1], gate=-0.1)
    whole_state = args["state"].clone()
    whole = function(**{**args, "state": whole_state})
    for cut in (1, 16, 33, 69):
        state = args["state"].clone()
        parts = []
        for rows, length in ((slice(0, cut), cut), (slice(cut, 70), 70 - cut)):
            part = {name: args[name][rows].clone() for name in ("q", "k", "v", "g", "beta")}
            parts.append(function(**part, state=state, segment=make_segment("prefill", [length], [1])))
        assert relative_rms(torch.cat(parts), whole) < _tolerance(dtype), f"output differs when cut at {cut}"
        assert relative_rms(state[1], whole_state[1]) < _tolerance(dtype), f"state differs when cut at {cut}"


def check_core_batch(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Requests in one batch, in any slot order, equal each request alone."""
    lengths, slots = [3, 17, 0, 64, 1], [4, 1, 5, 3, 2]
    args = core_inputs(dtype, gen, lengths, slots)
    batch_state = args["state"].clone()
    batch = function(**{**args, "state": batch_state})
    for (begin, end), slot, length in zip(args["segment"].spans(), slots, lengths, strict=True):
        state = args["state"].clone()
        one = {name: args[name][begin:end].clone() for name in ("q", "k", "v", "g", "beta")}
        alone = function(**one, state=state, segment=make_segment("prefill", [length], [slot]))
        if length:
            assert relative_rms(batch[begin:end], alone) < _tolerance(dtype)
        assert relative_rms(batch_state[slot], state[slot]) < _tolerance(dtype)


def check_core_slots(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Slots that no live row names keep their bits; padding rows come back as zeros."""
    args = core_inputs(dtype, gen, [1] * 3, [0, 2, 0], phase="decode")
    args["state"][0] = torch.nan
    before = args["state"].clone()
    out = function(**args)
    for slot in range(before.shape[0]):
        same = torch.equal(args["state"][slot].nan_to_num(7.0), before[slot].nan_to_num(7.0))
        assert same == (slot != 2), f"slot {slot}"
    for row in (0, 2):
        assert torch.equal(out[row], torch.zeros_like(out[row]))
    assert torch.isfinite(out[1]).all()
    assert out[1].abs().sum() > 0


def block_samples(dtype: torch.dtype, gen: torch.Generator, params_type: Any, state_type: Any) -> Iterator[Sample]:
    """Whole-layer calls; the record types are passed in because they are defined beside the references."""
    heads, dim, width = 2, 64, 4
    channels = heads * dim

    def sample(
        name: str, phase: Phase, lengths: list[int], slots: list[int], bound: float | None, adversarial: bool = False
    ) -> Sample:
        tokens, num_slots = sum(lengths), max([*slots, 1]) + 2
        params = params_type(
            conv=torch.randn(3 * channels, width, generator=gen) * 0.5,
            A_log=torch.randn(heads, generator=gen) * 0.5,
            dt_bias=torch.randn(channels, generator=gen) - 1,
            o_norm=1 + 0.2 * torch.randn(dim, generator=gen),
            num_heads=heads,
            head_dim=dim,
            lower_bound=bound,
            norm_eps=1e-5,
        )
        state = state_type(
            conv=torch.randn(num_slots, width - 1, 3 * channels, generator=gen).to(dtype),
            recurrent=torch.randn(num_slots, heads, dim, dim, generator=gen) * 0.2,
            arrivals=torch.zeros(num_slots, heads, dtype=torch.int32),
        )
        args = {
            "qkv": torch.randn(tokens, 3 * channels, generator=gen).to(dtype),
            "gate_raw": torch.randn(tokens, channels, generator=gen).to(dtype),
            "beta_logit": torch.randn(tokens, heads, generator=gen).to(dtype),
            "out_gate": torch.randn(tokens, channels, generator=gen).to(dtype),
            "params": params,
            "state": state,
            "segment": make_segment(phase, lengths, slots),
        }
        return Sample(name, args, adversarial)

    for bound in (-5.0, None):
        yield sample(f"prefill, bound {bound}", "prefill", [65], [1], bound)
        yield sample(f"ragged, bound {bound}", "prefill", [1, 0, 2, 40], [3, 1, 4, 2], bound, adversarial=True)
        yield sample(f"decode, bound {bound}", "decode", [1, 1], [2, 1], bound)
    yield sample("prefill with padding", "prefill", [4, 3], [0, 1], -5.0, adversarial=True)
    yield sample("decode with padding", "decode", [1, 1, 1], [0, 2, 1], -5.0, adversarial=True)
