"""The next token of every row, without a sort.

Every row is divided into the same spans of ids. One launch finds each span's largest logit, one sums the probability of
each span, one picks the span in which the cumulative distribution passes the row's uniform number, and the id in it.
Where a row has top-k or top-p, six launches between them find the logit at which the row is cut. Sums are float64 and
in an order that only the vocabulary decides: a row gives the same id in every batch. Nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.sample_band import mass_of
from k3port.backends.portable.kernels.sample_cut import find_cuts
from k3port.backends.portable.launch import in_rows, launch, tuned
from k3port.backends.portable.sample_scratch import rows_at_once, span_block, span_count
from k3port.backends.portable.tuning import Config
from k3port.ops.sample import SamplingTensors

CANDIDATES = {
    "sample": {
        "SPAN": (2048, 4096),
        "PIVOTS": (8, 16),
        "TALLY": (128, 256, 512),
        "num_warps": (4, 8),
    }
}


@triton.jit
def row_peak_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    peak_ptr,
    low_ptr,
    id_ptr,
    stride,
    V: tl.constexpr,
    FILTER: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest logit of each span, and its lowest id; with ``FILTER`` the lowest logit too."""
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0) // SPANS
    begin = tl.program_id(0) % SPANS * SPAN
    logits_ptr += row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_id = begin + lane
    least = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in tl.static_range(0, SPAN, BLOCK):
        ids = begin + start + lane
        x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, ids, best_id)
        if FILTER:
            least = tl.minimum(least, tl.where(ids < V, x, float("inf")))
    peak = tl.max(best, axis=0)
    tl.store(peak_ptr + tl.program_id(0), peak)
    tl.store(id_ptr + tl.program_id(0), tl.min(tl.where(best == peak, best_id, V), axis=0))
    if FILTER:
        tl.store(low_ptr + tl.program_id(0), tl.min(least, axis=0))


@triton.jit
def _mass(x, peak, temperature, min_p):  # type: ignore[no-untyped-def]
    """The mass of a logit, 0 where min-p drops it."""
    mass = mass_of(x, peak, temperature)
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
    cut_ptr,
    tied_ptr,
    temperature_ptr,
    min_p_ptr,
    stride,
    V: tl.constexpr,
    FILTER: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Unnormalised probability of each span; greedy rows have none.

    With ``FILTER`` that of the ids above the row's cut, and the number of ids at the cut.
    """
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0) // SPANS
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        begin = tl.program_id(0) % SPANS * SPAN
        min_p = tl.load(min_p_ptr + row)
        peak = tl.max(_peaks(peak_ptr, row, SPANS, BLOCK_S), axis=0).to(tl.float64)
        logits_ptr += row.to(tl.int64) * stride
        total = tl.zeros((BLOCK,), tl.float64)
        if FILTER:
            cut = tl.load(cut_ptr + row)
            tied = tl.zeros((BLOCK,), tl.int32)
            if tl.load(peak_ptr + tl.program_id(0)) >= cut:
                for start in range(0, tl.minimum(SPAN, V - begin), BLOCK):
                    ids = begin + start + tl.arange(0, BLOCK)
                    x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
                    # Most blocks have nothing above a cut by top-k, and exponentials take longest here.
                    if tl.max(x, axis=0) > cut:
                        total += tl.where(x > cut, _mass(x, peak, temperature, min_p), 0.0)
                    tied += (x == cut).to(tl.int32)
            tl.store(tied_ptr + tl.program_id(0), tl.sum(tied, axis=0))
        else:
            for start in range(0, tl.minimum(SPAN, V - begin), BLOCK):
                ids = begin + start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
                total += _mass(x, peak, temperature, min_p)
        tl.store(mass_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def row_draw_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    peak_ptr,
    id_ptr,
    mass_ptr,
    cut_ptr,
    ties_ptr,
    tied_ptr,
    temperature_ptr,
    min_p_ptr,
    uniform_ptr,
    out_ptr,
    stride,
    V: tl.constexpr,
    DRAW: tl.constexpr,
    FILTER: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The id of each row: of the peak where it is greedy, else the first whose cumulative mass exceeds the target.

    With ``FILTER`` the ids above the row's cut are kept, and of those at the cut the first ``ties``.
    """
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
            top = peak.to(tl.float64)
            min_p = tl.load(min_p_ptr + row)
            mass = tl.load(mass_ptr + row * SPANS + spans, mask=spans < SPANS, other=0.0)
            cut = float("-inf")
            left = 0
            if FILTER:
                cut = tl.load(cut_ptr + row)
                tied = tl.load(tied_ptr + row * SPANS + spans, mask=spans < SPANS, other=0)
                before_span = tl.cumsum(tied, axis=0) - tied
                tied = tl.minimum(tl.maximum(tl.load(ties_ptr + row) - before_span, 0), tied)
                mass += tied.to(tl.float64) * _mass(cut, top, temperature, min_p)
            else:
                tied = spans * 0
            upto = tl.cumsum(mass, axis=0)
            target = tl.load(uniform_ptr + row) * tl.max(upto, axis=0)
            # Rounding can push the target onto the total itself: the last span and id with any mass are then meant.
            last = tl.max(tl.where(mass > 0, spans, 0), axis=0)
            span = tl.min(tl.where((upto > target) & (mass > 0), spans, last), axis=0)
            before = tl.sum(tl.where(spans == span, upto - mass, 0.0), axis=0)
            if FILTER:
                left = tl.sum(tl.where(spans == span, tied, 0), axis=0)
            logits_ptr += row.to(tl.int64) * stride
            chosen = V
            fallback = 0
            for start in range(0, tl.minimum(SPAN, V - span * SPAN), BLOCK):
                ids = span * SPAN + start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
                part = _mass(x, top, temperature, min_p)
                if FILTER:
                    level = (x == cut).to(tl.int32)
                    part = tl.where((x > cut) | ((level > 0) & (tl.cumsum(level, axis=0) <= left)), part, 0.0)
                    left -= tl.sum(level, axis=0)
                passed = (before + tl.cumsum(part, axis=0) > target) & (part > 0)
                chosen = tl.minimum(chosen, tl.min(tl.where(passed, ids, V), axis=0))
                fallback = tl.maximum(fallback, tl.max(tl.where(part > 0, ids, 0), axis=0))
                before += tl.sum(part, axis=0)
            chosen = tl.where(chosen < V, chosen, fallback)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def sample(logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor) -> torch.Tensor:
    """See :func:`k3port.ops.sample.sample`."""
    rows, vocab = logits.shape
    logits, _stride = in_rows(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return out
    uniform = uniform.contiguous()
    values = (x.contiguous() for x in (params.temperature, params.top_k, params.top_p, params.min_p))
    params = SamplingTensors(*values, params.all_greedy, params.any_filter)
    # Of the vocabulary alone: the sizes fix the order of the sums, and so the id of a row whatever is beside it.
    config = tuned("sample", V=vocab)
    step = rows_at_once(vocab) if params.any_filter else rows
    if rows <= step:
        _draw(logits, params, uniform, out, config)
        return out
    for i in range(0, rows, step):
        part = slice(i, i + step)
        _draw(logits[part], _part(params, part), uniform[part], out[part], config)
    return out


def _part(params: SamplingTensors, part: slice) -> SamplingTensors:
    values = (params.temperature, params.top_k, params.top_p, params.min_p)
    return SamplingTensors(*(x[part] for x in values), params.all_greedy, params.any_filter)


def _draw(
    logits: torch.Tensor, params: SamplingTensors, uniform: torch.Tensor, out: torch.Tensor, config: Config
) -> None:
    rows, vocab = logits.shape
    filtered = params.any_filter and not params.all_greedy
    spans, stride, device = span_count(config, vocab), logits.stride(0), logits.device
    sizes = {"V": vocab, "FILTER": filtered, "SPAN": config["SPAN"], "BLOCK": config["BLOCK"]}
    block = {"BLOCK_S": span_block(config, vocab)}
    warps = {"num_warps": config["num_warps"]}
    peaks = torch.empty((rows, spans), dtype=torch.float32, device=device)
    ids = torch.empty((rows, spans), dtype=torch.int32, device=device)
    mass = torch.empty((rows, spans), dtype=torch.float64, device=device)
    lows = torch.empty_like(peaks) if filtered else None
    tied = torch.empty_like(ids) if filtered else None
    cut = ties = None
    temperature, min_p = params.temperature, params.min_p
    launch(row_peak_kernel, (rows * spans, 1, 1), logits, peaks, lows, ids, stride, **sizes, **warps)
    if lows is not None:
        cut, ties = find_cuts(logits, peaks, lows, params, config)
    if not params.all_greedy:
        launch(
            row_mass_kernel, (rows * spans, 1, 1), logits, peaks, mass, cut, tied, temperature, min_p, stride,
            **sizes, **block, **warps,
        )  # fmt: skip
    launch(
        row_draw_kernel, (rows, 1, 1), logits, peaks, ids, mass, cut, ties, tied, temperature, min_p, uniform, out,
        stride, DRAW=not params.all_greedy, **sizes, **block, **warps,
    )  # fmt: skip
