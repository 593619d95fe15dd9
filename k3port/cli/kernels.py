"""``k3port kernels``: the registry, the whole trace of one op's choice, and the check of one kernel."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import click

from k3port.cli.check import check
from k3port.cli.commands import Commands
from k3port.cli.console import Console
from k3port.cli.options import TEXT
from k3port.cli.plan import header, start
from k3port.cli.question import Question, ask, model_options, profiles_option
from k3port.cli.render import table, window_text
from k3port.errors import PlanError, UsageError
from k3port.ops.catalog import OPS
from k3port.oracle.predicates import ask_record, reject, served
from k3port.oracle.profile import Profile
from k3port.oracle.spec import ALL_TOKENS, GAP, KernelSpec, OpQuery, Plan, Rejection, Selection, Target
from k3port.plugins import default_registry
from k3port.runtime.planner import model_queries
from k3port.runtime.platforms import find_profile

_LATE = ("LAYOUT", "NOT_PINNED", "OUTRANKED", "COVERED")
"""Codes of kernels that fit by themselves."""
_COVERED_BY = "covered by "


@click.group(cls=Commands, invoke_without_command=True, short_help="List kernels, explain a choice, or check one.")
@click.pass_context
def kernels(ctx: click.Context) -> None:
    """List the kernels that k3port knows, explain the choice for one op, or check one kernel."""
    if ctx.invoked_subcommand is None:
        ctx.obj.page(ctx.get_help())


@kernels.command("list", short_help="List kernels.")
@click.option("--op", type=TEXT, metavar="OP", help="Only kernels of this op.")
@click.option(
    "--platform", type=TEXT, metavar="NAME", help="Only kernels for the vendor and architecture of this platform."
)
@profiles_option
@click.option("--json", "json_mode", is_flag=True, help="Write one JSON document on stdout instead of text.")
@click.pass_obj
def list_kernels(console: Console, op: str | None, platform: str | None, **given: Any) -> None:
    """List every kernel: its op, phases, limits, and whether it is built."""
    start(console, given)
    registry = default_registry()
    for problem in registry.problems:
        console.warn(problem)
    profile = None if platform is None else find_profile(platform, given["profiles"])
    if op is not None:
        _known_op(op)
    shown = [s for s in registry.kernels if op in (None, s.op) and (profile is None or _is_for(s, profile))]
    if console.json_mode:
        console.document({"kernels": [kernel_record(spec) for spec in shown]})
        return
    rows = [("op", "kernel", "phases", "built", "limits")]
    rows += [
        (s.op, s.name, "+".join(s.phases) or "all", "yes" if s.is_built else "no", _limits(s) or "-")
        for s in sorted(shown, key=lambda s: (list(OPS).index(s.op) if s.op in OPS else len(OPS), -s.priority, s.name))
    ]
    for line in table(rows):
        console.line(line)


@kernels.command("explain", short_help="Explain the choice for one op.")
@click.argument("op")
@model_options
@click.option("--json", "json_mode", is_flag=True, help="Write one JSON document on stdout instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on stderr but errors.")
@click.pass_obj
def explain(console: Console, op: str, **given: Any) -> None:
    """Explain which kernel OP gets on a platform, and for each candidate why or why not.

    OP is an op of the catalog, with @prefill or @decode for one phase of it.
    """
    start(console, given)
    question = ask(given)
    for problem in question.registry.problems:
        console.warn(problem)
    name, at, phase = op.partition("@")
    if not name.strip():
        raise UsageError("OP is empty", hint="give an op, such as rms_norm; k3port kernels list shows them")
    if at and not phase:
        raise UsageError(f"no phase after {name}@", hint="give OP, OP@prefill or OP@decode")
    queries = _queries(question, name, phase)
    try:
        plan: Plan | None = question.plan()
    except PlanError as exc:
        plan = None
        console.warn(f"{exc.message}: candidates are shown one by one, without what they must agree on")
    traces = [_trace(question, query, plan) for query in queries]
    if console.json_mode:
        console.document({"op": name, "platform": question.profile.name, "traces": traces})
        return
    console.note(header(question))
    for trace in traces:
        for line in _trace_lines(trace):
            console.line(line)


kernels.add_command(check)


def _known_op(op: str) -> None:
    if op not in OPS:
        near = difflib.get_close_matches(op, OPS, n=1)
        raise UsageError(f"unknown op {op!r}", hint=f"did you mean {near[0]}?" if near else f"ops: {', '.join(OPS)}")


def _queries(question: Question, op: str, phase: str) -> list[OpQuery]:
    _known_op(op)
    found = [q for q in model_queries(question.model.config, question.work) if q.op == op]
    if not found:
        drafts = dataclasses.replace(question.work, query_tokens=2)
        if any(q.op == op for q in model_queries(question.model.config, drafts)):
            raise UsageError(f"{question.model.name} uses {op} only where drafts are verified", hint="--draft-tokens N")
        raise UsageError(f"{question.model.name} does not use {op}", hint="give another --model")
    of_phase = [q for q in found if phase in ("", q.phase)]
    if not of_phase:
        phases = ", ".join(str(q.phase) for q in found if q.phase) or "none"
        raise UsageError(f"{op} has no phase {phase!r}", hint=f"phases of {op}: {phases}")
    return of_phase


def _is_for(spec: KernelSpec, profile: Profile) -> bool:
    req = spec.requires
    return (not req.vendors or profile.vendor in req.vendors) and (not req.archs or profile.arch in req.archs)


def _limits(spec: KernelSpec) -> str:
    """What a kernel needs, in one line."""
    req = spec.requires
    parts = [" or ".join(req.archs or req.vendors)]
    parts += [" or ".join(values) for values in (req.dtypes, req.weight_formats) if values]
    parts += [f"cache {' or '.join(req.kv_dtypes)}"] if req.kv_dtypes else []
    for rule in req.axes:
        ranges = [f">={rule.minimum}"] if rule.minimum is not None else []
        ranges += [f"<={rule.maximum}"] if rule.maximum is not None else []
        ranges += [f"x{rule.multiple_of}"] if rule.multiple_of > 1 else []
        parts.append(f"{rule.axis} {'/'.join(map(str, rule.allowed)) or ' '.join(ranges)}")
    parts += [f"tp {'/'.join(map(str, req.tp))}"] if req.tp else []
    parts += [*req.packages, *req.runtime, *req.features]
    return ", ".join(part for part in parts if part)


def kernel_record(spec: KernelSpec) -> dict[str, Any]:
    """A kernel as JSON values."""
    return {
        "name": spec.name,
        "op": spec.op,
        "phases": list(spec.phases),
        "built": spec.is_built,
        "doc": spec.doc,
        "priority": spec.priority,
        "requires": dataclasses.asdict(spec.requires),
        "layouts": dict(spec.layouts),
        "parts": list(spec.parts),
        "covers": list(spec.covers),
        "tokens": None if callable(spec.tokens) else list(spec.tokens),
        "graph_safe": spec.graph_safe,
        "records_drafts": spec.records_drafts,
        "deterministic": spec.deterministic,
        "rounds": spec.rounds,
        "numerics": spec.numerics,
        "source": spec.source,
    }


def _trace(question: Question, query: OpQuery, plan: Plan | None) -> dict[str, Any]:
    """Everything about one slot: the query, what is chosen per window, and each candidate, best first."""
    target = question.target
    specs = [s for s in question.registry.kernels if s.op == query.op]
    # What this device or phase can never use comes last; the rest in the order in which the resolver asks.
    specs.sort(key=lambda s: (_is_foreign(s, query, target), _rank(s, query, target)))
    sides = (plan.selections, plan.would_run) if plan is not None else ((), ())
    now, would = ([s for s in side if s.slot == query.slot] for side in sides)
    return {
        "slot": query.slot,
        "query": {**dataclasses.asdict(query), "rounds": sorted(query.rounds), "axes": dict(query.axes)},
        "runs_now": _answers(now),
        "would_run": _answers(would),
        "candidates": [_candidate(spec, query, question, now, would) for spec in specs],
    }


def _answers(selections: Sequence[Selection]) -> list[dict[str, Any]]:
    """The kernel of each token window; neighbouring windows with the same one are told as one."""
    found: list[dict[str, Any]] = []
    for s in selections:
        if found and found[-1]["kernel"] == s.kernel:
            found[-1]["tokens"][1] = s.tokens[1]
        else:
            found.append({"tokens": list(s.tokens), "kernel": s.kernel, "reason": s.reason})
    return found


def _rank(spec: KernelSpec, query: OpQuery, target: Target) -> tuple[int, int, str]:
    preferred = target.preferences.get(query.op, ())
    place = preferred.index(spec.name) if spec.name in preferred else len(preferred)
    return place, -spec.priority, spec.name


def _is_foreign(spec: KernelSpec, query: OpQuery, target: Target) -> bool:
    vendors = spec.requires.vendors
    return bool(vendors and target.device.vendor not in vendors) or bool(spec.phases and query.phase not in spec.phases)


def _candidate(
    spec: KernelSpec, query: OpQuery, question: Question, now: Sequence[Selection], would: Sequence[Selection]
) -> dict[str, Any]:
    target = question.target
    first, last = served(spec, query, target)
    asked = dataclasses.replace(query, tokens=(first, last) if last is None or last >= first else query.tokens)
    runs, would_run = (
        [answer["tokens"] for answer in _answers(side) if answer["kernel"] == spec.name] for side in (now, would)
    )
    # A pin overrules a refusal: what runs is never shown as refused.
    rejection = None if runs else _refusal(spec, asked, question, now if spec.is_built else would)
    padding, _ = ask_record(spec, "padding", query, target)
    return {
        **kernel_record(spec),
        "tokens": [first, last],
        "runs_now": runs,
        "would_run": would_run,
        "would_be": _would_be(spec, question, would) if runs and not would_run else "",
        "code": rejection.code if rejection else "",
        "detail": rejection.detail if rejection else "",
        "hint": rejection.hint if rejection else "",
        "padding": padding.note if padding else "",
        "note": ask_record(spec, "note", query, target)[0] or "",
        "workspace_bytes": ask_record(spec, "workspace_bytes", query, target)[0] or 0,
    }


def _refusal(spec: KernelSpec, query: OpQuery, question: Question, side: Sequence[Selection]) -> Rejection | None:
    """Why a kernel that does not run is not taken; None where it would be, or where there is no plan.

    Args:
        side: the slot's selections among built kernels for a built kernel, else those among all declared ones.
    """
    target = question.target
    own = reject(spec, query, target, built_only=False)
    if own is not None and own.code != "REFERENCE":
        return own
    if own is not None:
        # Leave for references changes nothing where the slot is not called or where better kernels have it.
        if side and all(_is_idle(s) for s in side):
            return Rejection(spec.name, "COVERED", side[0].reason)
        chosen = [k for k in question.registry.kernels if any(s.kernel == k.name for s in side)]
        is_last = all(_rank(k, query, target) < _rank(spec, query, target) for k in chosen)
        if side and is_last and all(s.kernel or _is_idle(s) for s in side):
            at = f"{query.op}@{query.phase}" if query.phase else query.op
            return dataclasses.replace(own, hint=f"--kernel {at}={spec.name}")
        return own
    return _late(spec, side) or reject(spec, query, target)


def _is_idle(selection: Selection) -> bool:
    """Whether nothing calls the slot, as where a fused kernel does its work."""
    return not selection.kernel and selection.reason != GAP


def _late(spec: KernelSpec, side: Sequence[Selection]) -> Rejection | None:
    """What the rest of the plan, and no limit of its own, keeps a kernel from."""
    return next((r for s in side for r in s.rejected if r.kernel == spec.name and r.code in _LATE), None)


def _would_be(spec: KernelSpec, question: Question, would: Sequence[Selection]) -> str:
    """What would keep a kernel that runs now from running, were every declared kernel built."""
    late = _late(spec, would)
    if late is None:
        return ""
    if late.code not in ("OUTRANKED", "COVERED"):
        return f"{late.code} {late.detail}"
    takers = dict.fromkeys(s.kernel or s.reason.removeprefix(_COVERED_BY) for s in would if _late(spec, [s]))
    built = {k.name: k.is_built for k in question.registry.kernels}
    names = ", ".join(f"{name}{'' if built.get(name, True) else ' (not built)'}" for name in takers)
    return f"{late.code} by {names}"


def _state(candidate: dict[str, Any]) -> str:
    """What becomes of a candidate: what refuses it, or where it runs now and would run."""
    runs, would_run = candidate["runs_now"], candidate["would_run"]
    words = f"{candidate['code']} {candidate['detail'].removeprefix('covered ')}" if candidate["code"] else "fits"
    if runs:
        words = f"runs now{_among(runs)}"
    if candidate["would_be"]:
        words += f"; would be {candidate['would_be']}"
    elif candidate["built"] and would_run != runs:
        words += f"; would run{_among(would_run)}" if would_run else "; would not run"
    return words


def _among(windows: Sequence[Sequence[int | None]]) -> str:
    texts = [window_text((first or 0, last)) for first, last in windows]
    return "" if texts == ["all"] else f" ({', '.join(texts)} tokens)"


def _trace_lines(trace: dict[str, Any]) -> Sequence[str]:
    query = trace["query"]
    sizes = ", ".join(f"{name} {size}" for name, size in query["axes"].items())
    types = ", ".join(filter(None, (query["dtype"], query["weight_format"], query["kv_dtype"], query["state_dtype"])))
    lines = [f"{trace['slot']}: {sizes}; {types}; tp {query['tp']}, ep {query['ep']}"]
    for label, key in (("runs now", "runs_now"), ("would run", "would_run")):
        for window in trace[key]:
            first, last = window["tokens"]
            tokens = window_text((first, last))
            lines.append(f"  {label} ({tokens} tokens): {window['kernel'] or 'none'}: {window['reason']}")
    for c in trace["candidates"]:
        lines.append(f"  {c['name']}: {_state(c)}")
        facts = [("hint", c["hint"]), ("padding", c["padding"]), ("note", c["note"])]
        facts.append(("window", "" if tuple(c["tokens"]) == ALL_TOKENS else window_text(tuple(c["tokens"]))))
        facts.append(("layouts", ", ".join(f"{key} = {tag}" for key, tag in c["layouts"].items())))
        facts.append(("numerics", c["numerics"]))
        facts.append(("source", c["source"]))
        lines += [f"    {name}: {value}" for name, value in facts if value]
    return lines
