"""Where top-k and top-p cut a row: the lowest logit that is kept, and how many of its equals are.

A program per row narrows the cut down over the row's candidates: some pivots at a time, evenly spaced over the float32
numbers that are left, until no other number lies between. A row whose candidates all equal the peak takes no step; one
with the widest band takes nine with 16 pivots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.sample_band import (
    BAND,
    BASE,
    FOUND,
    LEAST,
    LIMIT,
    TARGET,
    asked,
    mass_of,
    row_band_kernel,
    row_gather_kernel,
    row_tally_kernel,
    sums,
)
from k3port.backends.portable.launch import launch
from k3port.backends.portable.sample_scratch import span_block, span_count
from k3port.backends.portable.tuning import Config
from k3port.ops.sample import SamplingTensors


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    """int64 that orders float32 numbers: one step is the next number, and both zeros have the key of 0.0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _number(key):  # type: ignore[no-untyped-def]
    """The float32 of a key."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    ptr, n, low, high, base, target, peak, temperature, MASS: tl.constexpr, PIVOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Least key above which less than ``target`` is gathered, and what is gathered there.

    Args:
        low, high: what is above ``low`` reaches the target, what is above ``high`` does not.
        base: count or mass of what is above all candidates.
    """
    above = base
    while high - low > 1:
        # From low + 1, so that every round ends with a smaller range.
        key = low + 1 + (high - low - 1) * tl.arange(0, PIVOTS).to(tl.int64) // PIVOTS
        counts, masses = sums(
            ptr, 0, n, _number(key + 1), float("inf"), peak, temperature, MASS, PIVOTS, BLOCK
        )  # fmt: skip
        gathered = base + (masses if MASS else counts.to(tl.float64))
        enough = gathered >= target
        above = tl.maximum(above, tl.max(tl.where(enough, base, gathered), axis=0))
        lower = tl.max(tl.where(enough, key, low), axis=0)
        high = tl.min(tl.where(enough, high, key), axis=0)
        low = lower
    return high, above


@triton.jit
def _ties(above, target, mass, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many ids of one mass it takes from ``above`` to the target, at least one; all where they have no mass."""
    wanted = tl.ceil((target - above) / tl.where(mass > 0, mass, 1.0))
    return tl.where(mass > 0, tl.minimum(tl.maximum(wanted, 1.0), V), V).to(tl.int32)


@triton.jit
def row_cut_kernel(  # type: ignore[no-untyped-def]
    candidate_ptr,
    peak_ptr,
    band_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    cut_ptr,
    ties_ptr,
    V: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``cut [B]`` and ``ties [B]``: kept are the logits above the cut, and the first ``ties`` of those at it.

    A row without top-k and top-p keeps all: its cut is minus infinity.
    """
    SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0)
    cut = tl.full((), float("-inf"), tl.float32)
    ties = tl.full((), 0, tl.int32)
    on, temperature, k, p = asked(temperature_ptr, top_k_ptr, top_p_ptr, row, V)
    if on:
        spans = tl.arange(0, BLOCK_S)
        peaks = tl.load(peak_ptr + row * SPANS + spans, mask=spans < SPANS, other=float("-inf"))
        peak_key = _key(tl.max(peaks, axis=0))
        peak = tl.max(peaks, axis=0).to(tl.float64)
        band_ptr += row * BAND
        low = _key(tl.load(band_ptr + LEAST).to(tl.float32)) - 1
        limit = tl.load(band_ptr + LIMIT).to(tl.float32)
        high = tl.minimum(_key(limit) - 1, peak_key)
        base = tl.load(band_ptr + BASE)
        target = tl.load(band_ptr + TARGET)
        n = tl.load(band_ptr + FOUND).to(tl.int32)
        candidate_ptr += row.to(tl.int64) * V
        if k > 0:
            at, above = _search(candidate_ptr, n, low, high, base, target, peak, temperature, False, PIVOTS, BLOCK)
            ties = (target - above).to(tl.int32)
            if p < 1:
                # Once more among what top-k has left: the mass of that is the whole.
                mass = mass_of(_number(at), peak, temperature)
                next_one = tl.full((PIVOTS,), 0, tl.int64) + at + 1
                _counts, masses = sums(
                    candidate_ptr, 0, n, _number(next_one), float("inf"), peak, temperature, True, PIVOTS, BLOCK
                )  # fmt: skip
                whole = tl.max(masses, axis=0) + ties.to(tl.float64) * mass
                target = p * whole
                lowest = at
                at, above = _search(
                    candidate_ptr, n, at - 1, peak_key, base, target, peak, temperature, True, PIVOTS, BLOCK
                )  # fmt: skip
                fewer = _ties(above, target, mass_of(_number(at), peak, temperature), V)
                ties = tl.where(at == lowest, tl.minimum(ties, fewer), fewer)
        else:
            at, above = _search(candidate_ptr, n, low, high, base, target, peak, temperature, True, PIVOTS, BLOCK)
            ties = _ties(above, target, mass_of(_number(at), peak, temperature), V)
        cut = _number(at)
    tl.store(cut_ptr + row, cut)
    tl.store(ties_ptr + row, ties)


def find_cuts(
    logits: torch.Tensor, peaks: torch.Tensor, lows: torch.Tensor, params: SamplingTensors, config: Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where top-k and then top-p cut each row, in six launches.

    Args:
        logits: float32 ``[B, V]``, each row dense.
        peaks, lows: float32 ``[B, spans]``, the largest and the smallest logit of each span.

    Returns:
        float32 ``[B]``, the cut: ids with larger logits are kept, and of those with this one the first ``ties``; int32
        ``[B]``, the ties.
    """
    rows, vocab = logits.shape
    spans, pivots = span_count(config, vocab), config["PIVOTS"]
    device, stride = logits.device, logits.stride(0)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    first, band = empty(2, rows, int(BAND), dtype=torch.float64).unbind()
    least = empty(rows, 2, pivots)
    counts, masses = (empty(rows, 2, spans, pivots, dtype=dtype) for dtype in (torch.int32, torch.float64))
    offsets = empty(rows, spans + 1, dtype=torch.int32)
    candidates = empty(rows, vocab)
    cut, ties = empty(rows), empty(rows, dtype=torch.int32)
    asks = params.temperature, params.top_k, params.top_p
    sizes = {"V": vocab, "SPAN": config["SPAN"]}
    wide = {**sizes, "BLOCK_S": span_block(config, vocab), "PIVOTS": pivots}
    warps = {"num_warps": config["num_warps"]}
    for again, out in ((False, first), (True, band)):
        launch(
            row_tally_kernel, (rows * spans, 1, 1), logits, peaks, lows, *asks, first, least, counts, masses, stride,
            **wide, TALLY=config["TALLY"], AGAIN=again, **warps,
        )  # fmt: skip
        launch(
            row_band_kernel, (rows, 1, 1), *asks, counts, masses, least, first, out, offsets,
            **wide, MANY=config["MANY"], AGAIN=again, num_warps=4,
        )  # fmt: skip
    launch(
        row_gather_kernel, (rows * spans, 1, 1), logits, *asks, band, offsets, candidates, stride,
        **sizes, BLOCK=config["BLOCK"], **warps,
    )  # fmt: skip
    launch(
        row_cut_kernel, (rows, 1, 1), candidates, peaks, band, *asks, cut, ties,
        **wide, BLOCK=config["CUT"], num_warps=config["cut_warps"],
    )  # fmt: skip
    return cut, ties
