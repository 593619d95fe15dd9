"""``k3port kernels check``: what can be proved of one kernel on this machine, as a report for a pull request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click

from k3port.cli.console import Console
from k3port.cli.interrupts import held
from k3port.cli.options import MAX_SEED
from k3port.cli.plan import start
from k3port.errors import ExitCode, K3Error, NumericsError, UsageError
from k3port.plugins import default_registry
from k3port.settings import get_environment
from k3port.testing.kernel_code import prints_to_stderr
from k3port.testing.subject import DTYPES, find_subject
from k3port.testing.targets import ISAS, TARGETS, TPS

MAX_MUTANTS = 100_000
MAX_JOBS = 1024
MAX_SECONDS = 10**6


@click.command("check", short_help="Prove one kernel as far as this machine can.")
@click.argument("name")
@click.option(
    "--isa",
    "isas",
    multiple=True,
    type=click.Choice([*ISAS, "all", "none"]),
    help="AMD instruction set to emulate. Can be repeated. Default: all.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice([*TARGETS, "all", "none"]),
    help="Architecture to compile for. Can be repeated. Default: all.",
)
@click.option(
    "--tp",
    "tps",
    multiple=True,
    type=click.Choice([str(tp) for tp in TPS]),
    help="Ranks that the compiled shapes are split over. Can be repeated. Default: 8.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="Activation type to run with. Can be repeated. Default: all that the kernel admits.",
)
@click.option(
    "--mutate",
    metavar="N",
    type=click.IntRange(0, MAX_MUTANTS),
    default=0,
    show_default=True,
    help="Drop N single instructions per instruction set and count what the samples notice.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    show_default=True,
    help="Which instructions are dropped.",
)
@click.option("--all-configs", is_flag=True, help="Compile every tuned configuration, not only the chosen one.")
@click.option("--jobs", metavar="N", type=click.IntRange(1, MAX_JOBS), help="Compilers side by side. Default: cores.")
@click.option(
    "--timeout",
    metavar="S",
    type=click.IntRange(1, MAX_SECONDS),
    default=1800,
    show_default=True,
    help="Seconds for each part: the contract, the host code of compilation, one emulation.",
)
@click.option("--json", "json_mode", is_flag=True, help="Write one JSON document on stdout instead of text.")
@click.option("-v", "--verbose", is_flag=True, help="Print every sample, and tracebacks of internal errors.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing on stderr but errors.")
@click.pass_obj
def check(console: Console, name: str, **given: Any) -> None:
    """Check the kernel NAME of k3port or of a plugin and print a report in Markdown.

    Runs the contract of its op on every sample: on the CPU, in Triton's interpreter, or on the GPU of this machine.
    Compiles Triton kernels for every target, and executes their AMD machine code in emulation. A kernel for GPUs that
    is no Triton code needs a GPU of its vendor: without one nothing is run, and the exit code is 3.
    """
    start(console, given)
    isas, targets = (_chosen(given[key], every) for key, every in (("isas", ISAS), ("targets", TARGETS)))
    if given["mutate"] and not isas:
        raise UsageError("--mutate without an instruction set", hint="it drops instructions in emulation: give --isa")
    if get_environment(["TRITON_INTERPRET"]).get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        raise UsageError(
            "TRITON_INTERPRET is set in the environment, so that nothing could be compiled",
            hint="unset it: the check starts the interpreter by itself",
        )
    with prints_to_stderr():
        registry = default_registry()
    for problem in registry.problems:
        console.warn(problem)
    spec = find_subject(name, registry)
    # Imported here: this imports torch.
    with held():
        from k3port.testing.check import check_kernel
    result = check_kernel(
        spec,
        registry,
        isas=isas,
        targets=targets,
        tps=tuple(int(tp) for tp in given["tps"]) or (8,),
        dtypes=given["dtypes"],
        mutate=given["mutate"],
        seed=given["seed"],
        all_configs=given["all_configs"],
        jobs=given["jobs"] or os.cpu_count() or 1,
        timeout_s=given["timeout"],
        progress=console.note,
    )
    if console.json_mode:
        console.document({**result.to_dict(), "warnings": console.warnings})
    else:
        for line in result.lines(verbose=console.verbose):
            console.line(line)
    if result.faults:
        kind = NumericsError if result.exit_code == ExitCode.NUMERICS else K3Error
        console.failure(
            kind(
                f"kernel {name} does not keep its promises",
                reasons=result.faults,
                hint="the report names the part and the sample; docs/writing-a-kernel.md says how to read it",
            )
        )
    elif result.absent:
        console.failure(
            K3Error(
                f"kernel {name} was not run: it needs {result.absent}",
                hint="run the check on a machine with one; only kernels for CPUs and kernels in Triton run without",
            )
        )
    if result.exit_code != ExitCode.OK:
        raise click.exceptions.Exit(result.exit_code)


def _chosen(given: Sequence[str], every: tuple[str, ...]) -> tuple[str, ...]:
    """What a repeated option names, in the usual order; nothing given means everything.

    Raises:
        UsageError: ``none`` together with something.
    """
    if "none" in given and len(set(given)) > 1:
        raise UsageError("none together with others", hint="give none alone, or leave it out")
    if "none" in given:
        return ()
    return every if not given or "all" in given else tuple(name for name in every if name in given)
