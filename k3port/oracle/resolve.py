"""From queries, kernels and a target to choices: a pure function, no imports of kernels, no environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from k3port.errors import PlanError
from k3port.ops.catalog import OPS, slot_name
from k3port.oracle.pins import expand_pins
from k3port.oracle.predicates import ask_record, is_own_fault, reject, served
from k3port.oracle.spec import ALL_TOKENS, GAP, KernelSpec, OpQuery, Plan, Rejection, Selection, Target, Tokens

# Where layouts conflict the decode kernel decides, then the prefill kernel. Fine ops without a phase come last: only
# then is it known which composites need them.
_PHASE_ORDER = {"decode": 0, "prefill": 1, None: 2}


@dataclass(frozen=True)
class _Cell:
    """One slot in one token window, with the kernels that could fill it, best first."""

    query: OpQuery
    accepted: tuple[KernelSpec, ...]
    rejected: tuple[Rejection, ...]


def resolve(
    queries: Sequence[OpQuery],
    specs: Iterable[KernelSpec],
    target: Target,
    *,
    pins: Mapping[str, str] | None = None,
    allow_gaps: bool = False,
) -> Plan:
    """Chooses one kernel per slot and token window so that all chosen kernels agree on every shared layout.

    Kernels are ranked by the target's preferences, then by priority; the first combination without a layout conflict
    wins, the decode kernels' ranks counting first. The plan answers twice: with the kernels that are built, and with
    all declared ones (``would_run``).

    Args:
        queries: the slots that the model has, fine ops of composites marked ``direct=False``.
        pins: kernel name by slot (``kda_decode`` or ``kda@decode``) or op (``kda``: all its phases). A pin is kept
            wherever the kernel's token window reaches, or the plan fails.
        allow_gaps: a slot that no kernel fits stays empty (:data:`~k3port.oracle.spec.GAP`) instead of failing the
            plan: for questions, not for runs.

    Raises:
        UsageError: a pin names an unknown op or kernel.
        PlanError: a slot has no kernel, a pin cannot be kept, kernels overlap, or no combination agrees on layouts.
    """
    by_op: dict[str, list[KernelSpec]] = {}
    for spec in specs:
        by_op.setdefault(spec.op, []).append(spec)
    pinned = expand_pins(pins or {}, queries, by_op)
    now = _resolve_once(queries, by_op, target, pinned, built_only=True, allow_gaps=allow_gaps)
    would = _resolve_once(queries, by_op, target, pinned, built_only=False, allow_gaps=allow_gaps)
    first = queries[0] if queries else OpQuery("", None, {}, "")
    return Plan(
        platform=target.platform,
        device=target.device,
        dtype=first.dtype,
        tp=first.tp,
        ep=first.ep,
        selections=now,
        would_run=would,
        warnings=_failed_checks(would),
        packages=dict(target.packages),
        packages_source=target.packages_source,
    )


def _failed_checks(selections: Iterable[Selection]) -> tuple[str, ...]:
    """One sentence per kernel whose record has a function that fails: it is left out, and its author should know."""
    failed = {r.kernel: r.detail for s in selections for r in s.rejected if is_own_fault(r.detail)}
    return tuple(f"kernel {name} is left out: {detail}" for name, detail in sorted(failed.items()))


def _resolve_once(
    queries: Sequence[OpQuery],
    by_op: Mapping[str, list[KernelSpec]],
    target: Target,
    pinned: Mapping[str, str],
    *,
    built_only: bool,
    allow_gaps: bool,
) -> tuple[Selection, ...]:
    cells: list[_Cell] = []
    for query in queries:
        specs = _ranked(by_op.get(query.op, []), target, query.op)
        able = [s for s in specs if _serves_some(s, query, target, built_only)]
        for window in _windows(query, able, target):
            cells.append(_cell(replace(query, tokens=window), specs, target, pinned.get(query.slot), built_only))
    order = sorted(cells, key=lambda c: (_PHASE_ORDER[c.query.phase], not OPS[c.query.op].parts))
    if allow_gaps:
        # A pin stays strict, since what was asked for by name is not left out in silence; but a question about a
        # kernel that is only declared gets its answer in the other half of the plan.
        order = [c for c in order if c.accepted or _pin_fails(c, pinned)]
    needed = frozenset(q.slot for q in queries if q.direct)
    chosen = _search(order, 0, {}, {}, needed)
    if chosen is None:
        raise _no_plan(order, target.platform, pinned)
    _check_overlaps(chosen)
    answers = [_selection(cell, chosen, pinned, target) for cell in cells]
    return tuple(_merged(answers))


def _ranked(specs: list[KernelSpec], target: Target, op: str) -> list[KernelSpec]:
    order = {name: i for i, name in enumerate(target.preferences.get(op, ()))}
    return sorted(specs, key=lambda s: (order.get(s.name, len(order)), -s.priority, s.name))


def _serves_some(spec: KernelSpec, query: OpQuery, target: Target, built_only: bool) -> bool:
    """Whether the kernel could serve part of the query's tokens: only such kernels cut the range into windows."""
    (low, high), (first, last) = query.tokens, served(spec, query, target)
    low = max(low, first)
    high = last if high is None else high if last is None else min(high, last)
    if high is not None and high < low:
        return False
    return reject(spec, replace(query, tokens=(low, high)), target, built_only=built_only) is None


def _pin_fails(cell: _Cell, pinned: Mapping[str, str]) -> bool:
    """Whether the cell's slot is pinned to a kernel that is refused for more than not being built."""
    pin = pinned.get(cell.query.slot)
    return pin is not None and not any(r.kernel == pin and r.code == "NOT_BUILT" for r in cell.rejected)


def _windows(query: OpQuery, specs: Iterable[KernelSpec], target: Target) -> list[Tokens]:
    """The query's token range, cut wherever some kernel's window begins or ends."""
    low, high = query.tokens
    starts = {low}
    for spec in specs:
        first, last = served(spec, query, target)
        starts.add(first)
        if last is not None:
            starts.add(last + 1)
    inside = sorted(s for s in starts if s >= low and (high is None or s <= high))
    ends = [*(s - 1 for s in inside[1:]), high]
    return list(zip(inside, ends, strict=True))


def _cell(query: OpQuery, specs: Iterable[KernelSpec], target: Target, pin: str | None, built_only: bool) -> _Cell:
    accepted: list[KernelSpec] = []
    rejected: list[Rejection] = []
    pin_reaches = pin is not None
    for spec in specs:
        rejection = reject(spec, query, target, built_only=built_only)
        # Who names a reference asks for it.
        if rejection is None or (rejection.code == "REFERENCE" and spec.name == pin):
            accepted.append(spec)
        else:
            rejected.append(rejection)
            # Outside its token window a pinned kernel is not asked; any other reason makes the pin fail.
            pin_reaches = pin_reaches and not (spec.name == pin and rejection.code == "TOKENS")
    if pin_reaches:
        rejected += [Rejection(s.name, "NOT_PINNED", f"{pin} is pinned") for s in accepted if s.name != pin]
        accepted = [s for s in accepted if s.name == pin]
    return _Cell(query, tuple(accepted), tuple(rejected))


def _search(
    order: Sequence[_Cell],
    position: int,
    chosen: dict[tuple[str, Tokens], KernelSpec | None],
    layouts: Mapping[str, str],
    needed: frozenset[str],
) -> dict[tuple[str, Tokens], KernelSpec | None] | None:
    """Depth-first over the cells; None as a choice means that nothing calls the slot."""
    if position == len(order):
        return chosen
    cell = order[position]
    key = (cell.query.slot, cell.query.tokens)
    if cell.query.slot not in needed:
        return _search(order, position + 1, {**chosen, key: None}, layouts, needed)
    for spec in cell.accepted:
        if not _agrees(spec, layouts):
            continue
        merged = {**layouts, **spec.layouts}
        parts = {slot_name(part, cell.query.phase if OPS[part].phased else None) for part in spec.parts}
        now_needed = needed | parts
        # Looking ahead: a choice that leaves some later cell without any kernel is not worth following.
        later = (c for c in order[position + 1 :] if c.query.slot in now_needed)
        if all(any(_agrees(other, merged) for other in c.accepted) for c in later):
            found = _search(order, position + 1, {**chosen, key: spec}, merged, now_needed)
            if found is not None:
                return found
    return None


def _agrees(spec: KernelSpec, layouts: Mapping[str, str]) -> bool:
    return all(layouts.get(key, tag) == tag for key, tag in spec.layouts.items())


def _check_overlaps(chosen: Mapping[tuple[str, Tokens], KernelSpec | None]) -> None:
    """Two chosen kernels that both do one fine op, in the same phase, would do it twice."""
    owners: dict[str, str] = {}
    for (slot, _), spec in chosen.items():
        if spec is None:
            continue
        phase = slot.removeprefix(spec.op)
        for part in spec.covers:
            owner = owners.setdefault(f"{part}{phase}", spec.name)
            if owner != spec.name:
                raise PlanError(
                    f"two chosen kernels cover {part}", reasons=[owner, spec.name], hint="pin or disable one of them"
                )


def _selection(
    cell: _Cell,
    chosen: Mapping[tuple[str, Tokens], KernelSpec | None],
    pinned: Mapping[str, str],
    target: Target,
) -> Selection:
    query = cell.query
    spec = chosen.get((query.slot, query.tokens))
    names = tuple(s.name for s in cell.accepted)
    base = Selection(query.op, query.phase, "", "", query.tokens, names, cell.rejected)
    if not names and (query.direct or _is_called(query, chosen)):
        return replace(base, reason=GAP)
    if spec is None:
        cover = next(
            (
                c.name
                for (slot, _), c in chosen.items()
                if c is not None and query.op in c.covers and query.phase in (None, slot.removeprefix(f"{c.op}_"))
            ),
            None,
        )
        reason = f"covered by {cover}" if cover else "no chosen kernel calls it"
        extra = tuple(Rejection(name, "COVERED", reason) for name in names)
        return replace(base, reason=reason, rejected=(*cell.rejected, *extra))
    extra = [_why_not(other, spec, cell, chosen) for other in cell.accepted if other is not spec]
    package = canonicalize_name(Requirement(spec.requires.packages[0]).name) if spec.requires.packages else ""
    padding, _ = ask_record(spec, "padding", query, target)
    return replace(
        base,
        kernel=spec.name,
        reason="; ".join(
            filter(
                None,
                (
                    _reason(spec, cell, pinned, target),
                    "a reference, allowed on this GPU" if spec.needs_leave(target) else "",
                    ask_record(spec, "note", query, target)[0],
                ),
            )
        ),
        rejected=(*cell.rejected, *extra),
        layouts=dict(spec.layouts),
        version=f"{package} {target.packages[package]}" if package in target.packages else "",
        padding=padding.note if padding else "",
    )


def _why_not(
    other: KernelSpec, spec: KernelSpec, cell: _Cell, chosen: Mapping[tuple[str, Tokens], KernelSpec | None]
) -> Rejection:
    """Why a kernel that fits was not taken: it does not go with the other choices, or it comes later."""
    key = (cell.query.slot, cell.query.tokens)
    layouts = {k: tag for at, c in chosen.items() if c is not None and at != key for k, tag in c.layouts.items()}
    clash = [f"{k}={tag}, the plan has {layouts[k]}" for k, tag in other.layouts.items() if layouts.get(k, tag) != tag]
    if clash:
        return Rejection(other.name, "LAYOUT", "; ".join(clash))
    if cell.accepted.index(other) < cell.accepted.index(spec):
        with_parts = f" and {', '.join(other.parts)}" if other.parts else ""
        detail = f"no kernels of the other slots{with_parts} go with it: their layouts differ, or one has no kernel"
        return Rejection(other.name, "LAYOUT", detail)
    return Rejection(other.name, "OUTRANKED", f"{spec.name} comes first")


def _is_called(query: OpQuery, chosen: Mapping[tuple[str, Tokens], KernelSpec | None]) -> bool:
    """Whether a chosen composite of the same phase has the op among its parts."""
    return any(
        spec is not None and query.op in spec.parts and query.slot in (query.op, query.op + slot.removeprefix(spec.op))
        for (slot, _), spec in chosen.items()
    )


def _reason(spec: KernelSpec, cell: _Cell, pinned: Mapping[str, str], target: Target) -> str:
    if pinned.get(cell.query.slot) == spec.name:
        return "pinned"
    if len(cell.accepted) == 1:
        return "the only kernel that fits"
    skipped = [s.name for s in cell.accepted[: cell.accepted.index(spec)]]
    first = f"first of {len(cell.accepted)} that fit"
    if skipped:
        first = f"{', '.join(skipped)} would come first and cannot go with the other choices"
    preferred = spec.name in target.preferences.get(cell.query.op, ())
    return f"{first}, in the order of {target.platform}" if preferred else first


def _merged(answers: Iterable[Selection]) -> Iterable[Selection]:
    """Neighbouring windows with the same answer become one."""
    last: Selection | None = None
    for answer in answers:
        if last is not None and last.slot == answer.slot and replace(answer, tokens=last.tokens) == last:
            last = replace(last, tokens=(last.tokens[0], answer.tokens[1]))
            continue
        if last is not None:
            yield last
        last = answer
    if last is not None:
        yield last


def _no_plan(order: Sequence[_Cell], platform: str, pinned: Mapping[str, str]) -> PlanError:
    reasons: list[str] = []
    for cell in order:
        pin = pinned.get(cell.query.slot)
        if not cell.accepted and (cell.query.direct or pin):
            window = "" if cell.query.tokens == ALL_TOKENS else f" for {cell.query.tokens} tokens"
            # Of a pinned slot only the pin matters: nothing else was asked for.
            tried = [r for r in cell.rejected if r.kernel == pin] or cell.rejected
            # Kernels of another vendor are the least of the news.
            tried = sorted(tried, key=lambda r: r.code == "VENDOR")
            reasons += [f"{cell.query.slot}{window}: {r.kernel}: {r.code} {r.detail}" for r in tried]
            if not tried:
                reasons.append(f"{cell.query.slot}: no kernel is registered")
    hint = "remove a pin" if pinned else "choose another platform or dtype"
    if reasons:
        return PlanError(f"no kernel fits on {platform}", reasons=reasons, hint=hint)
    for cell in order:
        reasons += [f"{cell.query.slot}: {s.name} {dict(s.layouts)}" for s in cell.accepted if s.layouts]
    return PlanError(
        f"no combination of kernels on {platform} agrees on layouts or fills every part", reasons=reasons, hint=hint
    )
