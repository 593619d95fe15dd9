"""Which requests an op works on: the one record through which states and caches are addressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3port.ops.catalog import MAX_DRAFT, Phase

NULL_SLOT = 0
"""State slot that no request ever gets. A row that points at it is padding: nothing is read or written for it."""


SNAPSHOT_TOKENS = 64
"""A recurrent state can be kept after every so many tokens of a prefill: a multiple of all chunks of the kernels."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests of one phase whose tokens are contiguous in a step.

    Host numbers (``lengths``, ``contexts``, ``slot_ids``, ``pages``) and device tensors say the same thing twice: loops
    on the CPU read the first, kernels the second.

    Attributes:
        phase: ``prefill`` (any number of new tokens per request) or ``decode`` (one, or a few drafts to verify).
        start: first row of the segment in the step's token tensor.
        lengths: new tokens per request; may contain 0 in prefill.
        contexts: tokens already in the cache per request, before this step.
        slot_ids: state slot per request; :data:`NULL_SLOT` marks a padding row.
        pages: cache pages per request, in token order.
        cu_seqlens: int32 ``[B+1]`` running sum of ``lengths``, from 0.
        kv_lens: int32 ``[B]``: contexts plus lengths.
        slots: int64 ``[B]``, ``slot_ids`` as a tensor.
        block_table: int32 ``[B, most pages]``, ``pages`` as a tensor, -1 where unused.
        cache_rows: int64 ``[T]`` row ``page * page_size + offset`` of each new token, -1 for padding.
        has_padding: whether some slot is the null slot.
        draft: decode of drafted tokens that may be rejected. Outputs are computed as usual, but convolution tails and
            recurrent states stay as they were; what a later commit needs is recorded instead.
        snapshots: ``(request, tokens, slot)``: the recurrent state and the convolution tail after that many tokens of
            the request are also written to another slot, for prefixes that are used again. Tokens are counted from the
            first one of this step, not from the start of the context, and are multiples of :data:`SNAPSHOT_TOKENS`:
            a prompt that is split at such multiples has its snapshots at multiples in the context too.
        snapshot_slots: int32 ``[B, most boundaries]``: ``snapshots`` as a tensor, column n for the boundary after
            ``(n + 1) * SNAPSHOT_TOKENS`` tokens, 0 where nothing is kept; None without any snapshot.
    """

    phase: Phase
    start: int
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    slot_ids: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]
    cu_seqlens: torch.Tensor
    kv_lens: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    cache_rows: torch.Tensor
    has_padding: bool
    draft: bool = False
    snapshots: tuple[tuple[int, int, int], ...] = ()
    snapshot_slots: torch.Tensor | None = None

    def snapshots_of(self, request: int) -> dict[int, int]:
        """Slots by number of tokens, for one request."""
        return {tokens: slot for owner, tokens, slot in self.snapshots if owner == request}

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def rows(self) -> slice:
        """The segment's rows in the step."""
        return slice(self.start, self.start + self.num_tokens)

    def spans(self) -> list[tuple[int, int]]:
        """``(first, last + 1)`` token of each request, relative to the segment."""
        ends, begin = [], 0
        for length in self.lengths:
            ends.append((begin, begin + length))
            begin += length
        return ends


def make_segment(
    phase: Phase,
    lengths: Sequence[int],
    slots: Sequence[int],
    contexts: Sequence[int] | None = None,
    block_tables: Sequence[Sequence[int]] | None = None,
    page_size: int = 64,
    start: int = 0,
    device: torch.device | str = "cpu",
    draft: bool = False,
    snapshots: Sequence[tuple[int, int, int]] = (),
) -> Segment:
    """Builds a segment from host numbers.

    Args:
        lengths: new tokens per request: 1 each in decode, 1 to :data:`MAX_DRAFT` where drafts are verified.
        slots: state slot per request, :data:`NULL_SLOT` for a padding row.
        contexts: cached tokens per request; default none.
        block_tables: pages per request; may be left out where no paged cache is used.
        page_size: tokens per page.
        snapshots: ``(request, tokens, slot)`` as in :class:`Segment`.

    Raises:
        ValueError: lists of different lengths, a decode row with a wrong number of tokens, too few pages, or a snapshot
            that cannot be taken.
    """
    contexts = [0] * len(lengths) if contexts is None else contexts
    tables = [[] for _ in lengths] if block_tables is None else block_tables
    if not len(lengths) == len(slots) == len(contexts) == len(tables):
        raise ValueError("lengths, slots, contexts and block_tables must have one entry per request")
    if draft and (phase != "decode" or any(not 1 <= length <= MAX_DRAFT for length in lengths)):
        raise ValueError(f"drafts are verified in decode, 1 to {MAX_DRAFT} tokens per request, got {list(lengths)}")
    if phase == "decode" and not draft and any(length != 1 for length in lengths):
        raise ValueError(f"a decode segment has one token per request, got {list(lengths)}")
    cache_rows: list[int] = []
    for length, slot, context, table in zip(lengths, slots, contexts, tables, strict=True):
        if slot == NULL_SLOT or block_tables is None:
            cache_rows += [-1] * length
            continue
        if len(table) * page_size < context + length:
            raise ValueError(f"{len(table)} pages of {page_size} cannot hold {context} + {length} tokens")
        cache_rows += [table[p // page_size] * page_size + p % page_size for p in range(context, context + length)]
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length)
    width = max((len(table) for table in tables), default=0)
    padded = [[*table, *([-1] * (width - len(table)))] for table in tables]
    return Segment(
        phase=phase,
        start=start,
        lengths=tuple(lengths),
        contexts=tuple(contexts),
        slot_ids=tuple(slots),
        pages=tuple(tuple(table) for table in tables),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32, device=device),
        kv_lens=torch.tensor([c + n for c, n in zip(contexts, lengths, strict=True)], dtype=torch.int32, device=device),
        slots=torch.tensor(list(slots), dtype=torch.int64, device=device),
        block_table=torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(tables), width),
        cache_rows=torch.tensor(cache_rows, dtype=torch.int64, device=device),
        has_padding=NULL_SLOT in slots,
        draft=draft,
        snapshots=tuple((request, tokens, slot) for request, tokens, slot in snapshots),
        snapshot_slots=_snapshot_table(phase, lengths, slots, snapshots, device) if snapshots else None,
    )


def _snapshot_table(
    phase: Phase,
    lengths: Sequence[int],
    slots: Sequence[int],
    snapshots: Sequence[tuple[int, int, int]],
    device: torch.device | str,
) -> torch.Tensor:
    if phase != "prefill":
        raise ValueError("snapshots are taken in prefill")
    table = [[NULL_SLOT] * (max(lengths) // SNAPSHOT_TOKENS) for _ in lengths]
    used = set(slots)
    for request, tokens, slot in snapshots:
        if not 0 <= request < len(lengths) or slots[request] == NULL_SLOT:
            raise ValueError(f"snapshot of request {request}: there is no such request, or it is padding")
        if tokens % SNAPSHOT_TOKENS or not 0 < tokens <= lengths[request]:
            raise ValueError(
                f"snapshot after {tokens} tokens: needs a multiple of {SNAPSHOT_TOKENS} up to the request's "
                f"{lengths[request]} new tokens"
            )
        if slot == NULL_SLOT or slot in used or table[request][tokens // SNAPSHOT_TOKENS - 1] != NULL_SLOT:
            raise ValueError(f"snapshot into slot {slot}: the slot is in use, or the boundary has a snapshot already")
        used.add(slot)
        table[request][tokens // SNAPSHOT_TOKENS - 1] = slot
    return torch.tensor(table, dtype=torch.int32, device=device)
