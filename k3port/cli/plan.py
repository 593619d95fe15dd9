"""``k3port plan``: which kernel would run each op, why, and whether the model fits. Needs neither weights nor a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from k3port.cli.console import Console
from k3port.cli.options import OUTPUT_FILE, TEXT
from k3port.cli.plan_file import read_plan, write_plan
from k3port.cli.question import Question, ask, model_options, size_options
from k3port.cli.render import memory_lines, plan_text
from k3port.errors import CapacityError, ExitCode, K3Error, PlanError, UsageError
from k3port.oracle.spec import Plan
from k3port.settings import get_settings


@click.command(short_help="Show the kernels and the memory of a model on any platform.")
@model_options
@size_options
@click.option(
    "--compare", nargs=2, type=TEXT, metavar="A B", help="What differs between two platforms or two saved plans."
)
@click.option("--save", type=OUTPUT_FILE, metavar="FILE", help="Write the plan as JSON, for run --plan and --compare.")
@click.option("--json", "json_mode", is_flag=True, help="Write the plan as one JSON document on stdout.")
@click.option("-v", "--verbose", is_flag=True, help="Every reason of every kernel that is not taken.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on stderr but errors.")
@click.pass_obj
def plan(console: Console, compare: tuple[str, str] | None, save: Path | None, **given: Any) -> None:
    """Show which kernel runs each op of a model on a platform, and whether it fits.

    For every op: what runs now in this version, what would run were every declared kernel built, why, and why not the
    others. Then memory per rank. The platform need not be here; only config.json is read.
    """
    start(console, given)
    if compare is not None:
        if save is not None:
            raise UsageError("both --compare and --save", hint="save each plan on its own")
        if given.get("platform"):
            raise UsageError("both --compare and --platform", hint="--compare names both platforms itself")
        _compare(console, compare, given)
        return
    question = ask(given)
    try:
        answer = question.plan()
    except PlanError:
        if not console.json_mode:
            console.note(header(question))
            for line in memory_lines(question.memory()):
                console.line(line)
        raise
    for warning in (*question.registry.problems, *answer.warnings):
        console.warn(warning)
    if save is not None:
        write_plan(save, answer)
    if console.json_mode:
        console.text_document(answer.to_json())
    else:
        console.note(header(question))
        for line in plan_text(answer, verbose=console.verbose):
            console.line(line)
    failure = verdict(answer)
    if failure is not None:
        console.failure(failure)
        raise click.exceptions.Exit(ExitCode.UNSUPPORTED)


def start(console: Console, given: dict[str, Any]) -> None:
    """Output options and warnings of the environment.

    Raises:
        UsageError: both --quiet and --verbose.
    """
    settings = get_settings()
    console.json_mode, console.verbose = given["json_mode"], given.get("verbose", False)
    console.quiet, console.plain = given.get("quiet", False), settings.plain
    if console.quiet and console.verbose:
        raise UsageError("both --verbose and --quiet", hint="give one of them")
    for warning in settings.warnings:
        console.warn(warning)


def header(question: Question) -> str:
    """Model, platform, how it is split, and its number types."""
    from k3port import __version__

    work, profile = question.work, question.profile
    devices = f"{work.group.gpus} {'device' if work.group.gpus == 1 else 'devices'}"
    split = devices if work.group.gpus == 1 else f"{work.group} = {devices}"
    parts = [
        f"k3port {__version__}",
        question.model.name,
        f"{profile.name} ({profile.arch})",
        split,
        f"activations {work.dtype}, experts {work.weight_format}, cache {work.kv_dtype or work.dtype}",
    ]
    return " · ".join(parts)


def verdict(answer: Plan) -> K3Error | None:
    """Why the plan cannot be run even with every declared kernel, or None."""
    if gaps := answer.gaps(would=True):
        reasons = [f"{s.slot}: {r.kernel}: {r.code} {r.detail}" for s in gaps for r in s.rejected]
        return PlanError(f"no kernel fits on {answer.platform}", reasons=reasons, hint="k3port kernels explain OP")
    if answer.memory is not None and not answer.memory.fits:
        return CapacityError(
            f"the model does not fit on {answer.platform} like this",
            reasons=answer.memory.advice.split("; "),
            hint="choose a larger group with --gpus or --nodes, or lower --context and --concurrency",
        )
    return None


def _compare(console: Console, names: tuple[str, str], given: dict[str, Any]) -> None:
    first, second = (_side(name, given) for name in names)
    lines = first.diff(second)
    if console.json_mode:
        plans = {key: json.loads(side.to_json()) for key, side in (("a", first), ("b", second))}
        console.document({**plans, "diff": lines})
        return
    titles = [f"{name} ({side.device.arch}, tp {side.tp})" for name, side in zip(names, (first, second), strict=True)]
    console.note(" -> ".join(titles))
    for line in lines or ["no difference"]:
        console.line(line)


def _side(name: str, given: dict[str, Any]) -> Plan:
    """A saved plan where a file of that name exists or the name looks like one, else a platform."""
    if name.endswith(".json") or Path(name).is_file():
        return read_plan(Path(name))
    return ask(given, name).plan()
