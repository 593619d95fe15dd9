"""``k3port run``: one prompt in, text out."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from k3port.cli.console import Console
from k3port.cli.inputs import BUILTIN_PROMPT, EMBEDDED_NAME, embedded_checkpoint, read_prompt
from k3port.cli.interrupts import held
from k3port.cli.options import ALLOW_REFERENCE, CONTEXT, INPUT_FILE, MAX_SEED, MAX_TOKENS, MODEL, TEXT, parse_pins
from k3port.cli.plan_file import read_plan
from k3port.cli.start import RunOptions, check, header
from k3port.errors import UsageError
from k3port.runtime.prepare import DTYPES
from k3port.runtime.request import SamplingParams
from k3port.settings import MAX_THREADS, Settings, get_settings, merge_pins

DEFAULT_TEMPERATURE = 0.8


@click.command(short_help="Continue a prompt.")
@click.argument("prompt", nargs=-1)
@click.option("--model", type=MODEL, metavar="PATH", help=f"Checkpoint folder. Default: the embedded {EMBEDDED_NAME}.")
@click.option(
    "--platform", type=TEXT, metavar="NAME", help="Profile of platforms.yaml. Default: this machine's GPU, or cpu."
)
@ALLOW_REFERENCE
@click.option("--profiles", multiple=True, type=INPUT_FILE, metavar="FILE", help="A file with own platforms.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Activation type. Default: the platform's.")
@click.option(
    "--kernel", "kernels", multiple=True, metavar="OP[@PHASE]=NAME", help="Pin a kernel; the run fails without it."
)
@click.option("--plan", "plan_file", type=TEXT, metavar="FILE", help="Follow a plan that k3port plan --save wrote.")
@click.option("-f", "--file", type=TEXT, metavar="FILE", help="Read the prompt from a UTF-8 file; - is stdin.")
@click.option(
    "-n",
    "--max-tokens",
    metavar="N",
    type=click.IntRange(1, MAX_TOKENS),
    default=256,
    show_default=True,
    help="Most tokens to generate.",
)
@click.option(
    "--temperature", metavar="X", type=float, help=f"Randomness; 0 is greedy. Default: {DEFAULT_TEMPERATURE}."
)
@click.option(
    "--top-k",
    metavar="N",
    type=click.IntRange(0, MAX_TOKENS),
    default=0,
    show_default=True,
    help="Keep the k most probable tokens; 0 keeps all.",
)
@click.option(
    "--top-p", metavar="X", type=float, default=0.95, show_default=True, help="Keep the smallest set that reaches p."
)
@click.option(
    "--min-p",
    metavar="X",
    type=float,
    default=0.0,
    show_default=True,
    help="Drop tokens below this share of the best one.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, MAX_SEED),
    help="One seed gives one continuation. Default: drawn and shown.",
)
@click.option("--greedy", is_flag=True, help="Always take the most probable token.")
@click.option("--ignore-eos", is_flag=True, help="Do not stop where the model ends its text.")
@click.option(
    "--threads", metavar="N", type=click.IntRange(1, MAX_THREADS), help="CPU threads. Default: chosen per phase."
)
@click.option("--context", type=CONTEXT, metavar="TOKENS", help="Size of the cache. Default: 32768.")
@click.option("--json", "json_mode", is_flag=True, help="Write one JSON document on stdout instead of text.")
@click.option("--dry-run", is_flag=True, help="Check and plan only; print the kernel of every op and why.")
@click.option("-v", "--verbose", is_flag=True, help="Print the plan, notes, and tracebacks of internal errors.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on stderr but errors.")
@click.pass_obj
def run(console: Console, prompt: tuple[str, ...], dry_run: bool, file: str | None, **given: Any) -> None:
    """Continue PROMPT with a model and print the text as it is produced.

    Without PROMPT and --file, text piped into stdin is the prompt; PROMPT can be - to say so. With the embedded model
    and no prompt at all, a built-in one is continued. A prompt that starts with - comes after --.
    """
    settings = get_settings()
    console.json_mode, console.verbose = given["json_mode"], given["verbose"]
    console.quiet, console.plain = given["quiet"], settings.plain
    if console.quiet and console.verbose:
        raise UsageError("both --verbose and --quiet", hint="give one of them")
    for warning in settings.warnings:
        console.warn(warning)
    options = _options(given, settings)
    if dry_run:
        _dry_run(console, options)
        return
    text = read_prompt(prompt, file, builtin=given["model"] is None)
    if text is None:
        console.note(f'no prompt: continuing the built-in one, "{BUILTIN_PROMPT}"')
        text = BUILTIN_PROMPT
    # Imported here: this imports torch.
    with held():
        from k3port.cli.generate import generate

    generate(console, options, text)


def _options(given: Mapping[str, Any], settings: Settings) -> RunOptions:
    """Checks everything that needs no model."""
    if given["greedy"] and given["temperature"] is not None:
        raise UsageError("both --greedy and --temperature", hint="--greedy means --temperature 0")
    temperature = DEFAULT_TEMPERATURE if given["temperature"] is None else given["temperature"]
    sampling = SamplingParams(
        max_tokens=given["max_tokens"],
        temperature=0.0 if given["greedy"] else temperature,
        top_k=given["top_k"],
        top_p=given["top_p"],
        min_p=given["min_p"],
        # Drawn here, so that the closing line can show it.
        seed=secrets.randbits(32) if given["seed"] is None else given["seed"],
        ignore_eos=given["ignore_eos"],
    )
    if given["threads"] is not None and given["threads"] > (most := _most_threads()):
        raise UsageError(f"--threads {given['threads']}: at most {most} on this machine", hint="leave --threads out")
    if given["model"] == "":
        raise UsageError("--model is empty", hint="give the folder of a checkpoint")
    model = embedded_checkpoint() if given["model"] is None else Path(given["model"])
    platform = given["platform"] or settings.platform
    pins, saved, dtype = parse_pins(given["kernels"]), None, given["dtype"]
    if given["plan_file"] is not None:
        if pins:
            raise UsageError("both --plan and --kernel", hint="the plan names every kernel: give one of them")
        saved = read_plan(Path(given["plan_file"]))
        platform, dtype = given["platform"] or saved.platform, dtype or saved.dtype
    return RunOptions(
        model=model,
        model_name=model.resolve().name,
        platform=platform,
        dtype=dtype,
        # A saved plan names every kernel; pins of the environment are for other runs.
        kernels={} if saved is not None else merge_pins(settings.kernels, pins),
        plan=saved,
        profiles=given["profiles"],
        threads=given["threads"] or settings.threads,
        context_tokens=given["context"],
        sampling=sampling,
        allow_reference=given["allow_reference"],
    )


def _most_threads() -> int:
    """Four per core: more only wait for each other, and at some number the system gives no more."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4 * cores, MAX_THREADS)


def _dry_run(console: Console, options: RunOptions) -> None:
    from k3port import __version__
    from k3port.cli import preview

    found = check(options)
    for problem in (*found.registry.problems, *found.plan.warnings):
        console.warn(problem)
    console.note(header(options, found.plan))
    if found.note:
        console.note(found.note)
    for note in found.checkpoint.notes:
        console.detail(f"note: {note}")
    if console.json_mode:
        console.document(
            {
                "k3port": __version__,
                "model": options.model_name,
                "plan": preview.plan_record(found.plan),
                "warnings": console.warnings,
                "notes": list(found.checkpoint.notes),
            }
        )
        return
    for line in preview.plan_lines(found.plan):
        console.line(line)
