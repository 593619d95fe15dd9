"""The library's front door: load a checkpoint, generate text."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import torch

from k3port.errors import CapacityError, UsageError
from k3port.model.config import ModelConfig
from k3port.model.k3 import K3Model
from k3port.model.shapes import rank_dims
from k3port.model.step import Probe, Step
from k3port.ops.segment import make_segment
from k3port.ops.table import OpTable
from k3port.oracle.spec import Plan
from k3port.plugins import Registry
from k3port.runtime.arguments import Prompt, as_params, as_prompts, check_overrides, check_size
from k3port.runtime.binding import Op, bind_table, pack_function
from k3port.runtime.compare import ForcedRouting, start_sequence
from k3port.runtime.diagnose import first_bad_op
from k3port.runtime.engine import Engine
from k3port.runtime.loader import Weights, load_weights
from k3port.runtime.placement import HOST, Placement, open_placement
from k3port.runtime.pools import PAGE_TOKENS, Pools, pages_for
from k3port.runtime.preflight import Checkpoint
from k3port.runtime.prepare import prepare
from k3port.runtime.request import Emitted, FinishReason, Generation, Request, SamplingParams, TokenEvent
from k3port.runtime.threads import PhaseThreads
from k3port.settings import MAX_THREADS, get_settings, merge_pins
from k3port.text.loading import TextStream, TextTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEFAULT_REQUESTS = 8
DEFAULT_KV_TOKENS = 32768
DEFAULT_PREFILL_CHUNK = 1024


class Runtime:
    """A loaded model. Streams may be open side by side; threads must not share it.

    Use :func:`k3port.load` or :meth:`Runtime.load` to make one.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weights: Weights,
        plan: Plan,
        registry: Registry,
        tokenizer: TextTokenizer | None,
        dtype: torch.dtype,
        *,
        max_requests: int = DEFAULT_REQUESTS,
        kv_tokens: int = DEFAULT_KV_TOKENS,
        prefill_chunk_tokens: int = DEFAULT_PREFILL_CHUNK,
        overrides: Mapping[str, Op] | None = None,
        threads: int | None = None,
        table: OpTable | None = None,
        placement: Placement | None = None,
        note: str = "",
    ) -> None:
        self.checkpoint, self.weights, self.plan, self.registry = checkpoint, weights, plan, registry
        self.config: ModelConfig = checkpoint.config
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.placement = placement or open_placement(HOST)
        self.note = note
        self.closed = False
        self.overrides = check_overrides(overrides)
        self._limits = {
            "max_requests": check_size("max_requests", max_requests),
            "kv_tokens": check_size("kv_tokens", kv_tokens),
            "prefill_chunk_tokens": check_size("prefill_chunk_tokens", prefill_chunk_tokens),
            "threads": None if threads is None else check_size("threads", threads, MAX_THREADS),
        }
        self.kernels = {spec.name: spec for spec in registry.kernels}
        self.dims = rank_dims(self.config, mxfp4=checkpoint.mxfp4)
        self.table = table or bind_table(plan, self.kernels, overrides=self.overrides)
        self.model = K3Model(self.config, weights.params, self.table)
        self.max_context_tokens = min(self.config.max_context_tokens, pages_for(kv_tokens) * PAGE_TOKENS)
        self.pools = Pools(
            self.config,
            self.dims,
            num_requests=max_requests,
            num_tokens=kv_tokens,
            dtype=dtype,
            device=self.placement.device,
        )
        self.threads = PhaseThreads.choose(
            weights, threads or get_settings().threads, longest_step=prefill_chunk_tokens
        )
        self.stop_ids = checkpoint.eos_ids | (frozenset() if tokenizer is None else tokenizer.stop_ids)
        self._engine = Engine(
            self.model,
            self.table,
            self.pools,
            self.placement,
            prefill_chunk_tokens=prefill_chunk_tokens,
            diagnose=self._diagnose,
            # On a GPU the host only starts kernels: more threads would do nothing.
            on_step=self.threads.apply if self.placement.on_host else None,
        )

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        platform: str | None = "cpu",
        dtype: str | None = None,
        kernels: Mapping[str, str] | None = None,
        plan: Plan | None = None,
        registry: Registry | None = None,
        profiles: Sequence[Path] = (),
        overrides: Mapping[str, Op] | None = None,
        max_requests: int = DEFAULT_REQUESTS,
        kv_tokens: int = DEFAULT_KV_TOKENS,
        prefill_chunk_tokens: int = DEFAULT_PREFILL_CHUNK,
        threads: int | None = None,
        allow_reference: bool = False,
    ) -> Runtime:
        """Checks the checkpoint, makes the plan, then loads the weights: what cannot work fails before any weight.

        Args:
            model: folder of a checkpoint in the official layout.
            platform: a profile of ``platforms.yaml``; None takes this machine's GPU where it is recognised and every
                op has a kernel there, else the CPU (the attribute ``note`` then says why).
            dtype: ``float32``, ``bfloat16`` or ``float64``; None takes the platform's default.
            kernels: pins, kernel name by op or ``op@phase``; they come before those of ``K3PORT_KERNELS``.
            plan: a saved plan that this run must follow; one for another model, platform or version is refused.
            registry: kernels to choose from; None takes the built-in ones and installed plugins.
            profiles: platform files beside the built-in one and those of ``K3PORT_PROFILES``.
            overrides: functions by slot that replace chosen kernels (comparisons, tests).
            max_requests: requests that run at once; more wait.
            kv_tokens: size of the latent cache over all requests.
            prefill_chunk_tokens: most prompt tokens of one step.
            threads: CPU threads for both phases; None takes ``K3PORT_THREADS``, or else chooses per phase.
            allow_reference: whether ops without a built kernel may run on slow references on a GPU.

        Raises:
            K3Error: the subclass says what: ConfigError, CheckpointError, PlanError, UsageError, TokenizerError.
        """
        check_size("max_requests", max_requests)
        check_size("kv_tokens", kv_tokens)
        check_size("prefill_chunk_tokens", prefill_chunk_tokens)
        if threads is not None:
            check_size("threads", threads, MAX_THREADS)
        check_overrides(overrides)
        pins = kernels or {}
        if not isinstance(pins, Mapping):
            raise UsageError("kernels is not a mapping", hint='pin kernels as {"kda@decode": "reference.kda"}')
        prepared = prepare(
            model,
            platform=platform,
            dtype=dtype,
            pins=pins if plan is not None else merge_pins(get_settings().kernels, pins),
            saved=plan,
            registry=registry,
            profiles=profiles,
            kv_tokens=kv_tokens,
            max_requests=max_requests,
            prefill_chunk_tokens=prefill_chunk_tokens,
            allow_reference=allow_reference,
        )
        checkpoint, plan, registry = prepared.checkpoint, prepared.plan, prepared.registry
        specs = {spec.name: spec for spec in registry.kernels}
        # Bound before any weight is read: a kernel that cannot be loaded or called must not be found after 1.5 TB.
        table = bind_table(plan, specs, overrides=overrides)
        placement = open_placement(prepared.device, plan.memory.total_bytes if plan.memory else 0)
        weights = load_weights(
            checkpoint, dtype=DTYPES[plan.dtype], pack_experts=pack_function(plan, specs), placement=placement
        )
        return cls(
            checkpoint,
            weights,
            plan,
            registry,
            prepared.tokenizer,
            DTYPES[plan.dtype],
            max_requests=max_requests,
            kv_tokens=kv_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            overrides=overrides,
            threads=threads,
            table=table,
            placement=placement,
            note=prepared.note,
        )

    def close(self) -> None:
        """Gives the memory of weights, states and cache back; the runtime cannot be used afterwards.

        A runtime that :meth:`forced` made shares the weights: they go when the last of the two is closed.
        """
        if self.closed:
            return
        self.closed = True
        self.threads.restore()
        del self._engine, self.model, self.pools, self.weights
        self.placement.release()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Generation]:
        """Answers every prompt; the results come in the order of the prompts.

        Args:
            prompts: one text, one list of token ids, or a list of either. Text is plain: names of control tokens in
                it stay text.
            params: for all prompts, or one per prompt.

        Raises:
            UsageError: an empty prompt, an id outside the vocabulary, or text without a tokenizer.
            CapacityError: a prompt that is too long for the model or for the cache.
        """
        requests = self._requests(prompts, params)
        texts = ["" for _ in requests]
        ends: dict[int, tuple[FinishReason, str]] = {}
        for event in self._run(requests):
            texts[event.request] += event.text
            if event.finish_reason is not None:
                ends[event.request] = (event.finish_reason, event.error)
        return [
            Generation(
                token_ids=tuple(request.output_ids),
                text=texts[request.index],
                finish_reason=ends[request.index][0],
                prompt_tokens=len(request.prompt_ids),
                seed=request.seed,
                error=ends[request.index][1],
            )
            for request in requests
        ]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[TokenEvent]:
        """Like :meth:`generate`, token by token; closing the iterator early drops what still runs.

        Bad arguments raise here, not at the first token.
        """
        return self._run(self._requests(prompts, params))

    def logits(
        self, token_ids: Sequence[int], *, probe: Probe | None = None, chunk_tokens: int | None = None
    ) -> torch.Tensor:
        """Logits of every position of one sequence, for comparisons and scoring.

        Args:
            token_ids: the sequence.
            probe: sees intermediate values.
            chunk_tokens: prefill in chunks of this size; None: in one.

        Returns:
            float32 ``[T, vocab]`` (float64 for a float64 runtime), on the runtime's device.
        """
        self._check_open()
        prompts = as_prompts(token_ids)
        if len(prompts) != 1 or isinstance(prompts[0], str):
            raise UsageError("logits takes one list of token ids", hint="encode text with runtime.tokenizer")
        ids = self._checked_ids(prompts[0], extra=0)
        chunk = len(ids) if chunk_tokens is None else check_size("chunk_tokens", chunk_tokens)
        slot, pages = self.pools.states.allocate(), []
        try:
            pages = self.pools.pages.allocate(pages_for(len(ids)))
            start_sequence(self.overrides)
            parts = []
            for begin in range(0, len(ids), chunk):
                part = ids[begin : begin + chunk]
                segment = make_segment("prefill", [len(part)], [slot], [begin], [pages], PAGE_TOKENS)
                step, _ = self.placement.step(Step(torch.tensor(part), (segment,), torch.arange(len(part))))
                if self.placement.on_host:
                    self.threads.apply(step)
                parts.append(self.model.forward(step, self.pools.model_state, probe))
            return torch.cat(parts)
        finally:
            self.threads.restore()
            self.pools.states.release(slot)
            self.pools.pages.release(pages)

    def forced(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> Runtime:
        """This model with the router's choices replayed from ``[MoE layers, T, X]``, for one sequence."""
        self._check_open()
        overrides = {**self.overrides, "moe_route": ForcedRouting(expert_ids, weights)}
        common = (self.checkpoint, self.weights, self.plan, self.registry, self.tokenizer, self.dtype)
        return Runtime(*common, overrides=overrides, placement=self.placement, **self._limits)

    def _check_open(self) -> None:
        if self.closed:
            raise UsageError("the runtime is closed", hint="load the model again")

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        self._check_open()
        many = as_prompts(prompts)
        each = as_params(params, len(many))
        inbox: deque[Emitted] = deque()
        requests = []
        for index, (prompt, one) in enumerate(zip(many, each, strict=True)):
            ids = self._encoded(prompt) if isinstance(prompt, str) else prompt
            stop = frozenset(one.stop_ids) | (frozenset() if one.ignore_eos else self.stop_ids)
            checked = self._checked_ids(ids, extra=1)
            # The answer ends where the context does.
            room = self.max_context_tokens - len(checked)
            requests.append(Request(index, checked, one, stop, max_tokens=min(one.max_tokens, room), inbox=inbox))
        self._engine.check(requests)
        return requests

    def _encoded(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise UsageError(
                f"{self.checkpoint.folder} has no tokenizer (tiktoken.model or tokenizer.json)",
                hint="give token ids instead of text",
            )
        return self.tokenizer.encode(text)

    def _checked_ids(self, ids: Sequence[int], extra: int) -> list[int]:
        if not ids:
            raise UsageError("the prompt is empty", hint="give at least one token")
        bad = [i for i in ids if not 0 <= i < self.config.vocab_size]
        if bad:
            raise UsageError(
                f"a token id is not in 0..{self.config.vocab_size - 1}", hint="ids of another tokenizer do not fit"
            )
        if len(ids) + extra > self.max_context_tokens:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens, the limit is {self.max_context_tokens} with the answer",
                reasons=[
                    f"the model's context is {self.config.max_context_tokens} tokens",
                    f"the cache holds {self.pools.pages.num_pages * PAGE_TOKENS} tokens",
                ],
                hint="shorten the prompt, or load the model with a larger kv_tokens if its context allows",
            )
        return list(ids)

    def _run(self, requests: list[Request]) -> Generator[TokenEvent]:
        decoders = {r.index: None if self.tokenizer is None else self.tokenizer.stream_decoder() for r in requests}
        left = len(requests)
        # Queued at the first token: an iterator that is never started must leave nothing behind.
        self._engine.submit(requests)
        start_sequence(self.overrides)
        try:
            while left:
                self._check_open()
                inbox = requests[0].inbox
                if not inbox:
                    self._engine.step()
                    continue
                emitted = inbox.popleft()
                left -= emitted.finish_reason is not None
                yield self._event(emitted, decoders[emitted.request.index])
        finally:
            if not self.closed:
                self._engine.cancel(requests)
                if self._engine.idle:
                    self.threads.restore()

    def _event(self, emitted: Emitted, decoder: TextStream | None) -> TokenEvent:
        text = ""
        if decoder is not None:
            if emitted.token_id is not None and emitted.finish_reason != "stop":
                text = decoder.push(emitted.token_id)
            if emitted.finish_reason is not None:
                text += decoder.finish()
        token_id = -1 if emitted.token_id is None else emitted.token_id
        return TokenEvent(emitted.request.index, token_id, text, emitted.finish_reason, emitted.error)

    def _diagnose(self, request: Request) -> str:
        return first_bad_op(
            request,
            self.config,
            self.dims,
            self.weights.params,
            self.plan,
            self.kernels,
            self.overrides,
            self.dtype,
            self.placement,
        )


load = Runtime.load
