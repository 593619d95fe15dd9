"""Short convolution on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3port.ops.contract import accumulation_dtype
from k3port.ops.conv import keep_inputs, short_conv
from k3port.ops.segment import NULL_SLOT, Segment


def short_conv_chunk(
    x: torch.Tensor,
    weight: torch.Tensor,
    tail: torch.Tensor,
    segment: Segment,
    record: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`k3port.ops.conv.short_conv`: one multiply-add per tap over a whole request."""
    acc = accumulation_dtype(x)
    width = weight.shape[1]
    taps = weight.to(acc).T.contiguous()
    out = torch.zeros_like(x) if segment.has_padding else torch.empty_like(x)
    for request, ((begin, end), slot) in enumerate(zip(segment.spans(), segment.slot_ids, strict=True)):
        if slot == NULL_SLOT or begin == end:
            continue
        length = end - begin
        window = torch.cat((tail[slot].to(x.dtype), x[begin:end]))
        keep_inputs(window, length, slot, request, tail, segment, record)
        wide = window.to(acc)
        y = wide[:length] * taps[0]
        for j in range(1, width):
            y.addcmul_(wide[j : j + length], taps[j])
        out[begin:end] = F.silu(y).to(x.dtype)
    return out


def short_conv_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    tail: torch.Tensor,
    segment: Segment,
    record: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`k3port.ops.conv.short_conv`: one token per request at once, drafts request by request."""
    if segment.draft:
        return short_conv_chunk(x, weight, tail, segment, record)
    if segment.has_padding:
        return short_conv(x, weight, tail, segment)
    acc = accumulation_dtype(x)
    alone = len(segment.slot_ids) == 1
    old = tail[segment.slot_ids[0]].unsqueeze(0) if alone else tail[segment.slots]
    window = torch.cat((old.to(x.dtype), x.unsqueeze(1)), dim=1)
    if alone:
        old.copy_(window[:, 1:])
    else:
        tail[segment.slots] = window[:, 1:].to(tail.dtype)
    return F.silu((window.to(acc) * weight.to(acc).T).sum(dim=1)).to(x.dtype)
