"""Short causal convolution with SiLU and its cached tail, in one launch.

Prefill and drafts: a program takes a chunk of one request's tokens and a block of channels, and slides a window of
``W`` rows over the tokens, so that a row is loaded once. Chunks start where their request starts, hence only the first
chunk of a request needs the tail; the same program also writes it, from the inputs at the request's end, and nobody
else touches that slot.

Decode: a program takes one token each of several requests, so that the taps are loaded once for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import cast, gated
from k3port.backends.portable.launch import ceil_div, in_rows, launch, tuned
from k3port.ops.segment import MAX_DRAFT, SNAPSHOT_TOKENS, Segment

CANDIDATES = {
    "short_conv": {"BLOCK_P": (512, 1024), "CHUNK": (16, 32, 64), "num_warps": (4, 8)},
    "short_conv_step": {"BLOCK_P": (512, 1024), "GROUP": (1, 2, 4), "num_warps": (2, 4, 8)},
}


@triton.jit
def _request_of(cu_ptr, chunk, requests, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The request that a chunk belongs to. Request i owns the chunks from ``cu[i] // CHUNK + i`` on.

    That is at least as many as it has, for any lengths: the rest is empty.
    """
    low = 0
    high = requests
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(cu_ptr + middle) // CHUNK + middle <= chunk:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _where(cols, width, wanted):  # type: ignore[no-untyped-def]
    """Mask of a row: no column unless ``wanted``. The interpreter cannot combine a scalar mask with a row's."""
    return cols < tl.where(wanted, width, 0)


@triton.jit
def _load_taps(w_ptr, cols, P: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """The W taps of each column, as W rows.

    Loaded as they lie, 16 bytes per thread, and then taken apart: one load per tap would touch far too many lines.
    """
    TAPS: tl.constexpr = 2 if W == 2 else 4 if W <= 4 else 8
    lanes = tl.arange(0, TAPS)[None, :]
    stored = tl.load(w_ptr + cols[:, None] * W + lanes, mask=(cols[:, None] < P) & (lanes < W), other=0.0)
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.sum(tl.where(lanes == j, stored, 0.0), axis=1),)
    return taps


@triton.jit(do_not_specialize=["requests", "snapshot_stride"])
def short_conv_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    tail_ptr,
    y_ptr,
    cu_ptr,
    slots_ptr,
    snapshot_ptr,
    record_ptr,
    x_stride,
    slot_stride,
    tail_stride,
    requests,
    snapshot_stride,
    P: tl.constexpr,
    W: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    UPDATE: tl.constexpr,
    SNAPSHOTS: tl.constexpr,
    PERIOD: tl.constexpr,
    RECORD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    chunk = tl.program_id(0) // BLOCKS
    cols = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    if ONE_CHUNK:
        request = chunk
        offset = tl.full((), 0, tl.int32)
    else:
        request = _request_of(cu_ptr, chunk, requests, CHUNK)
        offset = (chunk - tl.load(cu_ptr + request) // CHUNK - request) * CHUNK
    begin = tl.load(cu_ptr + request)
    end = tl.load(cu_ptr + request + 1)
    count = tl.minimum(end - begin - offset, CHUNK)
    if count > 0:
        slot = tl.load(slots_ptr + request)
        # Padding has slot 0: its masked loads give zeros, and so do its rows.
        width = tl.where(slot != 0, P, 0)
        x_row = x_ptr + (begin + offset).to(tl.int64) * x_stride
        y_row = y_ptr + (begin + offset).to(tl.int64) * P
        tail_row = tail_ptr + slot * slot_stride
        taps = _load_taps(w_ptr, cols, P, W)
        held = ()
        for j in tl.static_range(W - 1):
            old = tl.load(tail_row + j * tail_stride + cols, mask=_where(cols, width, offset == 0), other=0.0)
            near = tl.load(x_row + (j - (W - 1)) * x_stride + cols, mask=_where(cols, width, offset > 0), other=0.0)
            held = held + (tl.where(offset > 0, near, old.to(x_ptr.dtype.element_ty)),)
        for first in range(0, count, ROWS):
            window = held
            for r in tl.static_range(ROWS):
                here = _where(cols, width, first + r < count)
                window = window + (tl.load(x_row + (first + r) * x_stride + cols, mask=here, other=0.0),)
            for r in tl.static_range(ROWS):
                total = window[r].to(tl.float32) * taps[0]
                for j in tl.static_range(1, W):
                    total += window[r + j].to(tl.float32) * taps[j]
                result = cast(gated(total, total), y_ptr.dtype.element_ty)
                tl.store(y_row + (first + r) * P + cols, result, mask=_where(cols, P, first + r < count))
                if RECORD > 0:
                    here = _where(cols, width, first + r < count)
                    kept_row = record_ptr + (slot * RECORD + first + r) * P + cols
                    tl.store(kept_row, window[r + W - 1].to(record_ptr.dtype.element_ty), mask=here)
            held = window[ROWS:]
        if SNAPSHOTS:
            for n in tl.static_range((CHUNK + PERIOD - 1) // PERIOD):
                # Counted from the chunk's first token: all rows that a snapshot needs lie in this request.
                done = (offset // PERIOD + 1 + n) * PERIOD
                due = (done <= offset + count) & (slot != 0)
                place = snapshot_ptr + request * snapshot_stride + done // PERIOD - 1
                target = tl.load(place, mask=due, other=0).to(tl.int64)
                for j in tl.static_range(W - 1):
                    here = _where(cols, P, target > 0)
                    row = (done - offset + j - (W - 1)).to(tl.int64)
                    new = tl.load(x_row + row * x_stride + cols, mask=here, other=0.0)
                    copy = tail_ptr + target * slot_stride + j * tail_stride + cols
                    tl.store(copy, new.to(tail_ptr.dtype.element_ty), mask=here)
        if UPDATE:  # noqa: SIM102 (one is known when compiling, the other is not)
            if offset == 0:
                kept = ()
                length = end - begin
                for j in tl.static_range(W - 1):
                    row = (length + j - (W - 1)).to(tl.int64)
                    new = tl.load(x_row + row * x_stride + cols, mask=_where(cols, width, row >= 0), other=0.0)
                    shift = (length + j).to(tl.int64)
                    old = tl.load(tail_row + shift * tail_stride + cols, mask=_where(cols, width, row < 0), other=0.0)
                    kept = kept + (tl.where(row >= 0, new.to(tail_ptr.dtype.element_ty), old),)
                # Other threads of this program may still read the rows that are now written.
                tl.debug_barrier()
                for j in tl.static_range(W - 1):
                    tl.store(tail_row + j * tail_stride + cols, kept[j], mask=cols < width)


@triton.jit(do_not_specialize=["requests"])
def short_conv_step_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    tail_ptr,
    y_ptr,
    slots_ptr,
    x_stride,
    slot_stride,
    tail_stride,
    requests,
    P: tl.constexpr,
    W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    first = tl.program_id(0) // BLOCKS * GROUP
    cols = tl.program_id(0) % BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    taps = _load_taps(w_ptr, cols, P, W)
    # All loads before the first store, so that they are under way together.
    window = ()
    for g in tl.static_range(GROUP):
        request = tl.minimum(first + g, requests - 1).to(tl.int64)
        slot = tl.load(slots_ptr + request)
        width = tl.where((slot != 0) & (first + g < requests), P, 0)
        for j in tl.static_range(W - 1):
            old = tl.load(tail_ptr + slot * slot_stride + j * tail_stride + cols, mask=cols < width, other=0.0)
            window = window + (old.to(x_ptr.dtype.element_ty),)
        window = window + (tl.load(x_ptr + request * x_stride + cols, mask=cols < width, other=0.0),)
    # Other threads of this program may still read the rows that are now written.
    tl.debug_barrier()
    for g in tl.static_range(GROUP):
        request = tl.minimum(first + g, requests - 1).to(tl.int64)
        slot = tl.load(slots_ptr + request)
        width = tl.where((slot != 0) & (first + g < requests), P, 0)
        total = window[g * W].to(tl.float32) * taps[0]
        for j in tl.static_range(1, W):
            new = window[g * W + j]
            total += new.to(tl.float32) * taps[j]
            row = tail_ptr + slot * slot_stride + (j - 1) * tail_stride + cols
            tl.store(row, new.to(tail_ptr.dtype.element_ty), mask=cols < width)
        result = cast(gated(total, total), y_ptr.dtype.element_ty)
        tl.store(y_ptr + request * P + cols, result, mask=_where(cols, P, first + g < requests))


def _fitted(config: Mapping[str, int], channels: int) -> Mapping[str, int]:
    """No more columns per program than there are."""
    if channels >= config["BLOCK_P"]:
        return config
    return {**config, "BLOCK_P": 1 << (channels - 1).bit_length()}


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    tail: torch.Tensor,
    segment: Segment,
    record: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`k3port.ops.conv.short_conv`. Reads only device tensors of the segment, so a step can be captured."""
    x, x_stride = in_rows(x)
    tokens, channels = x.shape
    y = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    requests = segment.slots.shape[0]
    if not tokens or not requests:
        return y
    strides = (x_stride, tail.stride(0), tail.stride(1))
    width = weight.shape[1]
    if segment.phase == "decode" and not segment.draft:
        config = _fitted(tuned("short_conv_step", B=requests, P=channels), channels)
        programs = ceil_div(requests, config["GROUP"]) * ceil_div(channels, config["BLOCK_P"])
        launch(
            short_conv_step_kernel,
            (programs, 1, 1),
            x,
            weight,
            tail,
            y,
            segment.slots,
            *strides,
            requests,
            P=channels,
            W=width,
            **config,
        )
        return y
    config = _fitted(tuned("short_conv", most=MAX_DRAFT if segment.draft else tokens, P=channels), channels)
    # Drafts fill one chunk per request at most; otherwise the kernel finds a chunk's request itself.
    snapshots = segment.snapshot_slots
    chunks = requests if segment.draft else tokens // config["CHUNK"] + requests
    launch(
        short_conv_kernel,
        (chunks * ceil_div(channels, config["BLOCK_P"]), 1, 1),
        x,
        weight,
        tail,
        y,
        segment.cu_seqlens,
        segment.slots,
        snapshots,
        record if segment.draft else None,
        *strides,
        requests,
        0 if snapshots is None else snapshots.shape[1],
        P=channels,
        W=width,
        ONE_CHUNK=segment.draft,
        UPDATE=not segment.draft,
        SNAPSHOTS=snapshots is not None,
        PERIOD=SNAPSHOT_TOKENS,
        RECORD=0 if record is None or not segment.draft else record.shape[1],
        **config,
    )
    return y
