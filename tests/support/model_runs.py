"""Running one sequence through a loaded model with everything kept that comparisons need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from builtin_kernels import REGISTRY, reference_pins

from k3port.model.config_file import load_config
from k3port.model.k3 import K3Model
from k3port.model.step import Step
from k3port.ops.contract import relative_rms
from k3port.ops.moe import RouterParams
from k3port.ops.segment import make_segment
from k3port.runtime.binding import bind_table
from k3port.runtime.compare import Recorder
from k3port.runtime.pools import PAGE_TOKENS, Pools, pages_for
from k3port.runtime.runtime import Runtime

REFERENCE, DEFAULT = "reference", "cpu"


def load_runtime(folder: Path, dtype: str = "float32", plan: str = DEFAULT, **options: Any) -> Runtime:
    """A runtime of the default CPU plan, or of references only; one thread, a small cache."""
    pins = reference_pins(load_config(folder)) if plan == REFERENCE else None
    options = {"kv_tokens": 2048, "threads": 1, "registry": REGISTRY, **options}
    return Runtime.load(folder, dtype=dtype, kernels=pins, **options)


@cache
def cached_runtime(folder: Path, dtype: str = "float32", plan: str = DEFAULT) -> Runtime:
    """One runtime per session: tests must not change it."""
    return load_runtime(folder, dtype, plan)


@dataclass(frozen=True)
class Run:
    """Everything of one sequence: ``logits`` ``[T, V]``, sublayer outputs and running sums by layer, states, cache."""

    logits: torch.Tensor
    attention: list[torch.Tensor]
    mlp: list[torch.Tensor]
    residuals: list[torch.Tensor]
    mix: torch.Tensor
    conv: dict[int, torch.Tensor]
    """``[W-1, 3P]`` by KDA layer."""
    recurrent: dict[int, torch.Tensor]
    """``[H, V, K]`` by KDA layer."""
    cache: dict[int, torch.Tensor]
    """``[T, C + R]`` by MLA layer."""
    routing: list[tuple[torch.Tensor, torch.Tensor]]
    """Expert ids and weights of every call of the router: by MoE layer, step after step."""


def run(runtime: Runtime, ids: Sequence[int], chunks: Sequence[int] | None = None) -> Run:
    """One sequence in steps of the given sizes (default: one step); a step of one token after the first is a decode."""
    config, ids = runtime.config, list(ids)
    recorder, routing, route = Recorder(), [], runtime.table.moe_route

    def watched(h: torch.Tensor, router: RouterParams) -> tuple[torch.Tensor, torch.Tensor]:
        routing.append(route(h, router))
        return routing[-1]

    overrides = {**runtime.overrides, "moe_route": watched}
    model = K3Model(config, runtime.weights.params, bind_table(runtime.plan, runtime.kernels, overrides=overrides))
    pools = Pools(config, runtime.dims, num_requests=2, num_tokens=len(ids) + PAGE_TOKENS, dtype=runtime.dtype)
    pools.states.allocate()
    # Not the first pages, and not in order.
    slot, pages = pools.states.allocate(), pools.pages.allocate(pages_for(len(ids)) + 1)[:0:-1]
    parts, done = [], 0
    for length in chunks or [len(ids)]:
        phase = "decode" if length == 1 and done else "prefill"
        segment = make_segment(phase, [length], [slot], [done], [pages], PAGE_TOKENS)
        step = Step(torch.tensor(ids[done : done + length]), (segment,), torch.arange(length))
        parts.append(model.forward(step, pools.model_state, recorder))
        done += length
    assert done == len(ids)

    def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tensors)

    layers = range(config.num_layers)
    return Run(
        logits=joined(parts),
        attention=[joined(recorder.sublayers["attention", i]) for i in layers],
        mlp=[joined(recorder.sublayers["mlp", i]) for i in layers],
        residuals=[joined(recorder.residuals[i]) for i in layers],
        mix=joined(recorder.mix),
        conv={i: state.conv[slot] for i, state in pools.states.layers.items()},
        recurrent={i: state.recurrent[slot] for i, state in pools.states.layers.items()},
        cache={i: pool[pages].flatten(0, 1)[: len(ids)] for i, pool in pools.pages.layers.items()},
        routing=routing,
    )


def routed_error(runtime: Runtime, ids: Sequence[int], exact: Run) -> float:
    """Relative RMS of the logits against those of another run, with that run's experts: a router's near tie that falls
    the other way in a shorter type is no error of a kernel."""
    if not exact.routing:
        return relative_rms(runtime.logits(ids).cpu(), exact.logits)
    experts, weights = (torch.stack(list(part)) for part in zip(*exact.routing, strict=True))
    forced = runtime.forced(experts, weights)
    return relative_rms(forced.logits(ids).cpu(), exact.logits)
