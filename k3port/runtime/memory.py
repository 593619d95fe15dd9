"""Memory of one rank, before anything is loaded: bytes by kind with their arithmetic, limits, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from k3port.model.config import ModelConfig
from k3port.oracle.spec import MemoryItem, MemoryPlan
from k3port.runtime.groups import Group, candidate_groups
from k3port.runtime.terms import PAGE_TOKENS, Chosen, Serving, Storage, Term, gib, local_load, rank_terms

MAX_GROUP = 128
"""Largest group that advice looks for."""


def plan_memory(
    config: ModelConfig,
    group: Group,
    serving: Serving,
    storage: Storage,
    *,
    device_bytes: int,
    usable_share: float = 1.0,
    gpus_per_node: int = 1,
    chosen: Chosen = (),
    vision: int = 0,
) -> MemoryPlan:
    """Bytes per rank by kind, what fits, and advice where it does not.

    Args:
        device_bytes: memory of one device; 0 where unknown, which compares nothing.
        usable_share: the part of it that the driver, libraries and fragmentation leave. What is counted below as a
            kind of its own (graphs, workspaces, activations) is not taken off here a second time.
        chosen: kernels whose padding and workspaces count.
        vision: bytes of the vision tower where it is loaded.

    Raises:
        ConfigError: the model cannot be split this way.
    """
    terms = rank_terms(config, group, serving, storage, chosen, vision)
    requests, tokens = local_load(group, serving)
    items = _items(terms, requests, tokens)
    total = sum(item.bytes for item in items)
    capacity = int(device_bytes * usable_share)
    if not device_bytes:
        advice = "the memory of one device is not known: nothing was compared"
        return MemoryPlan(items, 0, True, config.max_context_tokens, serving.concurrency, advice)
    context, concurrency = _limits(config, group, serving, terms, capacity)
    if total <= capacity:
        return MemoryPlan(items, capacity, True, context, concurrency)
    advice = [_shortfall(group, terms, items, capacity)]
    if context:
        advice.append(f"{serving.concurrency} requests of {context} tokens fit here")
    if concurrency:
        advice.append(f"{concurrency} requests of {serving.context_tokens} tokens fit here")

    def used_by(other: Group) -> int:
        rank = rank_terms(config, other, serving, storage, chosen, vision)
        return sum(item.bytes for item in _items(rank, *local_load(other, serving)))

    advice.append(_smallest_groups(config, used_by, capacity, gpus_per_node, mxfp4=storage.mxfp4))
    return MemoryPlan(items, capacity, False, context, concurrency, "; ".join(advice))


def _limits(
    config: ModelConfig, group: Group, serving: Serving, terms: Sequence[Term], capacity: int
) -> tuple[int, int]:
    """Longest context for the asked requests, and most requests of the asked context."""
    fixed, per_request = sum(t.fixed for t in terms), sum(t.per_request for t in terms)
    per_token = sum(t.per_token for t in terms)
    requests, tokens = local_load(group, serving)
    room = capacity - fixed - requests * per_request
    context = 0
    if room >= 0:
        longest = (
            room // (requests * per_token) // PAGE_TOKENS * PAGE_TOKENS if per_token else config.max_context_tokens
        )
        context = min(config.max_context_tokens, longest)
    each = per_request + tokens * per_token
    return context, max(0, (capacity - fixed) // each if each else serving.concurrency) * group.attention_groups


_WEIGHTS = ("dense weights", "float32 weights", "routed experts", "vision")


def _shortfall(group: Group, terms: Sequence[Term], items: Sequence[MemoryItem], capacity: int) -> str:
    weights = sum(term.fixed for term in terms if term.kind in _WEIGHTS)
    total = sum(item.bytes for item in items)
    if weights > capacity:
        return (
            f"weights of {gib(weights)} per rank exceed the usable {gib(capacity)}: {group.gpus} x {gib(weights)} = "
            f"{gib(group.gpus * weights)} > {group.gpus} x {gib(capacity)} = {gib(group.gpus * capacity)}"
        )
    return f"{gib(total)} per rank exceed the usable {gib(capacity)} by {gib(total - capacity)}"


def _smallest_groups(
    config: ModelConfig, used_by: Callable[[Group], int], capacity: int, gpus_per_node: int, *, mxfp4: bool
) -> str:
    """The smallest number of devices that holds the model, with one arrangement of each kind."""
    found: dict[tuple[bool, bool], tuple[Group, int]] = {}
    gpus = 0
    for group in candidate_groups(config, gpus_per_node, MAX_GROUP, mxfp4=mxfp4):
        if found and group.gpus > gpus:
            break
        kind = (group.ep > 1, group.pp > 1)
        if kind not in found and (used := used_by(group)) <= capacity:
            found[kind], gpus = (group, used), group.gpus
    if not found:
        return f"no group of up to {MAX_GROUP} devices holds it"
    nodes = -(-gpus // gpus_per_node)
    plain_first = sorted(found)
    if len(found) > 1:
        plain_first = [kind for kind in plain_first if kind != (True, True)]
    listing = ", ".join(f"{found[k][0]} ({gib(found[k][1])} of {gib(capacity)} per rank)" for k in plain_first)
    return f"smallest group that fits: {gpus} devices on {nodes} {'nodes' if nodes > 1 else 'node'}: {listing}"


def _items(terms: Iterable[Term], requests: int, tokens: int) -> tuple[MemoryItem, ...]:
    items = []
    for term in terms:
        size = term.fixed + requests * term.per_request + requests * tokens * term.per_token
        if size:
            text = term.arithmetic.replace("{requests}", str(requests)).replace("{tokens}", str(tokens))
            items.append(MemoryItem(term.kind, size, text))
    return tuple(items)
