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
from k3port.oracle.spec import ALL_TOKENS, KernelSpec, OpQuery, Plan, Rejection, Target
from k3port.plugins import default_registry
from k3port.runtime.planner import model_queries
from k3port.runtime.platforms import find_profile


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
    order = {name: i for i, name in enumerate(target.preferences.get(query.op, ()))}
    specs = [s for s in question.registry.kernels if s.op == query.op]
    # What this device or phase can never use comes last; the rest in the order in which the resolver asks.
    specs.sort(key=lambda s: (_is_foreign(s, query, target), order.get(s.name, len(order)), -s.priority, s.name))
    chosen: dict[str, list[dict[str, Any]]] = {"runs_now": [], "would_run": []}
    late: dict[str, Rejection] = {}
    if plan is not None:
        for key, side in (("runs_now", plan.selections), ("would_run", plan.would_run)):
            for s in side:
                if s.slot == query.slot:
                    if chosen[key] and chosen[key][-1]["kernel"] == s.kernel:
                        chosen[key][-1]["tokens"][1] = s.tokens[1]
                    else:
                        chosen[key].append({"tokens": list(s.tokens), "kernel": s.kernel, "reason": s.reason})
                    late.update({r.kernel: r for r in s.rejected if r.code in ("LAYOUT", "NOT_PINNED", "OUTRANKED")})
    return {
        "slot": query.slot,
        "query": {**dataclasses.asdict(query), "rounds": sorted(query.rounds), "axes": dict(query.axes)},
        **chosen,
        "candidates": [_candidate(spec, query, question, late.get(spec.name)) for spec in specs],
    }


def _is_foreign(spec: KernelSpec, query: OpQuery, target: Target) -> bool:
    vendors = spec.requires.vendors
    return bool(vendors and target.device.vendor not in vendors) or bool(spec.phases and query.phase not in spec.phases)


def _candidate(spec: KernelSpec, query: OpQuery, question: Question, late: Rejection | None) -> dict[str, Any]:
    target = question.target
    first, last = served(spec, query, target)
    asked = dataclasses.replace(query, tokens=(first, last) if last is None or last >= first else query.tokens)
    rejection = reject(spec, asked, target, built_only=False) or late
    if rejection is None and not spec.is_built:
        rejection = reject(spec, asked, target)
    padding, _ = ask_record(spec, "padding", query, target)
    return {
        **kernel_record(spec),
        "tokens": [first, last],
        "code": rejection.code if rejection else "",
        "detail": rejection.detail if rejection else "",
        "hint": rejection.hint if rejection else "",
        "padding": padding.note if padding else "",
        "note": ask_record(spec, "note", query, target)[0] or "",
        "workspace_bytes": ask_record(spec, "workspace_bytes", query, target)[0] or 0,
    }


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
        lines.append(f"  {c['name']}: {c['code'] or 'fits'}{' ' + c['detail'] if c['detail'] else ''}")
        facts = [("hint", c["hint"]), ("padding", c["padding"]), ("note", c["note"])]
        facts.append(("window", "" if tuple(c["tokens"]) == ALL_TOKENS else window_text(tuple(c["tokens"]))))
        facts.append(("layouts", ", ".join(f"{key} = {tag}" for key, tag in c["layouts"].items())))
        facts.append(("numerics", c["numerics"]))
        facts.append(("source", c["source"]))
        lines += [f"    {name}: {value}" for name, value in facts if value]
    return lines
