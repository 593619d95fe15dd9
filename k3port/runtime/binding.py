"""From a plan to the table of functions: the only place where kernel modules are imported."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from k3port.errors import PlanError
from k3port.ops.catalog import OPS, slot_name
from k3port.ops.table import OpTable
from k3port.oracle.spec import KernelSpec, Plan, Selection

Op = Callable[..., Any]


def load_object(path: str) -> Any:
    """``module:attribute`` to the object.

    Raises:
        PlanError: the module cannot be imported or lacks the attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise PlanError(
            f"kernel {path} cannot be loaded", reasons=[f"{type(exc).__name__}: {exc}"], hint="pin another kernel"
        ) from exc


def bind_table(
    plan: Plan,
    kernels: Mapping[str, KernelSpec],
    *,
    overrides: Mapping[str, Op] | None = None,
    wrap: Callable[[str, Op], Op] | None = None,
) -> OpTable:
    """Imports the chosen kernels and binds them; composites get their parts here, once.

    Args:
        kernels: specs by name; at least those that the plan chose.
        overrides: functions that replace the chosen kernel of a slot, inside composites too (forced routing, tests).
        wrap: called with every slot and its function; what it returns is bound (checks of intermediate values).

    Raises:
        PlanError: a chosen kernel cannot be loaded.
    """
    overrides = overrides or {}
    functions: dict[str, Op] = {}

    def bind(selection: Selection) -> Op:
        slot = selection.slot
        if slot in functions:
            return functions[slot]
        spec = kernels[selection.kernel]
        function = overrides.get(slot)
        if function is None:
            function = load_object(spec.load)
            if spec.parts:
                slots = {part: slot_name(part, selection.phase if OPS[part].phased else None) for part in spec.parts}
                function = function(**{part: bind(selections[name]) for part, name in slots.items()})
        functions[slot] = wrap(slot, function) if wrap is not None else function
        return functions[slot]

    selections = {selection.slot: selection for selection in plan.selections}
    for selection in plan.selections:
        if selection.kernel:
            bind(selection)
    return OpTable(functions)


def pack_function(plan: Plan, kernels: Mapping[str, KernelSpec]) -> Op:
    """How the chosen expert kernel wants its weights: called with the stored experts and the compute dtype."""
    for op in ("moe", "moe_experts"):
        for selection in plan.selections:
            if selection.op == op and selection.kernel and kernels[selection.kernel].pack:
                return load_object(kernels[selection.kernel].pack)
    return load_object("k3port.ops.moe_weights:keep_stored")
