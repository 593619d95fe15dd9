"""Our own separate kernels as the peer of a fused one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from k3port.ops.catalog import OPS, Phase
from k3port.oracle.spec import KernelSpec
from k3port.runtime.binding import load_object
from k3port.testing.bench.workload import Args, Peer, PeerAbsent

NAME = "separate kernels"


def parts_peer(op: str, phase: Phase, kernels: Sequence[KernelSpec]) -> Peer:
    """The reference composite of an op over the best built portable kernel of each part."""

    def best(part: str) -> KernelSpec:
        wanted = phase if OPS[part].phased else None
        fitting = [
            spec
            for spec in kernels
            if spec.op == part
            and spec.name.startswith("portable.")
            and spec.is_built
            and (wanted is None or not spec.phases or wanted in spec.phases)
            # The composite has the float32 state.
            and "bfloat16" not in spec.requires.state_dtypes
        ]
        if not fitting:
            raise PeerAbsent(f"no portable kernel of {part} is built")
        return max(fitting, key=lambda spec: spec.priority)

    def prepare(args: Args) -> Callable[[], Any]:
        parts = {part: load_object(best(part).load) for part in OPS[op].parts}
        function = load_object(_composite(op, phase, kernels).load)(**parts)
        return lambda: function(**args)

    def note() -> str:
        return ", ".join(best(part).name for part in OPS[op].parts)

    return Peer(NAME, prepare, note=note)


def _composite(op: str, phase: Phase, kernels: Sequence[KernelSpec]) -> KernelSpec:
    fitting = (s for s in kernels if s.op == op and s.is_reference and s.parts and (not s.phases or phase in s.phases))
    found = next(fitting, None)
    if found is None:
        raise PeerAbsent(f"{op} has no composite")
    return found
