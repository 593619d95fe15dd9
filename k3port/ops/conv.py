"""The short causal depthwise convolution in front of KDA, with SiLU and a cached tail per request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Contract, Cost, Invariant, Sample, accumulation_dtype, cloned, relative_rms
from k3port.ops.segment import MAX_DRAFT, NULL_SLOT, Segment, make_segment


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tail: torch.Tensor,
    segment: Segment,
    record: torch.Tensor | None = None,
) -> torch.Tensor:
    """``y_t = sum_j weight[j] x_(t-W+1+j)``, then SiLU; ``weight[:, W-1]`` multiplies the current token.

    The tail holds *raw* inputs, before the convolution. Taps and sums are float32, the result is rounded once.

    Args:
        x: ``[T, P]`` raw projections of the segment's requests, one after the other.
        weight: ``[P, W]`` float32 taps.
        tail: ``[S, W-1, P]`` last raw inputs per state slot, oldest first; updated in place, except for drafts.
            Snapshots of the segment get the tail at their position.
        record: ``[S, N, P]`` where the raw inputs of drafts are kept for a later commit; not used otherwise.

    Returns:
        ``[T, P]`` in the dtype of ``x``; rows of padding requests are zero.
    """
    acc = accumulation_dtype(x)
    width = weight.shape[1]
    out = torch.zeros_like(x)
    for request, ((begin, end), slot) in enumerate(zip(segment.spans(), segment.slot_ids, strict=True)):
        if slot == NULL_SLOT or begin == end:
            continue
        window = torch.cat((tail[slot].to(x.dtype), x[begin:end]))
        for t in range(end - begin):
            y = (window[t : t + width].to(acc) * weight.to(acc).T).sum(dim=0)
            out[begin + t] = (y * torch.sigmoid(y)).to(x.dtype)
        keep_inputs(window, end - begin, slot, request, tail, segment, record)
    return out


def keep_inputs(
    window: torch.Tensor,
    length: int,
    slot: int,
    request: int,
    tail: torch.Tensor,
    segment: Segment,
    record: torch.Tensor | None,
) -> None:
    """What a request leaves behind: its tail and its snapshots, or the inputs of its drafts.

    Args:
        window: ``[W - 1 + length, P]`` old tail and new inputs.
    """
    before = window.shape[0] - length
    if not segment.draft:
        tail[slot] = window[length:].to(tail.dtype)
        for tokens, kept in segment.snapshots_of(request).items():
            tail[kept] = window[tokens : tokens + before].to(tail.dtype)
    elif record is not None:
        record[slot, :length] = window[before:].to(record.dtype)


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    def sample(
        name: str,
        phase: Phase,
        lengths: list[int],
        slots: list[int],
        adversarial: bool = False,
        width: int = 4,
        draft: bool = False,
        channels: int = 96,
        record: bool = False,
        snapshots: Sequence[tuple[int, int, int]] = (),
    ) -> Sample:
        num_slots = max([*slots, 1, *(slot for _, _, slot in snapshots)]) + 2
        args = {
            "x": torch.randn(sum(lengths), channels, generator=gen).to(dtype),
            "weight": torch.randn(channels, width, generator=gen) * 0.5,
            "tail": torch.randn(num_slots, width - 1, channels, generator=gen).to(dtype),
            "segment": make_segment(phase, lengths, slots, draft=draft, snapshots=snapshots),
            "record": torch.ones(num_slots, MAX_DRAFT, channels, dtype=dtype) if record else None,
        }
        return Sample(name, args, adversarial)

    yield sample("one request", "prefill", [70], [1])
    yield sample("shorter than the window", "prefill", [1, 2, 3], [3, 1, 2], adversarial=True)
    yield sample("packed with an empty request", "prefill", [5, 0, 64, 1], [2, 5, 1, 4], adversarial=True)
    yield sample("packed with padding", "prefill", [2, 3, 9], [1, 0, 2], adversarial=True)
    yield sample("around a chunk", "prefill", [31, 33, 1, 32], [4, 1, 3, 2], adversarial=True)
    for width in (2, 3, 6):
        yield sample(f"width {width}", "prefill", [9, 1], [1, 2], width=width)
    yield sample("channels that fill no block", "prefill", [3, 2], [2, 1], adversarial=True, channels=1160)
    yield sample("decode", "decode", [1, 1, 1], [4, 2, 7])
    yield sample("decode with padding", "decode", [1, 1, 1, 1], [0, 3, 0, 1], adversarial=True)
    yield sample("decode of width 2", "decode", [1] * 5, [5, 3, 4, 1, 2], width=2)
    yield sample("drafts", "decode", [1, 8, 3, 5], [2, 1, 0, 3], adversarial=True, draft=True)
    yield sample("drafts of width 2", "decode", [4, 2], [1, 2], width=2, draft=True)
    yield sample("recorded drafts", "decode", [1, 8, 3, 5], [2, 1, 0, 3], True, draft=True, record=True)
    yield sample("recorded drafts of width 3", "decode", [8, 2], [1, 2], width=3, draft=True, record=True)
    kept = [(1, 128, 4), (0, 64, 6), (1, 64, 3)]
    yield sample("snapshots", "prefill", [64, 130, 3, 70], [1, 2, 5, 0], True, snapshots=kept)
    yield sample("snapshots of width 6", "prefill", [1, 65], [1, 2], width=6, snapshots=[(1, 64, 3)])


def _check_delay(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Tap 0 alone delays by W-1 tokens, the last tap alone is the identity (before SiLU)."""
    x = torch.randn(6, 16, generator=gen).to(dtype)
    silu = (x.float() * torch.sigmoid(x.float())).to(dtype)
    for tap, delay in ((0, 3), (3, 0)):
        weight = torch.zeros(16, 4)
        weight[:, tap] = 1
        tail = torch.zeros(2, 3, 16, dtype=dtype)
        y = function(x.clone(), weight, tail, make_segment("prefill", [6], [1]))
        assert torch.equal(y[:delay], torch.zeros_like(y[:delay]))
        assert relative_rms(y[delay:], silu[: 6 - delay]) < 1e-2, f"tap {tap} must delay by {delay} tokens"
        assert torch.equal(tail[1], x[3:]), "the tail must hold the last raw inputs, oldest first"


def _check_split(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """A sequence in two calls equals one call."""
    x, weight = torch.randn(11, 16, generator=gen).to(dtype), torch.randn(16, 4, generator=gen)
    whole_tail = torch.zeros(2, 3, 16, dtype=dtype)
    whole = function(x, weight, whole_tail, make_segment("prefill", [11], [1]))
    for cut in (1, 2, 3, 10):
        tail = torch.zeros(2, 3, 16, dtype=dtype)
        first = function(cloned(x[:cut]), weight, tail, make_segment("prefill", [cut], [1]))
        second = function(cloned(x[cut:]), weight, tail, make_segment("prefill", [11 - cut], [1]))
        assert relative_rms(torch.cat((first, second)), whole) < 1e-3
        assert torch.equal(tail, whole_tail)


def _check_steps(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Token by token, or as drafts, a sequence gives what one prefill gives; drafts leave the tail alone."""
    x, weight = torch.randn(8, 16, generator=gen).to(dtype), torch.randn(16, 4, generator=gen)
    start = torch.randn(2, 3, 16, generator=gen).to(dtype)
    whole_tail = start.clone()
    whole = function(x, weight, whole_tail, make_segment("prefill", [8], [1]))
    tail = start.clone()
    drafts = function(x, weight, tail, make_segment("decode", [8], [1], draft=True))
    assert torch.equal(tail, start), "drafts may be rejected: the tail must stay"
    assert relative_rms(drafts, whole) < 1e-3
    steps = [function(cloned(x[t : t + 1]), weight, tail, make_segment("decode", [1], [1])) for t in range(8)]
    assert relative_rms(torch.cat(steps), whole) < 1e-3
    assert torch.equal(tail, whole_tail)


def _check_null_slot(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
    """Nothing is read or written for padding, in all three modes: its inputs and the null slot may hold anything."""
    weight = torch.randn(16, 4, generator=gen)
    calls: tuple[tuple[Phase, list[int], bool], ...] = (
        ("prefill", [5, 40, 2], False),
        ("decode", [1, 1, 1], False),
        ("decode", [3, 8, 1], True),
    )
    for phase, lengths, draft in calls:
        segment = make_segment(phase, lengths, [2, NULL_SLOT, 1], draft=draft)
        x = torch.randn(sum(lengths), 16, generator=gen).to(dtype)
        begin, end = segment.spans()[1]
        x[begin:end] = torch.nan
        tail = torch.zeros(3, 3, 16, dtype=dtype)
        tail[NULL_SLOT] = torch.nan
        y = function(x, weight, tail, segment)
        assert torch.equal(y[begin:end], torch.zeros_like(y[begin:end])), "rows of padding must be zero"
        assert torch.isfinite(y).all()
        assert tail[NULL_SLOT].isnan().all(), "the null slot must not be written"
        assert torch.isfinite(tail[1:]).all()


def _cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    moved = (2 * axes["T"] + 2 * axes["B"] * (axes["W"] - 1)) * axes["P"] * itemsize + 4 * axes["P"] * axes["W"]
    return Cost(bytes=moved, flops=(2 * axes["W"] + 4) * axes["T"] * axes["P"])


SHORT_CONV = Contract(
    op="short_conv",
    inputs={"x": "T P", "weight": "P W", "tail": "S W-1 P", "segment": "", "record": "S N P"},
    outputs={"y": "T P"},
    mutates=("tail", "record"),
    reference=short_conv,
    samples=_samples,
    cost=_cost,
    invariants=(
        Invariant("a tap is a delay", _check_delay),
        Invariant("split equals whole", _check_split),
        Invariant("steps and drafts equal prefill", _check_steps),
        Invariant("padding is neither read nor written", _check_null_slot),
    ),
)
