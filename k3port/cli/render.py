"""Plans as text: who runs, why, why not the others, and memory with its arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from k3port.oracle.diff import join_windows, pair_windows
from k3port.oracle.spec import ALL_TOKENS, GAP, MemoryPlan, Plan, Rejection, Selection, Tokens
from k3port.runtime.terms import gib

# What says nothing about the choice that people could change: shown with -v only.
_PLAIN_CODES = frozenset({"VENDOR", "PHASE", "OUTRANKED", "COVERED", "NOT_PINNED", "TOKENS", "NOT_BUILT"})
_SHOWN_REASONS = 3
_UNUSED = "no chosen kernel calls it"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows with aligned columns; the last one is as long as it wants."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]


def window_text(tokens: Tokens) -> str:
    """``all``, ``1..32`` or ``33..``."""
    first, last = tokens
    return "all" if tokens == ALL_TOKENS else f"{first}..{'' if last is None else last}"


def selection_lines(plan: Plan, *, verbose: bool = False) -> list[str]:
    """One line per slot and token window: runs now, would run, the version of its package, why."""
    rows = [("op", "phase", "tokens", "runs now", "would run", "version", "why")]
    pairs = pair_windows(plan.selections, plan.would_run)
    for tokens, now, would in pairs if verbose else join_windows(pairs):
        # Both answers have the same slots.
        assert now is not None
        assert would is not None
        if not verbose and _UNUSED in now.reason and _UNUSED in would.reason:
            continue
        why = would.reason + (f" · {would.padding}" if would.padding else "")
        same = now.kernel == would.kernel
        rows.append(
            (
                would.op,
                would.phase or "-",
                window_text(tokens),
                _name(now),
                "=" if same else _name(would),
                would.version or "-",
                why,
            )
        )
    return table(rows)


def _name(selection: Selection) -> str:
    return selection.kernel or ("none" if selection.reason == GAP else "-")


def why_not_lines(plan: Plan, *, verbose: bool = False) -> list[str]:
    """Why other kernels were not taken: all of them, or the first ones that say something about this platform."""
    lines: list[str] = []
    for slot in dict.fromkeys(s.slot for s in plan.would_run):
        now, would = ([s for s in side if s.slot == slot] for side in (plan.selections, plan.would_run))
        seen: dict[Rejection, None] = {}
        for selection in (*would, *now):
            seen.update(dict.fromkeys(selection.rejected))
        # That references need leave is news only where nothing else runs.
        plain = _PLAIN_CODES if any(s.reason == GAP for s in now) else _PLAIN_CODES | {"REFERENCE"}
        kept = [r for r in seen if verbose or r.code not in plain]
        if not kept:
            continue
        op = would[0]
        lines.append(f"{op.op} {op.phase or ''}".rstrip())
        shown = kept if verbose else kept[:_SHOWN_REASONS]
        lines += [f"  {row}" for row in table([(r.kernel, r.code, _detail(r)) for r in shown])]
        if hidden := len(kept) - len(shown):
            lines.append(f"  and {hidden} more, with -v")
    return lines


def _detail(rejection: Rejection) -> str:
    return f"{rejection.detail} ({rejection.hint})" if rejection.hint else rejection.detail


def memory_lines(memory: MemoryPlan) -> list[str]:
    """Bytes of one rank by kind with their arithmetic, then the sum against the device and what fits."""
    rows = [("memory per rank", "size", "arithmetic")]
    rows += [(item.kind, gib(item.bytes), item.arithmetic) for item in memory.items]
    rows.append(("sum", gib(memory.total_bytes), _verdict(memory)))
    lines = table(rows)
    if memory.fits and memory.capacity_bytes:
        lines.append(
            f"fits: up to {memory.max_context_tokens} tokens per request, or up to {memory.max_concurrency} requests"
        )
    return [*lines, *(f"note: {part}" if memory.fits else f"does not fit: {part}" for part in _parts(memory.advice))]


def _parts(advice: str) -> list[str]:
    return [part for part in advice.split("; ") if part]


def _verdict(memory: MemoryPlan) -> str:
    return f"of {gib(memory.capacity_bytes)} usable" if memory.capacity_bytes else "of an unknown amount"


def plan_text(plan: Plan, *, verbose: bool = False) -> list[str]:
    """The whole plan."""
    packages = ", ".join(f"{name} {version}" for name, version in sorted(plan.packages.items())) or "none"
    lines = [f"packages ({plan.packages_source}): {packages}", "", *selection_lines(plan, verbose=verbose)]
    if reasons := why_not_lines(plan, verbose=verbose):
        lines += ["", "why not", *reasons]
    if plan.memory is not None:
        lines += ["", *memory_lines(plan.memory)]
    return lines
