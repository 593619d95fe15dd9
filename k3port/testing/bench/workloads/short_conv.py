"""The short convolution over q, k and v together: 3 x 12288 channels at TP 1, four taps; prefill, update, drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Cost
from k3port.ops.conv import SHORT_CONV
from k3port.ops.segment import MAX_DRAFT, make_segment
from k3port.testing.bench.workload import Answer, Args, Case, Workload, copy_peers

CHANNELS = 3 * 12288
TAPS = 4
PREFILL = ((1, 1024), (1, 4096), (8, 4096), (1, 16384), (8, 16384))
UPDATE = (1, 8, 32, 128, 256)
DRAFTS = ((1, 4), (32, 4), (32, 8), (128, 4))
"""Requests, and tokens of each that are verified."""


def case(phase: Phase, requests: int, tokens: int, channels: int = CHANNELS, quick: bool = False) -> Case:
    """``tokens`` of all requests together, equally long; more than one each in decode are drafts, which are recorded.

    Drafts are not tuned for: their configuration does not depend on the number of requests, and is set by hand.
    """
    drafts = phase == "decode" and tokens > requests

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        lengths, slots = [tokens // requests] * requests, list(range(1, requests + 1))
        return {
            "x": torch.randn(tokens, channels, device=device, generator=gen).bfloat16(),
            "weight": torch.randn(channels, TAPS, device=device, generator=gen) * 0.5,
            "tail": torch.randn(requests + 1, TAPS - 1, channels, device=device, generator=gen).bfloat16(),
            "segment": make_segment(phase, lengths, slots, device=device, draft=drafts),
            "record": torch.ones(requests + 1, MAX_DRAFT, channels, device=device).bfloat16() if drafts else None,
        }

    each = tokens // requests
    name = f"{requests}x{each}" if phase == "prefill" else f"B{requests} x{each}" if drafts else f"B{requests}"
    axes = {"T": tokens, "B": requests, "P": channels, "W": TAPS}
    return Case(name, axes, make, quick, cost=_draft_cost if drafts else None, tuned=not drafts)


def _draft_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    """Inputs go into the record, and the tail is only read."""
    plain = SHORT_CONV.cost(axes, itemsize)
    return Cost(plain.bytes + (axes["T"] - axes["B"] * (axes["W"] - 1)) * axes["P"] * itemsize, plain.flops)


def convolve(args: Args) -> Answer:
    """The op in float64 with one sum over taps per request; the contract's reference takes one step per token."""
    x, weight, segment = args["x"], args["weight"].double(), args["segment"]
    width = weight.shape[1]
    out, tail = torch.zeros_like(x, dtype=torch.float64), args["tail"].double()
    record = args["record"].double() if args.get("record") is not None else None
    for (begin, end), slot in zip(segment.spans(), segment.slot_ids, strict=True):
        window = torch.cat((tail[slot], x[begin:end].double()))
        y = sum(window[j : j + end - begin] * weight[:, j] for j in range(width))
        assert isinstance(y, torch.Tensor)
        out[begin:end] = y * torch.sigmoid(y)
        if not segment.draft:
            tail[slot] = window[end - begin :]
        elif record is not None:
            record[slot, : end - begin] = x[begin:end]
    return Answer((out,), {"tail": tail} if record is None else {"tail": tail, "record": record})


WORKLOADS = (
    Workload(
        "short_conv",
        "prefill",
        tuple(case("prefill", n, tokens, quick=tokens == 4096) for n, tokens in PREFILL),
        copy_peers,
        convolve,
    ),
    Workload(
        "short_conv",
        "decode",
        (
            *(case("decode", n, n, quick=n in (1, 32)) for n in UPDATE),
            *(case("decode", n, n * tokens) for n, tokens in DRAFTS),
        ),
        copy_peers,
        convolve,
    ),
)
