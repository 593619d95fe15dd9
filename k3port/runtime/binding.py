"""From a plan to the table of functions: the only place where kernel modules are imported."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from k3port.errors import PlanError
from k3port.ops.catalog import OPS, Phase, slot_name
from k3port.ops.table import OpTable
from k3port.oracle.spec import KernelSpec, Plan, Selection

Op = Callable[..., Any]


def load_object(path: str) -> Any:
    """``module:attribute`` to the object.

    Raises:
        PlanError: the module cannot be imported, whatever it raised, or lacks the attribute.
    """
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    # Kernels are code of others: a syntax error or an exit in their module is a fault of the kernel, not of this one.
    except (Exception, SystemExit) as exc:
        reason = f"{module}: {_sentence(exc)}"
        raise PlanError(f"kernel {path} cannot be loaded", reasons=[reason], hint="pin another kernel") from exc


def load_kernel(spec: KernelSpec, path: str = "") -> Op:
    """The function of a kernel.

    Args:
        path: another function of the kernel, such as the one that packs its weights.

    Raises:
        PlanError: it cannot be loaded, or is no function; names the kernel, the module and what went wrong.
    """
    path = path or spec.load
    try:
        function = load_object(path)
    except PlanError as exc:
        raise _failed(spec, "cannot be loaded", exc.reasons) from exc
    if not callable(function):
        kind = type(function).__name__
        raise _failed(spec, "cannot be loaded", [f"{path.replace(':', '.')} is of type {kind}, which cannot be called"])
    return function


def _failed(spec: KernelSpec, what: str, reasons: Iterable[str]) -> PlanError:
    hint = f"correct or install it, or leave it out: K3PORT_DISABLE={spec.name}"
    return PlanError(f"kernel {spec.name} of {spec.op} {what}", reasons=reasons, hint=hint)


def _sentence(exc: BaseException) -> str:
    """What was raised, and where: the last line of a file that was running, which a syntax error says itself."""
    ran = [
        f for f in traceback.extract_tb(exc.__traceback__) if not f.filename.startswith("<") and f.filename != __file__
    ]
    where = f" ({ran[-1].filename}, line {ran[-1].lineno})" if ran and not isinstance(exc, SyntaxError) else ""
    return " ".join(f"{type(exc).__name__}: {exc}{where}".split())


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
    windows: dict[str, list[Selection]] = {}
    for selection in plan.selections:
        if selection.kernel:
            windows.setdefault(selection.slot, []).append(selection)

    def bind(slot: str) -> Op:
        if slot not in functions:
            if slot not in windows:
                raise PlanError(f"the plan has no kernel for {slot}, which a chosen kernel calls")
            function = overrides.get(slot) or _by_tokens([(s.tokens[1], load(s)) for s in windows[slot]])
            functions[slot] = wrap(slot, function) if wrap is not None else function
        return functions[slot]

    def load(selection: Selection) -> Op:
        spec = kernels[selection.kernel]
        function = load_kernel(spec)
        if spec.parts:
            slots = {part: slot_name(part, selection.phase if OPS[part].phased else None) for part in spec.parts}
            function = _called(spec, function, {part: bind(slot) for part, slot in slots.items()})
        _check_signature(spec, selection.phase, function)
        return function

    for slot in windows:
        bind(slot)
    return OpTable(functions)


def _called(spec: KernelSpec, factory: Op, parts: Mapping[str, Op]) -> Op:
    try:
        function = factory(**parts)
    except (Exception, SystemExit) as exc:
        raise _failed(spec, f"does not take its parts {', '.join(parts)}", [_sentence(exc)]) from exc
    if not callable(function):
        reasons = [f"{spec.load} gave {type(function).__name__}, which cannot be called"]
        raise _failed(spec, f"makes no function of its parts {', '.join(parts)}", reasons)
    return function


def _check_signature(spec: KernelSpec, phase: Phase | None, function: Op) -> None:
    """Whether the function takes the arguments of its op's contract: found out here, not in the first step.

    Raises:
        PlanError: it does not.
    """
    contracts = [load_object(path) for path in OPS[spec.op].contracts]
    contract = next((c for c in contracts if c.phase in (None, phase)), None)
    try:
        signature = inspect.signature(function)
    except Exception:
        return  # a function of an extension module need not tell
    if contract is None:
        return
    try:
        signature.bind(*contract.inputs)
    except TypeError as exc:
        raise PlanError(
            f"kernel {spec.name} ({spec.load}) does not take the arguments of {spec.op}",
            reasons=[f"the op passes {', '.join(contract.inputs)}", f"the kernel takes {signature}: {exc}"],
            hint=f"correct the kernel, or leave it out: K3PORT_DISABLE={spec.name}",
        ) from exc


def _by_tokens(windows: list[tuple[int | None, Op]]) -> Op:
    """One function for all windows, by the number of rows of the first argument. A single window costs nothing."""
    if len(windows) == 1:
        return windows[0][1]

    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = x.shape[0]
        for last, function in windows:
            if last is None or tokens <= last:
                return function(x, *args, **kwargs)
        raise PlanError(f"no kernel was planned for a step of {tokens} tokens", hint="plan with a larger token range")

    return call


def pack_function(plan: Plan, kernels: Mapping[str, KernelSpec]) -> Op:
    """How the chosen expert kernel wants its weights: called with the stored experts and the compute dtype."""
    for op in ("moe", "moe_experts"):
        for selection in plan.selections:
            if selection.op == op and selection.kernel and kernels[selection.kernel].pack:
                spec = kernels[selection.kernel]
                return load_kernel(spec, spec.pack)
    return load_object("k3port.ops.moe_weights:keep_stored")
