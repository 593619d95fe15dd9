"""Continuous batching: requests wait, are prefilled in chunks, decode together, and leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import torch

from k3port.errors import CapacityError
from k3port.model.k3 import K3Model
from k3port.model.step import Step
from k3port.ops.sample import SamplingTensors
from k3port.ops.segment import Segment, make_segment
from k3port.ops.table import OpTable
from k3port.runtime.placement import Placement
from k3port.runtime.pools import PAGE_TOKENS, Pools, pages_for
from k3port.runtime.request import Emitted, FinishReason, Request


class Engine:
    """Runs requests over one model and its pools; a step serves decoding rows and one chunk of prefill together.

    Args:
        placement: where model and pools lie.
        diagnose: called with a request whose logits are not finite; names the first op that produced such values.
        prefill_chunk_tokens: most prompt tokens in one step, over all requests.
    """

    def __init__(
        self,
        model: K3Model,
        table: OpTable,
        pools: Pools,
        placement: Placement,
        *,
        prefill_chunk_tokens: int,
        diagnose: Callable[[Request], str],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.model, self.table, self.pools, self.placement = model, table, pools, placement
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.diagnose = diagnose
        self.on_step = on_step
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def check(self, requests: Iterable[Request]) -> None:
        """Whether each request could run at least alone.

        Raises:
            CapacityError: one of them could not.
        """
        capacity = self.pools.pages.num_pages * PAGE_TOKENS
        for request in requests:
            if request.capacity_tokens > capacity:
                raise CapacityError(
                    f"a prompt of {len(request.prompt_ids)} tokens with up to {request.max_tokens} new ones "
                    f"does not fit in the cache of {capacity} tokens",
                    hint="shorten the prompt, lower max_tokens, or load the model with a larger kv_tokens",
                )

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests that :meth:`check` accepted."""
        self.waiting.extend(requests)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Drops requests that have not ended, and gives their memory back. Others go on."""
        for request in requests:
            if request in self.running:
                self._finish(request)
            elif request in self.waiting:
                self.waiting.remove(request)

    def step(self) -> None:
        """One forward step; what it gave lies in the requests' inboxes afterwards.

        An exception of a kernel leaves the states of every running request undefined, so all of them end with an
        error before it goes on to the caller.
        """
        self._admit()
        try:
            self._forward()
        except BaseException as exc:
            for request in list(self.running):
                request.inbox.append(Emitted(request, None, "error", f"a step failed: {type(exc).__name__}"))
                self._finish(request)
            raise

    def _forward(self) -> None:
        decoding = [request for request in self.running if not request.in_prefill]
        chunks = self._prefill_chunks()
        segments: list[Segment] = []
        if decoding:
            segments.append(self._segment("decode", [(request, 1) for request in decoding], 0))
        if chunks:
            segments.append(self._segment("prefill", chunks, len(decoding)))
        token_ids = [request.output_ids[-1] for request in decoding]
        ready, rows = list(decoding), list(range(len(decoding)))
        for request, length in chunks:
            token_ids += request.prompt_ids[request.num_cached : request.num_cached + length]
            request.prefill_chunks.append(length)
            if request.num_cached + length == len(request.prompt_ids):
                ready.append(request)
                rows.append(len(token_ids) - 1)
        step = Step(torch.tensor(token_ids), tuple(segments), torch.tensor(rows, dtype=torch.int64))
        # Whatever the step needs goes to the device at once, its sampling included: one upload, then one answer back.
        step, sampling = self.placement.step(step, *_sampling_numbers(ready))
        if self.on_step is not None:
            self.on_step(step)
        logits = self.model.forward(step, self.pools.model_state)
        for request, length in [*((r, 1) for r in decoding), *chunks]:
            request.num_cached += length
        if ready:
            self._emit(ready, logits, sampling)

    def _admit(self) -> None:
        """First come, first served: a request enters when a slot and all the pages it can need are free."""
        while self.waiting:
            needed = pages_for(self.waiting[0].capacity_tokens)
            if not self.pools.states.num_free or needed > self.pools.pages.num_free:
                return
            request = self.waiting.popleft()
            request.pages = self.pools.pages.allocate(needed)
            request.slot = self.pools.states.allocate()
            self.running.append(request)

    def _prefill_chunks(self) -> list[tuple[Request, int]]:
        budget, chunks = self.prefill_chunk_tokens, []
        for request in self.running:
            if request.in_prefill and budget > 0:
                length = min(budget, len(request.prompt_ids) - request.num_cached)
                chunks.append((request, length))
                budget -= length
        return chunks

    def _segment(self, phase: str, parts: list[tuple[Request, int]], start: int) -> Segment:
        return make_segment(
            "decode" if phase == "decode" else "prefill",
            [length for _, length in parts],
            [request.slot for request, _ in parts],
            [request.num_cached for request, _ in parts],
            [request.pages for request, _ in parts],
            PAGE_TOKENS,
            start,
        )

    def _emit(self, ready: list[Request], logits: torch.Tensor, sampling: tuple[torch.Tensor, ...]) -> None:
        *params, uniform = sampling
        finite = torch.isfinite(logits).all(dim=-1)
        # Rows that are not finite are drawn from as zeros and thrown away: leaving them out would take another wait.
        drawable = torch.where(finite.unsqueeze(-1), logits, 0.0)
        asked = [request.params for request in ready]
        settings = SamplingTensors(
            *params,
            all_greedy=all(p.temperature == 0 for p in asked),
            any_filter=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in asked),
        )
        ids = self.table.sample(drawable, settings, uniform)
        token_ids, good = torch.stack((ids, finite.to(ids.dtype))).tolist()
        for request, token_id, ok in zip(ready, token_ids, good, strict=True):
            if not ok:
                # Diagnosed before its memory goes back: the replay needs the request as it was.
                request.inbox.append(Emitted(request, None, "error", self.diagnose(request)))
                self._finish(request)
                continue
            reason: FinishReason | None = None
            if token_id in request.stop_ids:
                reason = "stop"
            else:
                request.output_ids.append(token_id)
                if len(request.output_ids) == request.max_tokens:
                    reason = "length"
            request.inbox.append(Emitted(request, token_id, reason))
            if reason is not None:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.pools.states.release(request.slot)
        self.pools.pages.release(request.pages)
        request.pages = []


def _sampling_numbers(requests: list[Request]) -> tuple[torch.Tensor, ...]:
    """The fields of :class:`SamplingTensors`, then the uniform numbers: one entry per request each."""
    params = [request.params for request in requests]
    return (
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([p.top_k for p in params], dtype=torch.int64),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
        torch.tensor([request.next_uniform() for request in requests], dtype=torch.float64),
    )
