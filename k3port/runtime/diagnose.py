"""The search for the op that first gave values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from k3port.model.config import ModelConfig
from k3port.model.k3 import K3Model
from k3port.model.shapes import RankDims
from k3port.model.step import Step
from k3port.ops.catalog import PHASES
from k3port.ops.segment import make_segment
from k3port.oracle.spec import KernelSpec, Plan
from k3port.runtime.binding import Op, bind_table
from k3port.runtime.compare import FirstBadOpError, LayerCounter, check_finite, start_sequence
from k3port.runtime.placement import Placement
from k3port.runtime.pools import PAGE_TOKENS, Pools
from k3port.runtime.request import Request


def first_bad_op(
    request: Request,
    config: ModelConfig,
    dims: RankDims,
    params: Mapping[str, object],
    plan: Plan,
    kernels: Mapping[str, KernelSpec],
    overrides: Mapping[str, Op],
    dtype: torch.dtype,
    placement: Placement,
) -> str:
    """Repeats a request with every op's result checked, and says in one sentence which was the first to fail.

    The repeat has memory of its own and takes the same steps (prefill chunks, then single tokens), since a fault may
    live in one phase only.
    """
    table = bind_table(plan, kernels, overrides=overrides, wrap=check_finite)
    model = K3Model(config, params, table)
    pools = Pools(
        config,
        dims,
        num_requests=1,
        num_tokens=max(request.capacity_tokens, 1),
        dtype=dtype,
        device=placement.device,
    )
    slot, pages = pools.states.allocate(), pools.pages.allocate(pools.pages.num_pages)
    ids = [*request.prompt_ids, *request.output_ids]
    lengths = [*request.prefill_chunks, *([1] * len(request.output_ids))]
    context = 0
    start_sequence(overrides)
    for i, length in enumerate(lengths):
        phase = PHASES[0] if i < len(request.prefill_chunks) else PHASES[1]
        counter = LayerCounter()
        segment = make_segment(phase, [length], [slot], [context], [pages], PAGE_TOKENS)
        step = Step(torch.tensor(ids[context : context + length]), (segment,), torch.tensor([length - 1]))
        step, _ = placement.step(step)
        context += length
        try:
            model.forward(step, pools.model_state, counter)
        except FirstBadOpError as bad:
            kernel = next((s.kernel for s in plan.selections if s.slot == bad.slot), bad.slot)
            where = "after the last layer" if counter.after_layers else f"in layer {counter.layer}"
            return f"values that are not finite: first in op {bad.slot} ({kernel}) {where}, {phase} of token {context}"
    return "logits that are not finite; a repeat of the request alone gave finite ones"
