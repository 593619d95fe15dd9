"""What is asked for and what comes back: sampling parameters, requests, events and results."""

from __future__ import annotations

import math
import random
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from k3port.errors import UsageError

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses its tokens and when it ends.

    Attributes:
        max_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches p; 1 keeps all.
        min_p: drop tokens below this share of the most probable one; 0 keeps all.
        seed: one seed gives one continuation, alone or in any batch. None draws one.
        stop_ids: token ids that end the request, beside those of the checkpoint.
        ignore_eos: do not end at the checkpoint's stop ids (for measurements).

    Raises:
        UsageError: a value outside its range; all faults together.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        faults = [
            f"{name} = {_shown(value)}: {expected}"
            for name, value, good, expected in (
                ("max_tokens", self.max_tokens, _whole(self.max_tokens, 1), "a whole number of at least 1"),
                ("temperature", self.temperature, _number(self.temperature, 0), "a finite number of at least 0"),
                ("top_k", self.top_k, _whole(self.top_k, 0), "a whole number of at least 0 (0 keeps all tokens)"),
                ("top_p", self.top_p, _number(self.top_p, 0, 1) and self.top_p > 0, "above 0, at most 1"),
                ("min_p", self.min_p, _number(self.min_p, 0, 1), "between 0 and 1"),
                ("seed", self.seed, self.seed is None or _whole(self.seed, 0), "a whole number of at least 0, or None"),
            )
            if not good
        ]
        if isinstance(self.stop_ids, str | bytes) or not all(_whole(i, 0) for i in _iterated(self.stop_ids)):
            faults.append("stop_ids: whole numbers of at least 0")
        if faults:
            raise UsageError(
                "sampling parameters out of range", reasons=faults, hint="help(k3port.SamplingParams) lists the ranges"
            )


_MAX_WHOLE = 2**63 - 1
"""What a tensor of int64 holds."""


def _whole(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= _MAX_WHOLE


def _number(value: object, minimum: float, maximum: float = math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 and minimum <= value <= maximum


def _iterated(value: object) -> tuple[object, ...]:
    return tuple(value) if isinstance(value, Iterable) else (None,)


def _shown(value: object) -> str:
    return "a huge number" if isinstance(value, int) and abs(value) > _MAX_WHOLE else repr(value)


GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class TokenEvent:
    """One generated token of one request; ``text`` is what became readable with it (may be empty)."""

    request: int
    token_id: int
    text: str
    finish_reason: FinishReason | None = None
    error: str = ""


@dataclass(frozen=True)
class Generation:
    """The whole answer to one prompt.

    ``token_ids`` does not contain the stop id. ``error`` says what went wrong when ``finish_reason`` is ``error``.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    error: str = ""


@dataclass(frozen=True)
class Emitted:
    """A token that a request got in a step, or its end. ``token_id`` is None when the request failed."""

    request: Request
    token_id: int | None
    finish_reason: FinishReason | None
    error: str = ""


@dataclass(eq=False)
class Request:
    """A request on its way through the engine."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_tokens: int
    """At most ``params.max_tokens``; less where the context ends before."""
    seed: int = 0
    slot: int = 0
    pages: list[int] = field(default_factory=list)
    num_cached: int = 0
    """Tokens whose keys, values and states are in the pools."""
    output_ids: list[int] = field(default_factory=list)
    inbox: deque[Emitted] = field(default_factory=deque)
    """Where its tokens go: shared by the requests of one call, so that calls that are open together stay apart."""
    prefill_chunks: list[int] = field(default_factory=list)
    """Sizes of the prefill steps so far: what a replay has to repeat."""

    def __post_init__(self) -> None:
        self.seed = secrets.randbits(32) if self.params.seed is None else self.params.seed
        self._random = random.Random(self.seed)

    @property
    def capacity_tokens(self) -> int:
        """Most cache rows that the request can need: the last generated token is never fed back."""
        return len(self.prompt_ids) + self.max_tokens - 1

    @property
    def in_prefill(self) -> bool:
        return self.num_cached < len(self.prompt_ids)

    def next_uniform(self) -> float:
        """The random number of the next token. Greedy requests draw too, so that a seed means one sequence."""
        return self._random.random()
