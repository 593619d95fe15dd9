"""``k3port bench``: times of kernels beside their bounds and peers, and tuned configurations. Needs a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k3port.cli.commands import Commands
from k3port.cli.console import Console, OutputError, error_record
from k3port.cli.interrupts import held
from k3port.cli.options import OUTPUT_FILE, TEXT
from k3port.cli.plan import start
from k3port.cli.render import table
from k3port.errors import ExitCode, K3Error, NumericsError
from k3port.plugins import Registry, default_registry
from k3port.testing.bench.names import check_ops, find_kernels

if TYPE_CHECKING:
    from k3port.testing.bench.run import TuneReport

_JSON = click.option("--json", "json_mode", is_flag=True, help="Write one JSON document on stdout instead of text.")
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Print nothing on stderr but errors.")
_QUICK = click.option("--quick", is_flag=True, help="Fewer shapes and shorter samples: a look, no result.")
_OPS = click.option("--op", "ops", multiple=True, type=TEXT, metavar="OP", help="Only this op. Can be repeated.")


@click.group(cls=Commands, invoke_without_command=True, short_help="Measure kernels on a GPU, or tune them.")
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure kernels on the GPU of this machine, or tune their configurations."""
    if ctx.invoked_subcommand is None:
        ctx.obj.page(ctx.get_help())


@bench.command("kernels", short_help="Measure kernels beside their bounds and peers.")
@_OPS
@click.option("--kernel", "names", multiple=True, type=TEXT, metavar="NAME", help="Only this kernel. Can be repeated.")
@_QUICK
@click.option("--peers/--no-peers", default=True, help="Whether to measure other packages' kernels as well.")
@click.option("--save", type=OUTPUT_FILE, metavar="FILE", help="Write the receipt as JSON, for docs/performance.md.")
@_JSON
@_QUIET
@click.pass_obj
def bench_kernels(console: Console, ops: tuple[str, ...], names: tuple[str, ...], **given: Any) -> None:
    """Measure kernels on K3's shapes, each after a check of its results.

    Prints time, share of the bound and peers for every shape. A kernel whose result is wrong is not timed; the command
    then ends with an error.
    """
    start(console, given)
    check_ops(ops)
    registry = _registry(console)
    named = find_kernels(names, registry.kernels)
    with held():  # imports torch
        from k3port.testing.bench import report, run
        from k3port.testing.bench.receipt import Receipt, write_receipt

    def keep(receipt: Receipt) -> None:
        if given["save"] is not None:
            _written(given["save"], lambda path: write_receipt(path, receipt))

    receipt = run.bench_kernels(
        registry.kernels,
        ops,
        named,
        quick=given["quick"],
        peers=given["peers"],
        progress=console.note,
        checkpoint=keep,
    )
    if console.json_mode:
        console.document({**receipt.to_record(), "warnings": console.warnings})
    else:
        for line in (*report.head_lines(receipt), "", *table([report.HEADER, *report.table_rows(receipt)])):
            console.line(line)
        for line in report.skipped_lines(receipt):
            console.line(line)
    failed = [item for item in receipt.skipped if item.failed]
    if failed:
        console.failure(
            NumericsError(
                f"{len({item.kernel for item in failed})} kernels failed the check before their timing",
                reasons=[f"{item.case}: {item.reason}" for item in failed],
                hint="k3port kernels check NAME looks closer",
            )
        )
        raise click.exceptions.Exit(ExitCode.NUMERICS)


@bench.command("tune", short_help="Find the best configuration of kernels for this GPU.")
@click.argument("names", nargs=-1, required=True, metavar="KERNEL...")
@_OPS
@_QUICK
@click.option(
    "--jobs",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Processes that compile what is tried next.",
)
@click.option("--save", is_flag=True, help="Write what was found into the configuration files of this k3port.")
@_JSON
@_QUIET
@click.pass_obj
def bench_tune(console: Console, names: tuple[str, ...], ops: tuple[str, ...], **given: Any) -> None:
    """Try the candidate configurations of each KERNEL on K3's shapes, and print the best ones.

    Each configuration has to give right results first. Kernels never tune themselves during a run.
    """
    start(console, given)
    check_ops(ops)
    registry = _registry(console)
    named = find_kernels(names, registry.kernels)
    with held():  # imports torch
        from k3port.testing.bench import run

    found: list[TuneReport] = []
    paths: list[Path] = []

    def keep(report: TuneReport) -> None:
        found.append(report)
        if given["save"]:
            paths[:] = run.save_entries(report)

    error: K3Error | None = None
    try:
        run.bench_tune(
            registry.kernels,
            named,
            ops,
            quick=given["quick"],
            jobs=given["jobs"],
            progress=console.note,
            checkpoint=keep,
        )
    except K3Error as exc:
        # What was found before is told first.
        if not found or not found[-1].cases:
            raise
        error = exc
    except BaseException:
        # Ctrl-C, or a failure that nobody foresaw; in JSON the one document is the error's.
        if found and found[-1].cases and not console.json_mode:
            _show_tuned(console, found[-1], paths, None)
        raise
    _show_tuned(console, found[-1], paths, error)
    if error is not None:
        console.failure(error)
        raise click.exceptions.Exit(error.exit_code)


def _show_tuned(console: Console, report: TuneReport, paths: Sequence[Path], error: K3Error | None) -> None:
    from k3port.testing.bench.config_file import config_text

    if console.json_mode:
        entries = {name: [dataclasses.asdict(e) for e in new] for name, new in report.entries.items()}
        document = {"machine": dataclasses.asdict(report.machine), "entries": entries, "cases": report.cases}
        failed = {} if error is None else {"error": error_record(error)}
        console.document({**document, "saved": [str(path) for path in paths], "warnings": console.warnings, **failed})
        return
    rows = [("configuration", "case", "in use µs", "best µs", "best")]
    for case in report.cases:
        best, used = case["best"], case["in_use"]
        times = (f"{used['microseconds']:.2f}", f"{best['microseconds']:.2f}")
        rows.append((case["name"], f"{case['slot']} {case['case']}", *times, str(best["config"])))
    for line in table(rows):
        console.line(line)
    for name, new in report.entries.items():
        written = [{"archs": [report.machine.arch], "when": e.when, "config": e.config} for e in new]
        console.text(config_text({"kernel": name, "entries": written}))
    for path in paths:
        console.note(f"written: {path}")


def _registry(console: Console) -> Registry:
    registry = default_registry()
    for problem in registry.problems:
        console.warn(problem)
    return registry


def _written(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file of the user's.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        write(path)
    except OSError as exc:
        raise OutputError(
            f"cannot write {path}", reasons=[exc.strerror or type(exc).__name__], hint="give a folder that exists"
        ) from exc
