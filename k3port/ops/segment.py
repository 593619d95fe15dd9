"""Which requests an op works on: the one record through which states and caches are addressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from k3port.ops.catalog import Phase

NULL_SLOT = 0
"""State slot that no request ever gets. A row that points at it is padding: nothing is read or written for it."""


MAX_DRAFT = 8
"""Most tokens of one request in a verification step: seven drafts after the last accepted token."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests of one phase whose tokens are contiguous in a step.

    Host numbers (``lengths``, ``contexts``, ``slot_ids``, ``pages``) and device tensors say the same thing twice: loops
    on the CPU read the first, kernels the second.

    Attributes:
        phase: ``prefill`` (any number of new tokens per request) or ``decode`` (one, or a few drafts).
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
) -> Segment:
    """Builds a segment from host numbers.

    Args:
        lengths: new tokens per request: 1 each in decode, 1 to :data:`MAX_DRAFT` where drafts are verified.
        slots: state slot per request, :data:`NULL_SLOT` for a padding row.
        contexts: cached tokens per request; default none.
        block_tables: pages per request; may be left out where no paged cache is used.
        page_size: tokens per page.

    Raises:
        ValueError: lists of different lengths, a decode row with a wrong number of tokens, or too few pages.
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
    )
