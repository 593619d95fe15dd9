"""Which logits of a row can lie where top-k or top-p cuts it: counted against pivots, twice where many remain.

Every span of a row counts its logits from each pivot on, and sums their probabilities where top-k is off. One program
per row takes the first pivot at which enough are gathered: the cut lies between it and the one above. Sums are float64
in an order that only the vocabulary decides. What a kernel decided it stores, and later ones read it: compiled apart,
two kernels may round one formula in two ways.
"""

from __future__ import annotations

import triton
import triton.language as tl

BAND = tl.constexpr(8)
"""Numbers in a row's band, all float64."""
LEAST = tl.constexpr(0)
"""The cut is at this logit or above it."""
LIMIT = tl.constexpr(1)
"""Logits from here on are above the cut and no candidates; infinity where all from ``LEAST`` on are candidates."""
BASE = tl.constexpr(2)
"""Count, or without top-k the mass, of the logits from ``LIMIT`` on."""
TARGET = tl.constexpr(3)
"""What is to be gathered: top-k's count, or top-p's share of the mass."""
WIDE = tl.constexpr(4)
"""Whether so many lie between the two pivots that the row is counted again with pivots between them."""
FOUND = tl.constexpr(5)
"""Number of candidates."""

DEPTH = tl.constexpr(24.0)
"""How far below the peak top-p's lowest pivot is, in temperatures; e^-24 is 4e-11."""
REACH = tl.constexpr(14.0)
"""How far top-k's pivots reach, in distances between the median and the lowest tenth of the spans' peaks."""


@triton.jit
def mass_of(x, peak, temperature):  # type: ignore[no-untyped-def]
    """float64 ``exp((x - peak) / temperature)``: the probability times a constant, 1 at the peak."""
    return tl.exp((x.to(tl.float64) - peak) / temperature)


@triton.jit
def asked(temperature_ptr, top_k_ptr, top_p_ptr, row, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the row is cut at all, its temperature, k (0: off) and p (from 1 on: off)."""
    temperature = tl.load(temperature_ptr + row)
    k = tl.load(top_k_ptr + row)
    k = tl.where((k > 0) & (k < V), k, 0).to(tl.int32)
    p = tl.load(top_p_ptr + row)
    return (temperature > 0) & ((k > 0) | (p < 1)), temperature, k, p


@triton.jit
def sums(  # type: ignore[no-untyped-def]
    ptr, begin, end, least, limit, peak, temperature, MASS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Of the numbers ``begin`` to ``end`` below ``limit``: how many reach each of ``least [PIVOTS]``, and their mass.

    Without ``MASS`` the masses are zero. A mass does not grow from one pivot to a higher one, last bits included: the
    sums run in the same order, and rounding is monotonic.
    """
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros((PIVOTS, BLOCK), tl.int32)
    masses = tl.zeros((PIVOTS, BLOCK if MASS else 1), tl.float64)
    for start in range(begin, end, BLOCK):
        ids = start + lane
        x = tl.load(ptr + ids, mask=ids < end, other=float("-inf"))
        x = tl.where(x < limit, x, float("-inf"))
        # A pivot may be minus infinity, which is what stands for numbers that are not there.
        reaches = (x[None, :] >= least[:, None]) & (ids < end)[None, :]
        counts += reaches.to(tl.int32)
        if MASS:
            masses += tl.where(reaches, mass_of(x, peak, temperature)[None, :], 0.0)
    return tl.sum(counts, axis=1), tl.sum(masses, axis=1)


@triton.jit
def _nth(values, number, n):  # type: ignore[no-untyped-def]
    """The n-th largest of some values, as float64; ``number`` says how many there are from each of them on."""
    return tl.max(tl.where(number >= n, values, float("-inf")), axis=0).to(tl.float64)


@triton.jit
def _pivots(  # type: ignore[no-untyped-def]
    peaks, low, temperature, k, PIVOTS: tl.constexpr
):
    """From the peak, where most of a confident row's mass lies, down to the lowest logit.

    Top-p's follow the temperature. Top-k does not care for it: its pivots start near the median of the spans' peaks,
    which no outstanding logit moves, nor do spans where all ids are suppressed, as they have the lowest logit.
    """
    place = tl.arange(0, PIVOTS)
    deep = tl.minimum(place, PIVOTS - 2).to(tl.float32) / (PIVOTS - 2)
    deep = (deep * tl.sqrt(deep)).to(tl.float64)
    highest = tl.max(peaks, axis=0)
    peak = highest.to(tl.float64)
    if k > 0:
        number = tl.sum((peaks[None, :] >= peaks[:, None]).to(tl.int32), axis=1)
        live = tl.sum((peaks > low).to(tl.int32), axis=0)
        middle = _nth(peaks, number, live // 2 + 1)
        lower = _nth(peaks, number, live * 9 // 10 + 1)
        step = tl.maximum(middle - lower, (peak - middle) / 8)
        least = middle - step * (REACH * deep - 1.0)
    else:
        least = peak - temperature * (DEPTH * deep)
    # In range of float32 before it is rounded to that: a large temperature takes a pivot anywhere.
    least = tl.minimum(tl.maximum(least, low.to(tl.float64)), peak).to(tl.float32)
    return tl.where(place == 0, highest, tl.where(place == PIVOTS - 1, low, least))


@triton.jit
def row_tally_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    peak_ptr,
    low_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    band_ptr,
    least_ptr,
    count_ptr,
    mass_ptr,
    stride,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PIVOTS: tl.constexpr,
    TALLY: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """Counts and masses of one span from each pivot on; ``AGAIN`` with the pivots of rows whose band is wide.

    ``least [B, 2, PIVOTS]``, ``count`` and ``mass [B, 2, SPANS, PIVOTS]``: first and second time.
    """
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0) // SPANS
    span = tl.program_id(0) % SPANS
    place = tl.arange(0, PIVOTS)
    on, temperature, k, _p = asked(temperature_ptr, top_k_ptr, top_p_ptr, row, V)
    if AGAIN:
        on = on & (tl.load(band_ptr + row * BAND + WIDE) > 0)
    if on:
        spans = tl.arange(0, BLOCK_S)
        peaks = tl.load(peak_ptr + row * SPANS + spans, mask=spans < SPANS, other=float("-inf"))
        pivots = row * 2 * PIVOTS + place
        if AGAIN:
            least = tl.load(least_ptr + PIVOTS + pivots)
            limit = tl.load(band_ptr + row * BAND + LIMIT).to(tl.float32)
        else:
            low = tl.min(tl.load(low_ptr + row * SPANS + spans, mask=spans < SPANS, other=float("inf")), axis=0)
            least = _pivots(peaks, low, temperature, k, PIVOTS)
            limit = tl.full((), float("inf"), tl.float32)
            if span == 0:
                tl.store(least_ptr + pivots, least)
        peak = tl.max(peaks, axis=0).to(tl.float64)
        begin = span * SPAN
        end = tl.minimum(begin + SPAN, V)
        logits_ptr += row.to(tl.int64) * stride
        out = ((row * 2 + (1 if AGAIN else 0)) * SPANS + span) * PIVOTS + place
        if k > 0:
            counts, _masses = sums(logits_ptr, begin, end, least, limit, peak, temperature, False, PIVOTS, TALLY)
            tl.store(count_ptr + out, counts)
        else:
            counts, masses = sums(logits_ptr, begin, end, least, limit, peak, temperature, True, PIVOTS, TALLY)
            tl.store(count_ptr + out, counts)
            tl.store(mass_ptr + out, masses)


@triton.jit
def row_band_kernel(  # type: ignore[no-untyped-def]
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    count_ptr,
    mass_ptr,
    least_ptr,
    first_ptr,
    band_ptr,
    offset_ptr,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PIVOTS: tl.constexpr,
    MANY: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """The band of a row from the sums of its spans.

    The first time pivots between its limits follow where it is wide. The second time the rows that were counted again
    are narrowed, and ``offset [B, SPANS + 1]`` says where each span's candidates begin.
    """
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0)
    on, _temperature, k, p = asked(temperature_ptr, top_k_ptr, top_p_ptr, row, V)
    if on:
        place = tl.arange(0, PIVOTS)
        spans = tl.arange(0, BLOCK_S)
        tally = row * 2
        limit = tl.full((), float("inf"), tl.float64)
        base = tl.full((), 0.0, tl.float64)
        target = k.to(tl.float64)
        if AGAIN:
            wide = tl.load(first_ptr + row * BAND + WIDE) > 0
            tally += tl.where(wide, 1, 0)
            limit = tl.where(wide, tl.load(first_ptr + row * BAND + LIMIT), limit)
            base = tl.where(wide, tl.load(first_ptr + row * BAND + BASE), base)
            target = tl.load(first_ptr + row * BAND + TARGET)
        table = tally * SPANS * PIVOTS + spans[:, None] * PIVOTS + place[None, :]
        live = (spans < SPANS)[:, None] & (place < PIVOTS)[None, :]
        weighed = (spans < SPANS)[:, None] & (place < tl.where(k > 0, 0, PIVOTS))[None, :]
        by_span = tl.load(count_ptr + table, mask=live, other=0)
        counts = tl.sum(by_span, axis=0)
        masses = tl.sum(tl.load(mass_ptr + table, mask=weighed, other=0.0), axis=0)
        gathered = tl.where(k > 0, counts.to(tl.float64), masses)
        if not AGAIN:
            total = tl.sum(tl.where(place == PIVOTS - 1, masses, 0.0), axis=0)
            target = tl.where(k > 0, target, p * total)
        # The last pivot is the lowest logit: where rounding keeps the sum below the target, all are meant.
        first = tl.min(tl.where(base + gathered >= target, place, PIVOTS - 1), axis=0)
        pivots = tl.load(least_ptr + tally * PIVOTS + place).to(tl.float64)
        least = tl.sum(tl.where(place == first, pivots, 0.0), axis=0)
        above = tl.sum(tl.where(place == tl.maximum(first - 1, 0), pivots, 0.0), axis=0)
        number = tl.sum(tl.where(place == first, counts, tl.where(place == first - 1, -counts, 0)), axis=0)
        # Top-p inside top-k needs the mass of all that top-k keeps.
        all_above = (k > 0) & (p < 1)
        limit = tl.where(all_above | (first == 0), limit, above)
        base += tl.where(all_above, 0.0, tl.sum(tl.where(place == first - 1, gathered, 0.0), axis=0))
        band_ptr += row * BAND
        tl.store(band_ptr + LEAST, least)
        tl.store(band_ptr + LIMIT, limit)
        tl.store(band_ptr + BASE, base)
        tl.store(band_ptr + TARGET, target)
        if AGAIN:
            mine = tl.where(place == first, by_span, 0)
            mine -= tl.where((place == tl.where(all_above, -1, first - 1))[None, :], by_span, 0)
            mine = tl.sum(mine, axis=1)
            ends = tl.cumsum(mine, axis=0)
            tl.store(offset_ptr + row * (SPANS + 1) + spans, ends - mine, mask=spans <= SPANS)
            tl.store(band_ptr + FOUND, tl.sum(mine, axis=0).to(tl.float64))
        else:
            # From the peak on all are equal: no pivot parts them.
            wide = tl.where((number > MANY) & (first > 0), 1, 0)
            tl.store(band_ptr + WIDE, wide.to(tl.float64))
            finer = above - (above - least) * ((place + 1).to(tl.float64) / PIVOTS)
            finer = tl.where(place == PIVOTS - 1, least, tl.minimum(tl.maximum(finer, least), above))
            tl.store(least_ptr + (tally + 1) * PIVOTS + place, finer.to(tl.float32), mask=place < wide * PIVOTS)


@triton.jit
def row_gather_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    band_ptr,
    offset_ptr,
    out_ptr,
    stride,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A span's candidates, in the order of their ids, to their place in ``out [B, V]``."""
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0) // SPANS
    span = tl.program_id(0) % SPANS
    on, _temperature, _k, _p = asked(temperature_ptr, top_k_ptr, top_p_ptr, row, V)
    if on:
        offset = tl.load(offset_ptr + row * (SPANS + 1) + span)
        if offset < tl.load(offset_ptr + row * (SPANS + 1) + span + 1):
            least = tl.load(band_ptr + row * BAND + LEAST).to(tl.float32)
            limit = tl.load(band_ptr + row * BAND + LIMIT).to(tl.float32)
            logits_ptr += row.to(tl.int64) * stride
            out_ptr += row.to(tl.int64) * V
            for start in range(span * SPAN, tl.minimum(span * SPAN + SPAN, V), BLOCK):
                ids = start + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + ids, mask=ids < V, other=float("-inf"))
                mine = (x >= least) & (x < limit) & (ids < V)
                upto = tl.cumsum(mine.to(tl.int32), axis=0)
                tl.store(out_ptr + offset + upto - 1, x, mask=mine)
                offset += tl.sum(mine.to(tl.int32), axis=0)
