"""fla-core's decode kernel on the data of the bench, of steps and of drafts, in Triton's interpreter; a process of its
own, prints its largest error."""

from __future__ import annotations

import torch

from k3port.testing.bench.gate import peer_error
from k3port.testing.bench.peers.fla import step_peer
from k3port.testing.bench.suite import make_args
from k3port.testing.bench.workloads import kda_core

errors = []
for tokens in (3, 12):
    args = make_args(kda_core.case("decode", 3, tokens, 2, dim=32), torch.device("cpu"))
    # The interpreter multiplies bfloat16 wrongly.
    args = {
        name: value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value
        for name, value in args.items()
    }
    errors.append(peer_error(step_peer().prepare(args), kda_core.core_answer(args)))
# NaN, which max would lose, stands for results of another size.
print(max(errors) if all(error == error for error in errors) else float("nan"))
