"""Samples of the KDA contracts. Random normals hide KDA faults, so most of these are not normal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Sample
from k3port.ops.kda_state import KdaDrafts, KdaParams, KdaState, empty_drafts
from k3port.ops.segment import Segment, make_segment

Snapshots = Sequence[tuple[int, int, int]]
CORE_INPUTS = ("q", "k", "v", "gate_raw", "beta_logit")
BLOCK_INPUTS = ("qkv", "gate_raw", "beta_logit", "out_gate")
"""Arguments that hold token rows."""


def undone_gate(g: torch.Tensor, A_log: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Float64 ``z`` for which :func:`k3port.ops.kda.kda_gate` gives ``g`` ``[..., H, K]``, with ``A_log`` ``[H]``.

    A decay that the form reaches only at infinity (0, and the bound) gets a ``z`` where float32 has arrived there.
    """
    g, a = g.double(), A_log.double().exp().unsqueeze(-1)
    if lower_bound is not None:
        return torch.logit(g / lower_bound).clamp(-200, 60) / a
    y = -g / a
    return (y + torch.log(-torch.expm1(-y))).clamp(min=-200)


def gate_inputs(
    dtype: torch.dtype,
    gen: torch.Generator,
    tokens: int,
    heads: int,
    dim: int,
    bound: float | None = -5.0,
    gate: float | torch.Tensor | None = None,
    spread: float = 2.0,
) -> dict[str, Any]:
    """Raw gates and their parameters.

    Args:
        bound: lower bound; None: softplus gate.
        gate: log decay of all tokens, one number or ``[H, K]``; the bias makes it out of raw gates that differ from
            channel to channel. None: raw gates that differ from token to token.
        spread: of the raw gates and of the logits of the write strength.
    """
    A_log = torch.randn(heads, generator=gen) * 0.5
    if gate is None:
        raw = (torch.randn(tokens, heads * dim, generator=gen) * spread).to(dtype)
        bias = torch.randn(heads * dim, generator=gen)
    else:
        raw = torch.randn(1, heads * dim, generator=gen).to(dtype)
        wanted = torch.as_tensor(gate).expand(heads, dim)
        bias = (undone_gate(wanted, A_log, bound).flatten() - raw[0].double()).float()
        raw = raw.repeat(tokens, 1)
    return {
        "gate_raw": raw,
        "beta_logit": (torch.randn(tokens, heads, generator=gen) * max(spread / 2, 1.0)).to(dtype),
        "A_log": A_log,
        "dt_bias": bias,
        "lower_bound": bound,
    }


def core_inputs(
    dtype: torch.dtype,
    gen: torch.Generator,
    lengths: list[int],
    slots: list[int],
    *,
    phase: Phase = "prefill",
    heads: int = 2,
    dim: int = 128,
    bound: float | None = -5.0,
    gate: float | torch.Tensor | None = None,
    spread: float = 2.0,
    rho: float | None = None,
    draft: bool = False,
    snapshots: Snapshots = (),
) -> dict[str, Any]:
    """Arguments of ``kda_core``.

    Args:
        bound, gate, spread: as in :func:`gate_inputs`.
        draft: the tokens are verified, with a record; its numbers are ones, so that nothing in it looks unwritten.
        rho: correlation of neighbouring keys (1.0: one key repeated), with beta near 0.98; None: independent keys.
    """
    tokens = sum(lengths)
    k = torch.randn(tokens, heads, dim, generator=gen)
    gates = gate_inputs(dtype, gen, tokens, heads, dim, bound, gate, spread)
    if rho is not None and tokens:
        k = rho * k[:1] + math.sqrt(1 - rho * rho) * k
        gates["beta_logit"] = torch.full((tokens, heads), math.log(0.98 / 0.02)).to(dtype)
    segment = make_segment(phase, lengths, slots, draft=draft, snapshots=snapshots)
    state = torch.randn(_most_slots(segment), heads, dim, dim, generator=gen) * 0.3
    return {
        "q": torch.randn(tokens, heads, dim, generator=gen).to(dtype),
        "k": k.to(dtype),
        "v": torch.randn(tokens, heads, dim, generator=gen).to(dtype),
        **gates,
        "state": state,
        "segment": segment,
        "drafts": _record(KdaState(torch.zeros(len(state), 3, 3 * heads * dim, dtype=dtype), state)) if draft else None,
    }


def _most_slots(segment: Segment) -> int:
    return max([1, *segment.slot_ids, *(slot for _, _, slot in segment.snapshots)]) + 2


def _record(state: KdaState) -> KdaDrafts:
    drafts = empty_drafts(state)
    for rows in (drafts.x, drafts.k, drafts.g, drafts.u):
        rows.fill_(1)
    return drafts


def core_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 130):
        yield Sample(f"{tokens} tokens", core_inputs(dtype, gen, [tokens], [1]))
    yield Sample("40 tokens, softplus gate", core_inputs(dtype, gen, [40], [1], bound=None))
    # Only the softplus gate decays by more than the bound.
    for gate in (-5.0, -3.0, -2.5, -1.0, -0.1, -0.01, 0.0, -30.0):
        args = core_inputs(dtype, gen, [130], [1], gate=gate, bound=None if gate < -5 else -5.0)
        yield Sample(f"constant log decay {gate:g}", args, adversarial=True)
    for gate in (-5.0, -0.01, 0.0):
        args = core_inputs(dtype, gen, [74], [1], gate=gate, bound=None)
        yield Sample(f"constant log decay {gate:g}, softplus gate", args, adversarial=True)
    for bound, name, strong in ((-5.0, "", -5.0), (None, ", softplus gate", -30.0)):
        gates = torch.tensor([strong, -0.01]).repeat(64)
        args = core_inputs(dtype, gen, [64], [1], heads=1 if bound is None else 2, gate=gates, bound=bound)
        yield Sample(f"log decay mixed per channel{name}", args, adversarial=True)
    yield Sample("gate bounded at -0.01", core_inputs(dtype, gen, [40], [1], heads=1, bound=-0.01), adversarial=True)
    for bound in (-5.0, None):
        args = core_inputs(dtype, gen, [20], [1], bound=bound, spread=60.0)
        yield Sample(f"saturated gate, bound {bound}", args, adversarial=True)
    for rho in (0.9, 1.0):
        for gate, bound in ((-0.01, -5.0), (-5.0, -5.0), (-0.01, None)):
            args = core_inputs(dtype, gen, [74 if bound is None else 130], [1], gate=gate, bound=bound, rho=rho)
            # The chunked form keeps W, U and Delta in bfloat16; here their sums over 64 tokens telescope, so that the
            # roundings add up to about sqrt(64) x 2^-9.
            allowance = {torch.bfloat16: 1.6e-2} if (rho, gate) == (1.0, -0.01) else {}
            name = f"keys correlated {rho}, log decay {gate:g}" + (", softplus gate" if bound is None else "")
            yield Sample(name, args, True, allowance)
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
    yield Sample("decode, softplus gate", core_inputs(dtype, gen, [1, 1], [2, 1], phase="decode", bound=None))
    for bound in (-5.0, None):
        args = core_inputs(dtype, gen, [1, 1, 1], [2, 3, 1], phase="decode", bound=bound, spread=60.0)
        yield Sample(f"decode, saturated gate, bound {bound}", args, adversarial=True)
    for name, lengths, slots in (("drafts", [5], [1]), ("ragged drafts with padding", [1, 8, 3, 5], [2, 1, 0, 4])):
        args = core_inputs(dtype, gen, lengths, slots, phase="decode", draft=True)
        yield Sample(name, args, adversarial=len(slots) > 1)
    args = core_inputs(dtype, gen, [3, 8], [1, 2], phase="decode", draft=True, bound=None)
    yield Sample("drafts, softplus gate", args)
    for name, lengths, slots, kept in (
        ("snapshots", [64, 70], [2, 1], [(1, 64, 5), (0, 64, 3)]),
        ("snapshots beside padding", [130, 64, 1, 200], [1, 0, 2, 3], [(0, 64, 7), (3, 192, 4), (0, 128, 6)]),
    ):
        args = core_inputs(dtype, gen, lengths, slots, heads=1, dim=64, snapshots=kept)
        yield Sample(name, args, adversarial=len(slots) > 2)


def _zeros(dtype: torch.dtype, tokens: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tokens, 2, 128, dtype=dtype) for name in ("q", "k", "v")}


def block_inputs(
    dtype: torch.dtype,
    gen: torch.Generator,
    lengths: Sequence[int],
    slots: Sequence[int],
    *,
    phase: Phase = "prefill",
    bound: float | None = -5.0,
    heads: int = 2,
    dim: int = 64,
    width: int = 4,
    draft: bool = False,
    snapshots: Snapshots = (),
) -> dict[str, Any]:
    """Arguments of ``kda``; ``draft`` and ``snapshots`` as in :func:`core_inputs`."""
    tokens, channels = sum(lengths), heads * dim
    segment = make_segment(phase, lengths, slots, draft=draft, snapshots=snapshots)
    num_slots = _most_slots(segment)
    params = KdaParams(
        conv=torch.randn(3 * channels, width, generator=gen) * 0.5,
        A_log=torch.randn(heads, generator=gen) * 0.5,
        dt_bias=torch.randn(channels, generator=gen) - 1,
        o_norm=1 + 0.2 * torch.randn(dim, generator=gen),
        num_heads=heads,
        head_dim=dim,
        lower_bound=bound,
        norm_eps=1e-5,
    )
    state = KdaState(
        conv=torch.randn(num_slots, width - 1, 3 * channels, generator=gen).to(dtype),
        recurrent=torch.randn(num_slots, heads, dim, dim, generator=gen) * 0.2,
        arrivals=torch.zeros(num_slots, heads, dtype=torch.int32),
    )
    return {
        "qkv": torch.randn(tokens, 3 * channels, generator=gen).to(dtype),
        "gate_raw": torch.randn(tokens, channels, generator=gen).to(dtype),
        "beta_logit": torch.randn(tokens, heads, generator=gen).to(dtype),
        "out_gate": torch.randn(tokens, channels, generator=gen).to(dtype),
        "params": params,
        "state": replace(state, drafts=_record(state)) if draft else state,
        "segment": segment,
    }


def block_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    """Whole-layer calls."""

    def sample(name: str, lengths: list[int], slots: list[int], adversarial: bool = False, **options: Any) -> Sample:
        return Sample(name, block_inputs(dtype, gen, lengths, slots, **options), adversarial)

    for bound in (-5.0, None):
        yield sample(f"prefill, bound {bound}", [65], [1], bound=bound)
        yield sample(f"ragged, bound {bound}", [1, 0, 2, 40], [3, 1, 4, 2], True, bound=bound)
        yield sample(f"decode, bound {bound}", [1, 1], [2, 1], phase="decode", bound=bound)
        yield sample(f"drafts, bound {bound}", [3, 8], [1, 2], phase="decode", bound=bound, draft=True)
    yield sample("a few tokens", [3, 2], [2, 1], bound=None)
    yield sample("prefill with padding", [4, 3], [0, 1], True)
    yield sample("decode with padding", [1, 1, 1], [0, 2, 1], True, phase="decode")
    # A head that is one tile for most kernels, and one that takes several, of K3's size.
    yield sample("decode, heads of 16", [1, 1], [2, 1], phase="decode", dim=16)
    yield sample("decode, a head of 128", [1], [1], phase="decode", heads=1, dim=128)
    yield sample("drafts with padding", [2, 4, 1], [0, 3, 1], True, phase="decode", draft=True)
    for width in (2, 3):
        yield sample(f"convolution of width {width}", [1, 1], [1, 2], phase="decode", width=width)
        yield sample(f"drafts, convolution of width {width}", [5], [1], phase="decode", width=width, draft=True)
    yield sample("snapshots", [66, 64], [1, 3], True, heads=1, snapshots=[(0, 64, 2), (1, 64, 4)])
