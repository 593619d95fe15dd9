"""Invariants of the KDA contracts: what a call leaves behind must not depend on how a sequence is cut into calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import cloned, relative_rms
from k3port.ops.kda_commit import kda_commit
from k3port.ops.kda_samples import BLOCK_INPUTS, CORE_INPUTS, block_inputs, core_inputs
from k3port.ops.kda_state import KdaState
from k3port.ops.segment import Segment, make_segment


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 2e-5)


def _rows(args: dict[str, Any], names: Sequence[str], rows: Any) -> dict[str, torch.Tensor]:
    return {name: args[name][rows].clone() for name in names}


def _part(args: dict[str, Any], rows: Any, state: torch.Tensor, segment: Segment) -> dict[str, Any]:
    """A call of ``kda_core`` with some token rows of another."""
    return {**args, **_rows(args, CORE_INPUTS, rows), "state": state, "segment": segment, "drafts": None}


def check_core_gate(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Both gate forms at points that can be checked by hand, in both phases: without keys the state only decays."""
    a_log = torch.tensor([0.0, 0.5, 0.5, 2.0])
    z = torch.tensor([0.0, 1.0, -1.0, 5.0]).repeat_interleave(16)
    bounded = (-2.5, -4.19359076, -0.806409242, -5.0)
    softplus = (-math.log(2), -2.16520248, -0.516481208, -36.9949)
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for phase, (bound, expected) in itertools.product(phases, ((-5.0, bounded), (None, softplus))):
        args = core_inputs(dtype, gen, [1], [1], phase=phase, heads=4, dim=16, bound=bound)
        args |= {name: torch.zeros_like(args[name]) for name in ("q", "k", "v")}
        args |= {"A_log": a_log, "gate_raw": torch.full((1, 64), 0.5, dtype=dtype), "dt_bias": z - 0.5}
        before = args["state"][1].double()
        function(**args)
        fell = torch.log(args["state"][1].double() / before)
        wanted = torch.tensor(expected).double().reshape(4, 1, 1).expand_as(fell)
        assert torch.allclose(fell, wanted, rtol=2e-6, atol=2e-6), f"{phase}, bound {bound}"
        # A long key and a state of zeros: what is written is beta v at the key.
        args["state"].zero_()
        args["k"][..., 0], args["v"][:] = 1024.0, 2.0
        args["beta_logit"] = torch.tensor([[0.0, 1.0, -1.0, 40.0]], dtype=dtype)
        function(**args)
        wanted = torch.zeros(4, 16, 16)
        wanted[..., 0] = 2 * torch.tensor([0.5, 0.731058579, 0.268941421, 1.0]).unsqueeze(-1)
        assert relative_rms(args["state"][1], wanted) < _tolerance(dtype), f"write strength, {phase}, bound {bound}"


def check_core_split(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """A sequence in two calls equals one call, output and state."""
    args = core_inputs(dtype, gen, [70], [1], gate=-0.1)
    whole_state = args["state"].clone()
    whole = function(**{**args, "state": whole_state})
    for cut in (1, 16, 33, 69):
        state = args["state"].clone()
        parts = []
        for rows, length in ((slice(0, cut), cut), (slice(cut, 70), 70 - cut)):
            parts.append(function(**_part(args, rows, state, make_segment("prefill", [length], [1]))))
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
        alone = function(**_part(args, slice(begin, end), state, make_segment("prefill", [length], [slot])))
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


def _next_rows(lengths: Sequence[int], token: int) -> tuple[list[int], list[int]]:
    """Requests that have a ``token``-th new token, and where its row lies."""
    live = [i for i, length in enumerate(lengths) if token < length]
    return live, [sum(lengths[:i]) + token for i in live]


def _counts(count: int, requests: int) -> torch.Tensor:
    return torch.full((requests,), count, dtype=torch.int32)


def check_core_drafts(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Verified tokens give what as many decode steps give; committing m of them gives the state after m steps."""
    lengths, slots = [3, 8, 1], [2, 3, 1]
    args = core_inputs(dtype, gen, lengths, slots, phase="decode", dim=32, draft=True)
    before = args["state"].clone()
    out = function(**args)
    assert torch.equal(args["state"], before), "drafts may be rejected: the state must stay"
    stepped = before.clone()
    for token in range(max(lengths) + 1):
        committed = KdaState(args["drafts"].x[:, :3].clone(), before.clone(), drafts=args["drafts"])
        kda_commit(committed, _counts(token, len(slots)), args["segment"])
        error = relative_rms(committed.recurrent, stepped)
        assert error < _tolerance(dtype), f"{token} tokens committed are not {token} steps: {error:.1e}"
        live, rows = _next_rows(lengths, token)
        if live:
            segment = make_segment("decode", [1] * len(live), [slots[i] for i in live])
            step = function(**_part(args, rows, stepped, segment))
            assert relative_rms(out[rows], step) < _tolerance(dtype), f"output of token {token}"


def check_core_snapshots(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """What follows a snapshot, started from its slot, is what follows in the whole run."""
    args = core_inputs(
        dtype, gen, [130], [1], heads=1, dim=32, gate=-0.05, snapshots=[(0, 64, 3), (0, 128, 2)]
    )  # fmt: skip
    whole = function(**args)
    for tokens, slot in ((64, 3), (128, 2)):
        segment = make_segment("prefill", [130 - tokens], [slot])
        out = function(**_part(args, slice(tokens, None), args["state"], segment))
        assert relative_rms(out, whole[tokens:]) < _tolerance(dtype), f"output after {tokens} tokens"
        assert relative_rms(args["state"][slot], args["state"][1]) < _tolerance(dtype), f"state after {tokens} tokens"


def _same_state(mine: KdaState, other: KdaState, slots: Sequence[int], dtype: torch.dtype, what: str) -> None:
    for slot in slots:
        assert torch.equal(mine.conv[slot], other.conv[slot]), f"tail of slot {slot} {what}"
        error = relative_rms(mine.recurrent[slot], other.recurrent[slot])
        assert error < 2 * _tolerance(dtype), f"state of slot {slot} {what}: {error:.1e}"


def check_block_drafts(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Verified tokens give what as many decode steps give; committing m of them gives the state after m steps."""
    lengths, slots = [2, 8], [3, 1]
    args = block_inputs(dtype, gen, lengths, slots, phase="decode", heads=1, dim=32, draft=True)
    before = cloned(args["state"])
    out = function(**args)
    after = args["state"]
    assert torch.equal(after.recurrent, before.recurrent), "drafts may be rejected: the state must stay"
    assert torch.equal(after.conv, before.conv), "drafts may be rejected: the tail must stay"
    stepped = cloned(before)
    for token in range(max(lengths) + 1):
        committed = replace(cloned(before), drafts=after.drafts)
        kda_commit(committed, _counts(token, len(slots)), args["segment"])
        _same_state(committed, stepped, slots, dtype, f"after {token} tokens")
        live, rows = _next_rows(lengths, token)
        if live:
            segment = make_segment("decode", [1] * len(live), [slots[i] for i in live])
            step = function(**_rows(args, BLOCK_INPUTS, rows), params=args["params"], state=stepped, segment=segment)
            assert relative_rms(out[rows], step) < 2 * _tolerance(dtype), f"output of token {token}"


def check_block_rejections(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Steps whose drafts are all rejected give what plain decode gives; one of which nothing stays leaves nothing."""
    width, steps, slots = 4, 6, [2, 1]
    args = block_inputs(dtype, gen, [width] * 2, slots, phase="decode", heads=1, dim=32, draft=True)
    drafted, plain = args["state"], cloned(args["state"])
    segment, single = args["segment"], make_segment("decode", [1, 1], slots)
    for step in range(steps):
        fresh = block_inputs(dtype, gen, [width] * 2, slots, phase="decode", heads=1, dim=32, draft=True)
        rows = {name: fresh[name] for name in BLOCK_INPUTS}
        out = function(**rows, params=args["params"], state=drafted, segment=segment)
        # A step that is cancelled keeps not even its first token, and comes again.
        kda_commit(drafted, _counts(0, 2), segment)
        again = function(**rows, params=args["params"], state=drafted, segment=segment)
        assert torch.equal(again, out), "a step of which nothing was kept left a trace"
        kda_commit(drafted, _counts(1, 2), segment)
        first = {name: fresh[name][[0, width]].clone() for name in BLOCK_INPUTS}
        expected = function(**first, params=args["params"], state=plain, segment=single)
        assert relative_rms(out[[0, width]], expected) < 2 * _tolerance(dtype), f"output of step {step}"
        _same_state(drafted, plain, slots, dtype, f"after step {step}")


def check_block_snapshots(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """What follows a snapshot, started from its slot, is what follows in the whole run: state and tail fit together."""
    args = block_inputs(dtype, gen, [130], [1], heads=1, dim=32, snapshots=[(0, 64, 3), (0, 128, 2)])
    whole, state = function(**args), args["state"]
    for tokens, slot in ((64, 3), (128, 2)):
        rest = _rows(args, BLOCK_INPUTS, slice(tokens, None))
        segment = make_segment("prefill", [130 - tokens], [slot])
        out = function(**rest, params=args["params"], state=state, segment=segment)
        assert relative_rms(out, whole[tokens:]) < 2 * _tolerance(dtype), f"output after {tokens} tokens"
        assert torch.equal(state.conv[slot], state.conv[1]), f"tail after {tokens} tokens"
        error = relative_rms(state.recurrent[slot], state.recurrent[1])
        assert error < 2 * _tolerance(dtype), f"state after {tokens} tokens: {error:.1e}"
