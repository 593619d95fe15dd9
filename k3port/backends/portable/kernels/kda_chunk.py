"""KDA prefill: chunks in parallel, then the state from chunk to chunk; long prompts overlap the two."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from k3port.backends.portable.kda_slabs import slabs
from k3port.backends.portable.kernels.kda_intra import (
    BOUNDED,
    SOFTPLUS,
    kda_decay_kernel,
    kda_pairs_kernel,
    kda_solve_kernel,
)
from k3port.backends.portable.kernels.kda_scan import kda_scan_kernel
from k3port.backends.portable.launch import Config, ceil_div, in_rows, launch, power_of_2, tuned
from k3port.ops.kda_state import KdaDrafts
from k3port.ops.segment import SNAPSHOT_TOKENS, Segment

CANDIDATES = {
    "decay_heads": (1, 2),
    "solve_columns": (64, 128),
    "block_v": (32, 64),
    "slab_chunks": (128, 256),
}


class Decay(NamedTuple):
    """A gate form and its parameters; ``lower_bound`` counts for the bounded form only."""

    form: int
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    lower_bound: float


def gate_decay(A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> Decay:
    """The gate of :func:`k3port.ops.kda.kda_gate`, computed inside the kernel."""
    return Decay(SOFTPLUS if lower_bound is None else BOUNDED, A_log, dt_bias, lower_bound or 0.0)


class _Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    decay: Decay
    segment: Segment
    config: Config


class _Scratch:
    """What the chunks of one slab leave for the scan.

    ``w``, ``u``, ``qg``, ``kg``, ``qk``: the module ``kda_intra``'s W, U, q exp G, k exp(G_n - G), QK; ``x``: beta k
    exp G; in float32 ``fall``: G, ``pairs``: -A with the inverses of the diagonal blocks of I + A.
    """

    def __init__(self, slab: int, size: int, like: _Inputs) -> None:
        heads, key_dim, value_dim = like.k.shape[1], like.k.shape[2], like.v.shape[2]

        def empty(columns: int, dtype: torch.dtype = like.k.dtype) -> torch.Tensor:
            return torch.empty((slab, heads, size, columns), dtype=dtype, device=like.k.device)

        self.w, self.qg, self.kg, self.x = (empty(key_dim) for _ in range(4))
        self.u, self.qk = empty(value_dim), empty(size)
        self.fall, self.pairs = empty(key_dim, torch.float32), empty(size, torch.float32)


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    # The scan is the longer chain: its programs go first where both have some to start.
    return torch.cuda.Stream(device, priority=-1)


class _Overlap:
    """Runs scans on a stream of their own, where there is more than one slab and the device has streams."""

    def __init__(self, device: torch.device, slabs: int) -> None:
        self.stream = _second_stream(device) if slabs > 1 and device.type == "cuda" else None
        self.scanned: list[torch.cuda.Event] = []

    def wait_for_buffer(self, slab: int) -> None:
        """Before slab's chunks overwrite what the scan before last read."""
        if self.stream is not None and slab >= 2:
            torch.cuda.current_stream().wait_event(self.scanned[slab - 2])

    @contextmanager
    def scan(self) -> Iterator[None]:
        """Launches inside wait for all that was launched so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
            self.scanned.append(self.stream.record_event())

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


def chunk_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    decay: Decay,
    state: torch.Tensor,
    segment: Segment,
) -> torch.Tensor:
    """The recurrence of :func:`k3port.ops.kda.kda_core` over a prefill segment.

    Args:
        q, k: ``[T, H, K]``, heads one after the other in a row, rows of any stride; not yet normalised.
        v: ``[T, H, V]``.
        g: ``[T, H, K]`` raw gates, as ``q``.
        beta: ``[T, H]`` logits of the write strength.
        state: ``[S, H, V, K]`` contiguous, float32 or bfloat16; updated at the segment's slots and its snapshots.

    Returns:
        ``[T, H, V]`` in the dtype of ``v``; rows of padding requests are zero.
    """
    q, k, v, g, beta = (in_rows(x)[0] for x in (q, k, v, g, beta))
    tokens, heads, value_dim = v.shape
    out = torch.empty((tokens, heads, value_dim), dtype=v.dtype, device=v.device)
    if not tokens:
        return out
    config = tuned("kda_chunk", H=heads, T=tokens, R=len(segment.lengths), wide=int(k.dtype == torch.float32))
    inputs = _Inputs(q, k, v, g, beta, decay, segment, config)
    size = 1 << config["bits"]
    # Every request starts a chunk of its own, see ``find_request``.
    chunks = tokens // size + len(segment.lengths)
    _, slab = slabs(config, chunks)
    starts = range(0, chunks, slab)
    buffers = [_Scratch(slab, size, inputs) for _ in range(min(2, len(starts)))]
    overlap = _Overlap(v.device, len(starts))
    for number, first in enumerate(starts):
        buffer, count = buffers[number % 2], min(slab, chunks - first)
        overlap.wait_for_buffer(number)
        _intra(inputs, buffer, first, count)
        with overlap.scan():
            _scan(inputs, buffer, state, out, first, count)
    overlap.join()
    return out


def _intra(inputs: _Inputs, buffer: _Scratch, first: int, count: int) -> None:
    q, k, v, g, beta, decay, segment, config = inputs
    heads, key_dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    size = 1 << config["bits"]
    wide = k.dtype == torch.float32
    block_k = max(16, power_of_2(key_dim))
    columns = min(config["solve_columns"], block_k)
    precision = "tf32" if config["tf32"] and not wide else "ieee"
    anchored = decay.form == BOUNDED and decay.lower_bound >= -5
    # The other form needs more registers than a limit that suits this one leaves.
    registers = {"maxnreg": config["pairs_registers"]} if anchored and config.get("pairs_registers") else {}
    spans = (segment.cu_seqlens, segment.slots)
    requests = len(segment.lengths)
    launch(
        kda_decay_kernel,
        (ceil_div(heads, config["decay_heads"]), count, 1),
        g,
        decay.A_log,
        decay.dt_bias,
        *spans,
        buffer.fall,
        g.stride(0),
        requests,
        first,
        decay.lower_bound,
        H=heads,
        K=key_dim,
        BK=block_k,
        HEADS=config["decay_heads"],
        ROWS=min(config["decay_rows"], size),
        C=size,
        GATE=decay.form,
        num_warps=config["decay_warps"],
    )
    launch(
        kda_pairs_kernel,
        (heads, size // 16 * count, 1),
        q,
        k,
        beta,
        buffer.fall,
        *spans,
        buffer.qg,
        buffer.kg,
        buffer.x,
        buffer.qk,
        buffer.pairs,
        q.stride(0),
        k.stride(0),
        beta.stride(0),
        requests,
        first,
        H=heads,
        K=key_dim,
        KB=min(config["pairs_keys"], block_k),
        C=size,
        ANCHORED=anchored,
        PRECISION=precision,
        num_warps=config["pairs_warps"],
        **registers,
    )
    launch(
        kda_solve_kernel,
        (ceil_div(key_dim, columns) + ceil_div(value_dim, columns), heads, count),
        buffer.x,
        v,
        beta,
        buffer.pairs,
        buffer.w,
        buffer.u,
        *spans,
        v.stride(0),
        beta.stride(0),
        requests,
        first,
        H=heads,
        K=key_dim,
        V=value_dim,
        NB=columns,
        C=size,
        NARROW=bool(config["solve_bf16"]) and not wide,
        PRECISION=precision,
        num_warps=config["solve_warps"],
    )


def _scan(inputs: _Inputs, buffer: _Scratch, state: torch.Tensor, out: torch.Tensor, first: int, count: int) -> None:
    config, segment, snapshots = inputs.config, inputs.segment, inputs.segment.snapshot_slots
    heads, key_dim, value_dim = inputs.k.shape[1], inputs.k.shape[2], inputs.v.shape[2]
    block_v = max(16, min(config["block_v"], power_of_2(value_dim)))
    launch(
        kda_scan_kernel,
        (ceil_div(value_dim, block_v), heads, len(segment.lengths)),
        buffer.w,
        buffer.u,
        buffer.qg,
        buffer.kg,
        buffer.qk,
        buffer.fall,
        state,
        out,
        segment.cu_seqlens,
        segment.slots,
        snapshots,
        out.stride(0),
        first,
        count,
        0 if snapshots is None else snapshots.shape[1],
        H=heads,
        K=key_dim,
        V=value_dim,
        BK=max(16, power_of_2(key_dim)),
        BV=block_v,
        C=1 << config["bits"],
        STAGES=config["scan_stages"],
        SNAPSHOTS=snapshots is not None,
        PERIOD=SNAPSHOT_TOKENS,
        num_warps=config["scan_warps"],
    )


def kda_core_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate_raw: torch.Tensor,
    beta_logit: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
    state: torch.Tensor,
    segment: Segment,
    drafts: KdaDrafts | None = None,
) -> torch.Tensor:
    """See :func:`k3port.ops.kda.kda_core`, for prefill."""
    del drafts
    raw, decay = gate_raw.unflatten(-1, (k.shape[1], -1)), gate_decay(A_log, dt_bias, lower_bound)
    return chunk_forward(q, k, v, raw, beta_logit, decay, state, segment)
