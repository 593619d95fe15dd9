"""The short convolution over q, k and v together: 3 x 12288 channels at TP 1, four taps; prefill and update."""

from __future__ import annotations

from typing import Any

import torch

from k3port.ops.catalog import Phase
from k3port.ops.segment import make_segment
from k3port.testing.bench.workload import Answer, Args, Case, Workload, copy_peers

CHANNELS = 3 * 12288
TAPS = 4
PREFILL = ((1, 1024), (1, 4096), (8, 4096), (1, 16384), (8, 16384))
UPDATE = (1, 8, 32, 128, 256)


def case(phase: Phase, requests: int, tokens: int, channels: int = CHANNELS, quick: bool = False) -> Case:
    """``tokens`` of all requests together, equally long."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        lengths, slots = [tokens // requests] * requests, list(range(1, requests + 1))
        return {
            "x": torch.randn(tokens, channels, device=device, generator=gen).bfloat16(),
            "weight": torch.randn(channels, TAPS, device=device, generator=gen) * 0.5,
            "tail": torch.randn(requests + 1, TAPS - 1, channels, device=device, generator=gen).bfloat16(),
            "segment": make_segment(phase, lengths, slots, device=device),
            "record": None,
        }

    name = f"B{requests}" if phase == "decode" else f"{requests}x{tokens // requests}"
    return Case(name, {"T": tokens, "B": requests, "P": channels, "W": TAPS}, make, quick)


def convolve(args: Args) -> Answer:
    """The op in float64 with one sum over taps per request; the contract's reference takes one step per token."""
    x, weight, segment = args["x"], args["weight"].double(), args["segment"]
    width = weight.shape[1]
    out, tail = torch.zeros_like(x, dtype=torch.float64), args["tail"].double()
    for (begin, end), slot in zip(segment.spans(), segment.slot_ids, strict=True):
        window = torch.cat((tail[slot], x[begin:end].double()))
        y = sum(window[j : j + end - begin] * weight[:, j] for j in range(width))
        assert isinstance(y, torch.Tensor)
        out[begin:end] = y * torch.sigmoid(y)
        tail[slot] = window[end - begin :]
    return Answer((out,), {"tail": tail})


WORKLOADS = (
    Workload(
        "short_conv",
        "prefill",
        tuple(case("prefill", n, tokens, quick=tokens == 4096) for n, tokens in PREFILL),
        copy_peers,
        convolve,
    ),
    Workload(
        "short_conv", "decode", tuple(case("decode", n, n, quick=n in (1, 32)) for n in UPDATE), copy_peers, convolve
    ),
)
