"""From queries, kernels and a device to a plan: a pure function, no imports of kernels, no environment."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from k3port.errors import PlanError, UsageError
from k3port.ops.catalog import OPS, slot_name
from k3port.oracle.spec import Device, KernelSpec, OpQuery, Plan, Rejection, Selection


def reject(spec: KernelSpec, query: OpQuery, device: Device) -> Rejection | None:
    """The first reason why ``spec`` cannot serve ``query`` on ``device``, or None."""
    req = spec.requires
    if spec.phases and query.phase not in spec.phases:
        return Rejection(spec.name, "PHASE", f"serves {', '.join(spec.phases)}, not {query.phase}")
    if req.vendors and device.vendor not in req.vendors:
        return Rejection(spec.name, "VENDOR", f"needs {' or '.join(req.vendors)}, the device is {device.vendor}")
    if req.archs and device.arch not in req.archs:
        return Rejection(spec.name, "ARCH", f"needs {' or '.join(req.archs)}, the device is {device.arch}")
    if req.dtypes and query.dtype not in req.dtypes:
        return Rejection(spec.name, "DTYPE", f"needs {' or '.join(req.dtypes)} activations, asked for {query.dtype}")
    if req.weight_formats and query.weight_format and query.weight_format not in req.weight_formats:
        detail = f"reads {' or '.join(req.weight_formats)} weights, the checkpoint has {query.weight_format}"
        return Rejection(spec.name, "WEIGHT_FORMAT", detail)
    if req.max_tp is not None and query.tp > req.max_tp:
        return Rejection(spec.name, "AXIS", f"serves up to {req.max_tp} ranks, asked for {query.tp}")
    reason = spec.check(query, device) if spec.check is not None else None
    return None if reason is None else Rejection(spec.name, "AXIS", reason)


def resolve(
    queries: Sequence[OpQuery],
    specs: Iterable[KernelSpec],
    device: Device,
    *,
    platform: str,
    pins: Mapping[str, str] | None = None,
) -> Plan:
    """Chooses one kernel per slot so that all chosen kernels agree on every shared layout.

    Kernels are tried by falling priority, coarse ops before the fine ops they are made of, decode before prefill; the
    first combination without a layout conflict wins.

    Args:
        queries: the slots that the model has, fine ops of composites marked ``direct=False``.
        pins: kernel name by slot (``kda_decode``) or op (``kda``: all its phases). A pin is kept or the plan fails.

    Raises:
        UsageError: a pin names an unknown op or kernel.
        PlanError: a slot has no kernel, a pin cannot be kept, or no combination agrees on layouts.
    """
    by_op: dict[str, list[KernelSpec]] = {}
    for spec in sorted(specs, key=lambda s: (-s.priority, s.name)):
        by_op.setdefault(spec.op, []).append(spec)
    pinned = _expand_pins(pins or {}, queries, by_op)
    candidates: dict[str, list[KernelSpec]] = {}
    rejected: dict[str, list[Rejection]] = {}
    for query in queries:
        accepted, refused = _accept(query, by_op.get(query.op, []), device, pinned.get(query.slot))
        candidates[query.slot], rejected[query.slot] = accepted, refused
    # Coarse before fine, then decode before prefill: the decode kernel's rank decides where layouts conflict.
    order = sorted(queries, key=lambda q: (not OPS[q.op].parts, q.phase != "decode"))
    chosen = _search(order, candidates, {}, {}, frozenset(q.slot for q in queries if q.direct))
    if chosen is None:
        raise _no_plan(order, candidates, rejected, platform)
    dtype, tp = (queries[0].dtype, queries[0].tp) if queries else ("", 1)
    selections = tuple(_selection(q, chosen, candidates[q.slot], rejected[q.slot], pinned) for q in queries)
    return Plan(platform=platform, device=device, dtype=dtype, tp=tp, selections=selections)


def _accept(
    query: OpQuery, specs: list[KernelSpec], device: Device, pin: str | None
) -> tuple[list[KernelSpec], list[Rejection]]:
    accepted: list[KernelSpec] = []
    refused: list[Rejection] = []
    for spec in specs:
        rejection = reject(spec, query, device)
        if rejection is None and pin is not None and spec.name != pin:
            rejection = Rejection(spec.name, "NOT_PINNED", f"{pin} is pinned")
        if rejection is None:
            accepted.append(spec)
        else:
            refused.append(rejection)
    return accepted, refused


def _search(
    order: Sequence[OpQuery],
    candidates: Mapping[str, list[KernelSpec]],
    chosen: dict[str, KernelSpec | None],
    layouts: dict[str, str],
    needed: frozenset[str],
) -> dict[str, KernelSpec | None] | None:
    """Depth-first over the slots; None as a choice means that nothing calls the slot."""
    if len(chosen) == len(order):
        return chosen
    query = order[len(chosen)]
    if query.slot not in needed:
        return _search(order, candidates, {**chosen, query.slot: None}, layouts, needed)
    for spec in candidates[query.slot]:
        if any(layouts.get(key, tag) != tag for key, tag in spec.layouts.items()):
            continue
        parts = {slot_name(part, query.phase if OPS[part].phased else None) for part in spec.parts}
        found = _search(order, candidates, {**chosen, query.slot: spec}, {**layouts, **spec.layouts}, needed | parts)
        if found is not None:
            return found
    return None


def _selection(
    query: OpQuery,
    chosen: Mapping[str, KernelSpec | None],
    accepted: list[KernelSpec],
    rejected: list[Rejection],
    pinned: Mapping[str, str],
) -> Selection:
    names = tuple(spec.name for spec in accepted)
    spec = chosen[query.slot]
    if spec is None:
        cover = next((c.name for c in chosen.values() if c is not None and query.op in c.covers), None)
        reason = f"covered by {cover}" if cover else "no chosen kernel calls it"
        extra = [Rejection(name, "COVERED", reason) for name in names]
        return Selection(query.op, query.phase, "", reason, names, (*rejected, *extra))
    layouts = {key: tag for c in chosen.values() if c is not None for key, tag in c.layouts.items()}
    extra = []
    for other in accepted:
        clash = [f"{k}={t}, the plan has {layouts[k]}" for k, t in other.layouts.items() if layouts.get(k, t) != t]
        if clash:
            extra.append(Rejection(other.name, "LAYOUT", "; ".join(clash)))
        elif other is not spec:
            extra.append(Rejection(other.name, "OUTRANKED", f"priority {other.priority}, chosen {spec.priority}"))
    if query.slot in pinned:
        reason = "pinned"
    elif len(accepted) == 1:
        reason = "the only kernel that fits"
    else:
        reason = f"highest priority ({spec.priority}) of {len(accepted)} that fit"
    return Selection(query.op, query.phase, spec.name, reason, names, (*rejected, *extra), dict(spec.layouts))


def _expand_pins(
    pins: Mapping[str, str], queries: Sequence[OpQuery], by_op: Mapping[str, list[KernelSpec]]
) -> dict[str, str]:
    slots = {query.slot: query.op for query in queries}
    ops = {query.op for query in queries}
    result: dict[str, str] = {}
    for target, kernel in pins.items():
        target = target.replace("@", "_")
        matching = [slot for slot, op in slots.items() if target in (slot, op)]
        if not matching:
            near = difflib.get_close_matches(target, [*slots, *ops], n=1)
            hint = f"did you mean {near[0]}?" if near else f"ops: {', '.join(sorted(ops))}"
            raise UsageError(f"pinned op {target!r} is not an op of this model", hint=hint)
        names = [spec.name for spec in by_op.get(slots[matching[0]], [])]
        if kernel not in names:
            near = difflib.get_close_matches(kernel, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"kernels of {slots[matching[0]]}: {', '.join(names)}"
            raise UsageError(f"no kernel {kernel!r} for op {target}", hint=hint)
        for slot in matching:
            # A pin of one phase beats a pin of the whole op, whichever was given first.
            if target == slot or slot not in result:
                result[slot] = kernel
    return result


def _no_plan(
    order: Sequence[OpQuery],
    candidates: Mapping[str, list[KernelSpec]],
    rejected: Mapping[str, list[Rejection]],
    platform: str,
) -> PlanError:
    reasons: list[str] = []
    for query in order:
        if query.direct and not candidates[query.slot]:
            tried = [f"{query.slot}: {r.kernel}: {r.code} {r.detail}" for r in rejected[query.slot]]
            reasons += tried or [f"{query.slot}: no kernel is registered"]
    if not reasons:
        for query in order:
            tags = [f"{spec.name} {dict(spec.layouts)}" for spec in candidates[query.slot] if spec.layouts]
            reasons += [f"{query.slot}: {tag}" for tag in tags]
        return PlanError(
            f"no combination of kernels on {platform} agrees on layouts or fills every part",
            reasons=reasons,
            hint="remove a pin",
        )
    return PlanError(
        f"no kernel fits on {platform}", reasons=reasons, hint="choose another platform or dtype, or remove a pin"
    )
