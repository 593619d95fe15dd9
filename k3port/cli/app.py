"""Parsing, and the one place where errors become text and exit codes. :mod:`k3port.cli.main` is the entry."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import k3port
from k3port.cli.bench import bench
from k3port.cli.commands import Commands
from k3port.cli.console import Console, OutputError
from k3port.cli.doctor import doctor
from k3port.cli.interrupts import Interrupts
from k3port.cli.kernels import kernels
from k3port.cli.plan import plan
from k3port.cli.run import run
from k3port.errors import CapacityError, ExitCode, K3Error, UsageError

PROGRAM = "k3port"


class InternalError(K3Error):
    """A failure that nobody foresaw."""

    exit_code = ExitCode.INTERNAL


class Interrupted(K3Error):
    """The user stopped the command."""

    exit_code = ExitCode.INTERRUPTED


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 unsupported or too large, 4 numerics, 5 internal, 130 interrupted.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run Kimi K3 from one model definition: on CPU, and kernel by kernel on NVIDIA and AMD GPUs."""
    if ctx.invoked_subcommand is None:
        ctx.obj.page(ctx.get_help())


def _show_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.obj.page(ctx.get_help())
        ctx.exit()


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.obj.page(f"{PROGRAM} {k3port.__version__}")
        ctx.exit()


def _add_flag(command: click.Command, names: list[str], help: str, callback: Any) -> None:
    """A flag that prints through the console: click's own would write to a full disk or a closed stdout its own way."""
    command.params.append(
        click.Option(names, is_flag=True, expose_value=False, is_eager=True, help=help, callback=callback)
    )


def _add_help(command: click.Command) -> None:
    _add_flag(command, ["-h", "--help"], "Show this message and exit.", _show_help)
    for child in command.commands.values() if isinstance(command, click.Group) else ():
        _add_help(child)


for command in (run, plan, doctor, kernels, bench):
    cli.add_command(command)
_add_flag(cli, ["--version"], "Show the version and exit.", _show_version)
_add_help(cli)


def execute(argv: Sequence[str] | None, interrupts: Interrupts) -> int:
    """Runs a command and returns its exit code; prints every error the same way."""
    args = list(sys.argv[1:] if argv is None else argv)
    # The options are needed for errors of parsing itself, so they are looked for by hand.
    options = args[: args.index("--")] if "--" in args else args
    console = Console(json_mode="--json" in options, verbose=bool({"-v", "--verbose"} & set(options)))
    try:
        if interrupts.seen:
            raise KeyboardInterrupt
        # Not cli.main(): it would print errors and broken pipes its own way. Parsing eats its list.
        with cli.make_context(PROGRAM, list(args), obj=console) as ctx:
            cli.invoke(ctx)
        interrupts.off()
        return ExitCode.OK
    except BrokenPipeError:
        # The reader of stdout has seen enough, which is no failure.
        interrupts.off()
        console.close()
        return ExitCode.OK
    except click.exceptions.Exit as exc:
        interrupts.off()
        return exc.exit_code
    except KeyboardInterrupt:
        interrupts.off()
        error: K3Error = Interrupted("interrupted")
    except Exception as exc:  # the last handler: whatever it is, it becomes one message
        interrupts.off()
        if interrupts.seen and not isinstance(exc, OutputError):
            error = Interrupted("interrupted")
        else:
            error = _scrubbed(_with_hint(_as_error(exc, args), args), args)
        if console.verbose and isinstance(error, InternalError):
            traceback.print_exc()
    console.error(error)
    return error.exit_code


def _command_of(args: Sequence[str]) -> str:
    """The command that the arguments name, as it is typed."""
    command: click.Command | None = cli
    path = [PROGRAM]
    for arg in args:
        if not isinstance(command, click.Group) or arg.startswith("-"):
            break
        command = command.commands.get(arg)
        if command is None:
            break
        path.append(arg)
    return " ".join(path)


# The library's words for what the command line calls otherwise.
_WORDS = (
    (r"load the model with a (larger|smaller) (?:max_requests or )?kv_tokens", r"give a \1 --context"),
    (r"\bkv_tokens\b", "--context"),
    (r"\bmax_tokens\b", "--max-tokens"),
)


def _with_hint(error: K3Error, args: Sequence[str]) -> K3Error:
    """Every error has a hint, in the words of the command line."""
    for pattern, words in _WORDS:
        error.hint = re.sub(pattern, words, error.hint)
    if "k3port.SamplingParams" in error.hint:
        error.hint = ""
    if not error.hint and isinstance(error, UsageError):
        error.hint = f"{_command_of(args)} --help lists the options"
    elif not error.hint:
        error.hint = f"{PROGRAM} doctor looks for what is wrong with this machine"
    return error


def _scrubbed(error: K3Error, args: Sequence[str]) -> K3Error:
    """The error without values of several words: one can be a prompt that stands in the wrong place."""
    for arg in args:
        value = arg.partition("=")[2] if arg.startswith("--") and "=" in arg else arg
        for text in dict.fromkeys((value, value[2:] if re.match("-[a-zA-Z]", value) else value)):
            if len(text.split()) < 2 or _is_place(text):
                continue
            forms = "|".join(re.escape(form) for form in dict.fromkeys((text, repr(text)[1:-1])))
            pattern = rf"(?<!\w)(?:{forms})(?!\w)"
            error.message = re.sub(pattern, "…", error.message)
            error.reasons = tuple(re.sub(pattern, "…", reason) for reason in error.reasons)
            error.hint = re.sub(pattern, "…", error.hint)
    return error


def _is_place(text: str) -> bool:
    """Whether it is the name of a file, there or in a folder that is: then the error has to name it."""
    try:
        path = Path(text)
        return path.exists() or (os.sep in text and path.parent.is_dir())
    except (OSError, ValueError):
        return False


def _as_error(exc: Exception, args: Sequence[str]) -> K3Error:
    if isinstance(exc, K3Error):
        return exc
    if isinstance(exc, click.ClickException):
        return _usage_error(exc, args)
    allocation = re.search(r"tried to allocate (\d+) bytes", str(exc)) if isinstance(exc, RuntimeError) else None
    if isinstance(exc, MemoryError) or allocation:
        reasons = [f"{int(allocation[1]) / 2**30:.1f} GiB could not be allocated"] if allocation else []
        return CapacityError("not enough memory", reasons=reasons, hint="lower --context, or use a smaller model")
    # The message of an unforeseen exception may quote a prompt; its type and place do not.
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [f for f in frames if f"{os.sep}k3port{os.sep}" in f.filename]
    place = f" at {Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}" if ours else ""
    return InternalError(
        f"internal error: {type(exc).__name__}{place}",
        hint="run again with -v for the traceback; it may quote the prompt",
    )


def _usage_error(exc: click.ClickException, args: Sequence[str]) -> UsageError:
    """Click's complaint in k3port's form."""
    command = _command_of(args)
    help_hint = f"{command} --help lists the options"
    if isinstance(exc, click.NoSuchOption):
        before = f"a prompt that starts with - comes after --: {PROGRAM} run -- PROMPT"
        words = args[: args.index("--")] if "--" in args else args
        if any(arg.startswith("-") and any(c.isspace() for c in arg.partition("=")[0]) for arg in words):
            return UsageError("unknown option", hint=before)
        if command == PROGRAM and any(exc.option_name in param.opts for param in run.params):
            hint = f"options of run come after it: {PROGRAM} run {exc.option_name}"
        elif exc.possibilities:
            hint = f"did you mean {' or '.join(sorted(exc.possibilities))}?"
        elif command == f"{PROGRAM} run" and len(exc.option_name) == 2:
            hint = f"{help_hint}; {before}"
        else:
            hint = help_hint
        return UsageError(f"unknown option {exc.option_name}", hint=hint)
    message = (exc.message or exc.format_message()).rstrip(".")
    if isinstance(exc, click.BadParameter) and exc.param is not None and exc.message:
        return UsageError(f"{max(exc.param.opts, key=len)}: {message}", hint=help_hint)
    return UsageError(message[:1].lower() + message[1:], hint=help_hint)
