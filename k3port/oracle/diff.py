"""Two plans, or the two answers of one plan, side by side: windows are cut at the edges of both."""

from __future__ import annotations

from collections.abc import Iterable

from k3port.oracle.spec import ALL_TOKENS, Plan, Selection, Tokens

Pair = tuple[Tokens, Selection | None, Selection | None]


def pair_windows(left: Iterable[Selection], right: Iterable[Selection]) -> list[Pair]:
    """Slot by slot and window by window what both sides chose; None where a side has no such slot."""
    sides = (tuple(left), tuple(right))
    result: list[Pair] = []
    for slot in dict.fromkeys(s.slot for side in sides for s in side):
        mine = [[s for s in side if s.slot == slot] for side in sides]
        both = [s for side in mine for s in side]
        starts = sorted({s.tokens[0] for s in both})
        ends = [*(start - 1 for start in starts[1:]), both[-1].tokens[1]]
        for start, end in zip(starts, ends, strict=True):
            first, second = (_at(side, start) for side in mine)
            result.append(((start, end), first, second))
    return result


def _at(side: Iterable[Selection], tokens: int) -> Selection | None:
    return next((s for s in side if s.tokens[0] <= tokens and (s.tokens[1] is None or tokens <= s.tokens[1])), None)


def join_windows(pairs: Iterable[Pair]) -> list[Pair]:
    """Neighbouring windows of a slot with the same kernels on both sides as one, whatever else differs."""
    result: list[Pair] = []
    for tokens, left, right in pairs:
        if result:
            before, last_left, last_right = result[-1]
            if (_key(last_left), _key(last_right)) == (_key(left), _key(right)):
                result[-1] = ((before[0], tokens[1]), last_left, last_right)
                continue
        result.append((tokens, left, right))
    return result


def _key(selection: Selection | None) -> tuple[str, str]:
    return ("", "") if selection is None else (selection.slot, selection.kernel)


def diff_plans(left: Plan, right: Plan) -> list[str]:
    """One line per slot and window whose kernel differs, then per memory kind whose bytes differ."""
    lines = []
    for label, mine, theirs in (
        ("", left.selections, right.selections),
        ("would run: ", left.would_run, right.would_run),
    ):
        for tokens, first, second in join_windows(pair_windows(mine, theirs)):
            kernels = [s.kernel if s is not None else "" for s in (first, second)]
            if kernels[0] != kernels[1]:
                name = _window_name((first or second).slot, tokens)  # type: ignore[union-attr]
                lines.append(f"{label}{name}: {kernels[0] or '-'} -> {kernels[1] or '-'}")
    bytes_of = [{i.kind: i.bytes for i in p.memory.items} if p.memory else {} for p in (left, right)]
    for kind in dict.fromkeys((*bytes_of[0], *bytes_of[1])):
        before, after = bytes_of[0].get(kind, 0), bytes_of[1].get(kind, 0)
        if before != after:
            lines.append(f"memory {kind}: {before} -> {after} bytes per rank")
    return lines


def _window_name(slot: str, tokens: Tokens) -> str:
    first, last = tokens
    return slot if tokens == ALL_TOKENS else f"{slot}[{first}..{'' if last is None else last}]"
