"""The next token of every row: Triton where no row has top-k or top-p, torch's sort for all rows where one has.

Every row is cut into the same spans of ids. One launch finds each span's largest logit, one sums the probability of
each span, one picks the span in which the cumulative distribution passes the row's uniform number, and the id in it.
Sums are float64 and in a fixed order: a row gives the same id in every batch. Nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.launch import ceil_div, launch, power_of_2, tuned
from k3port.ops.sample import SamplingTensors

SORTED_NUMBERS = 1 << 23
"""Rows times vocabulary that are sorted at once: about 400 MB of float64 scratch."""


@triton.jit
def row_peak_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, peak_ptr, id_ptr, stride, V: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    """Largest logit of each span, and its lowest id."""
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0) // SPANS
    begin = tl.program_id(0) % SPANS * SPAN
    logits_ptr += row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = begin + lane
    for start in tl.static_range(0, SPAN, BLOCK):
        ids = begin + start + lane
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
    peak = tl.max(best, axis=0)
    tl.store(peak_ptr + tl.program_id(0), peak)
    tl.store(id_ptr + tl.program_id(0), tl.min(tl.where(best == peak, best_id, V), axis=0))


@triton.jit
def _mass(logits_ptr, ids, V: tl.constexpr, peak, temperature, min_p):  # type: ignore[no-untyped-def]
    """float64 ``exp((logit - peak) / temperature)``, 1 at the peak; 0 where min-p drops the id."""
    x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf")).to(tl.float64)
    mass = tl.exp((x - peak) / temperature)
    return tl.where(mass >= min_p, mass, mass * 0.0)


@triton.jit
def _peaks(peak_ptr, row, SPANS: tl.constexpr, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    spans = tl.arange(0, BLOCK_S)
    return tl.load(peak_ptr + row * SPANS + spans, mask=spans < SPANS, other=float("-inf"))


@triton.jit
def row_mass_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    peak_ptr,
    mass_ptr,
    temperature_ptr,
    min_p_ptr,
    stride,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Unnormalised probability of each span; greedy rows have none."""
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0) // SPANS
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        begin = tl.program_id(0) % SPANS * SPAN
        min_p = tl.load(min_p_ptr + row)
        peak = tl.max(_peaks(peak_ptr, row, SPANS, BLOCK_S), axis=0).to(tl.float64)
        logits_ptr += row.to(tl.int64) * stride
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, tl.minimum(SPAN, V - begin), BLOCK):
            total += _mass(logits_ptr, begin + start + tl.arange(0, BLOCK), V, peak, temperature, min_p)
        tl.store(mass_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def row_draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    peak_ptr,
    id_ptr,
    mass_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    out_ptr,
    stride,
    V: tl.constexpr,
    DRAW: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The id of each row: of the peak where it is greedy, else the first whose cumulative mass exceeds the target."""
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0)
    spans = tl.arange(0, BLOCK_S)
    peaks = _peaks(peak_ptr, row, SPANS, BLOCK_S)
    peak = tl.max(peaks, axis=0)
    found = tl.load(id_ptr + row * SPANS + spans, mask=spans < SPANS, other=V)
    chosen = tl.min(tl.where(peaks == peak, found, V), axis=0)
    if DRAW:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            min_p = tl.load(min_p_ptr + row)
            mass = tl.load(mass_ptr + row * SPANS + spans, mask=spans < SPANS, other=0.0)
            upto = tl.cumsum(mass, axis=0)
            target = tl.load(uniform_ptr + row) * tl.max(upto, axis=0)
            # Rounding can push the target onto the total itself: the last span and id with any mass are then meant.
            last = tl.max(tl.where(mass > 0, spans, 0), axis=0)
            span = tl.min(tl.where((upto > target) & (mass > 0), spans, last), axis=0)
            before = tl.sum(tl.where(spans == span, upto - mass, 0.0), axis=0)
            logits_ptr += row.to(tl.int64) * stride
            chosen = V
            fallback = 0
            for start in range(0, tl.minimum(SPAN, V - span * SPAN), BLOCK):
                ids = span * SPAN + start + tl.arange(0, BLOCK)
                part = _mass(logits_ptr, ids, V, peak.to(tl.float64), temperature, min_p)
                passed = (before + tl.cumsum(part, axis=0) > target) & (part > 0)
                chosen = tl.minimum(chosen, tl.min(tl.where(passed, ids, V), axis=0))
                fallback = tl.maximum(fallback, tl.max(tl.where(part > 0, ids, 0), axis=0))
                before += tl.sum(part, axis=0)
            chosen = tl.where(chosen < V, chosen, fallback)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def sample(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    """See :func:`k3port.ops.sample.sample`."""
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    if params.any_filter:
        step = max(1, SORTED_NUMBERS // vocab)
        parts = [_filtered(logits[i : i + step], params, uniform, slice(i, i + step)) for i in range(0, rows, step)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    config = tuned("sample", V=vocab, B=rows)
    warps = {"num_warps": config["num_warps"]}
    sizes = {"V": vocab, "SPAN": config["SPAN"], "BLOCK": config["BLOCK"]}
    spans = ceil_div(vocab, config["SPAN"])
    wide = {**sizes, "BLOCK_S": max(16, power_of_2(spans)), **warps}
    peaks = torch.empty((rows, spans), dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, spans), dtype=torch.int32, device=logits.device)
    mass = torch.empty((rows, spans), dtype=torch.float64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(row_peak_kernel, (rows * spans, 1, 1), logits, peaks, ids, logits.stride(0), **sizes, **warps)
    temperature, min_p = params.temperature, params.min_p
    if not params.all_greedy:
        launch(row_mass_kernel, (rows * spans, 1, 1), logits, peaks, mass, temperature, min_p, logits.stride(0), **wide)
    launch(
        row_draw_kernel,
        (rows, 1, 1),
        logits,
        peaks,
        ids,
        mass,
        temperature,
        min_p,
        uniform,
        out,
        logits.stride(0),
        DRAW=not params.all_greedy,
        **wide,
    )
    return out


def _filtered(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor, part: slice) -> torch.Tensor:
    """Rows with any settings, through a stable sort in float64, as the reference does it row by row."""
    vocab = logits.shape[1]
    temperature, top_k, top_p, min_p = (
        values[part].unsqueeze(1) for values in (params.temperature, params.top_k, params.top_p, params.min_p)
    )
    greedy = temperature == 0
    shifted = logits.double() - logits.amax(dim=-1, keepdim=True)
    probs = torch.softmax(shifted / torch.where(greedy, 1.0, temperature), dim=-1)
    ranked, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device)
    ranked = torch.where(rank < torch.where(top_k > 0, top_k, vocab), ranked, 0.0)
    share = ranked / ranked.sum(dim=-1, keepdim=True)
    reached = share.cumsum(dim=-1) - share >= top_p
    ranked = torch.where(reached & (top_p < 1) & (rank > 0), 0.0, ranked)
    # Ids that were dropped have probability zero from here on.
    probs = torch.zeros_like(probs).scatter_(1, order, ranked)
    probs = torch.where(probs >= min_p * probs.amax(dim=-1, keepdim=True), probs, 0.0)
    cumulative = probs.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, uniform[part].unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    last = torch.where(probs > 0, rank, 0).amax(dim=-1)
    return torch.where(greedy.squeeze(1), logits.argmax(dim=-1), torch.minimum(index, last))
