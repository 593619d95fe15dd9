"""Pins: kernels that people asked for by name. A pin is kept or the plan fails."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from k3port.errors import UsageError
from k3port.oracle.spec import KernelSpec, OpQuery


def expand_pins(
    pins: Mapping[str, str], queries: Sequence[OpQuery], by_op: Mapping[str, list[KernelSpec]]
) -> dict[str, str]:
    """Pins by slot. A pin of one phase beats a pin of the whole op, whichever was given first.

    Raises:
        UsageError: an op that the model does not have, or a kernel that the op does not have; names the nearest.
    """
    slots = {query.slot: query.op for query in queries}
    ops = {query.op for query in queries}
    result: dict[str, str] = {}
    for wanted, kernel in pins.items():
        target = wanted.replace("@", "_")
        matching = [slot for slot, op in slots.items() if target in (slot, op)]
        if not matching:
            near = difflib.get_close_matches(target, [*slots, *ops], n=1)
            hint = f"did you mean {near[0]}?" if near else f"ops: {', '.join(sorted(ops))}"
            raise UsageError(f"pinned op {wanted!r} is not an op of this model", hint=hint)
        names = sorted(spec.name for spec in by_op.get(slots[matching[0]], []))
        if kernel not in names:
            near = difflib.get_close_matches(kernel, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"kernels of {slots[matching[0]]}: {', '.join(names)}"
            raise UsageError(f"no kernel {kernel!r} for op {wanted}", hint=hint)
        for slot in matching:
            if target == slot or slot not in result:
                result[slot] = kernel
    return result
