"""The command ``k3port``: parsing, and the one place where errors become text and exit codes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

import k3port
from k3port.cli.commands import Commands
from k3port.cli.console import Console
from k3port.cli.doctor import doctor
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
@click.version_option(k3port.__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run Kimi K3 from one model definition on CPU; kernels for NVIDIA and AMD GPUs are to come."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for command in (run, plan, doctor, kernels):
    cli.add_command(command)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; prints every error the same way."""
    args = list(sys.argv[1:] if argv is None else argv)
    # The options are needed for errors of parsing itself, so they are looked for by hand.
    options = args[: args.index("--")] if "--" in args else args
    console = Console(json_mode="--json" in options, verbose=bool({"-v", "--verbose"} & set(options)))
    try:
        try:
            # Not cli.main(): it would print errors and broken pipes its own way.
            with cli.make_context(PROGRAM, args, obj=console) as ctx:
                cli.invoke(ctx)
            _flush()
            return ExitCode.OK
        except BrokenPipeError:
            raise
        except click.exceptions.Exit as exc:
            _flush()
            return exc.exit_code
        except KeyboardInterrupt:
            error: K3Error = Interrupted("interrupted")
        except Exception as exc:  # the last handler: whatever it is, it becomes one message
            error = _as_error(exc)
            if console.verbose and isinstance(error, InternalError):
                traceback.print_exc()
        console.error(error)
        return error.exit_code
    except BrokenPipeError:
        return _broken_pipe()


def _flush() -> None:
    """Help and version are written by click, without a flush: a closed pipe would only show when Python exits."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _broken_pipe() -> int:
    """The reader of stdout has seen enough, which is no failure. Python must not try to flush to it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK


def _as_error(exc: Exception) -> K3Error:
    if isinstance(exc, K3Error):
        return exc
    if isinstance(exc, click.ClickException):
        return _usage_error(exc)
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


def _usage_error(exc: click.ClickException) -> UsageError:
    """Click's complaint in k3port's form."""
    context = getattr(exc, "ctx", None)
    command = context.command_path if context is not None else PROGRAM
    hint = f"{command} --help lists the options"
    if isinstance(exc, click.NoSuchOption):
        if any(c.isspace() for c in exc.option_name):
            return UsageError("unknown option", hint=f"a prompt that starts with - comes after --: {command} -- PROMPT")
        if command == PROGRAM and any(exc.option_name in param.opts for param in run.params):
            hint = f"options of run come after it: {PROGRAM} run {exc.option_name}"
        elif exc.possibilities:
            hint = f"did you mean {' or '.join(sorted(exc.possibilities))}?"
        return UsageError(f"unknown option {exc.option_name}", hint=hint)
    message = (exc.message or exc.format_message()).rstrip(".")
    if isinstance(exc, click.BadParameter) and exc.param is not None and exc.message:
        return UsageError(f"{max(exc.param.opts, key=len)}: {message}", hint=hint)
    return UsageError(message[:1].lower() + message[1:], hint=hint)
