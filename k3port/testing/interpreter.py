"""Portable kernels on a machine without a GPU: Triton's interpreter, in a process of its own.

Triton decides while it is imported whether its functions are compiled or interpreted, so the switch must be in the
environment of a fresh process. :func:`run_interpreted` starts one and reads one JSON document a line from its stdout;
what kernels print goes to stderr.

What the interpreter does differently from a GPU, as found with Triton 3.6 and 3.9:

- ``tl.dot`` on bfloat16 multiplies the bits as integers: ``lib.dot`` converts first.
- float32 to bfloat16 is truncated, and subnormal numbers come out wrong: ``lib.cast`` rounds to nearest even.
- float32 to float8 is truncated too, without saturation: no help here, judge such kernels by the emulator or a GPU.
- In Triton 3.6 with NumPy 2.4, a number that was passed to the kernel cannot be the end of a ``range``: repaired below.
- A wild address is dereferenced and ends the process: the case in progress is reported.
- Programs run one after the other, so atomics and races never show; alignment does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from k3port.oracle.profile import load_profiles
from k3port.oracle.spec import KernelSpec
from k3port.plugins import make_registry
from k3port.testing.interpreter_process import Case, run_child
from k3port.testing.kernel_code import CASE_S, PART_S, Budget, prints_to_stderr
from k3port.testing.subject import admits_dtype

if TYPE_CHECKING:
    import torch

    from k3port.ops.contract import Sample
    from k3port.testing.suite import CaseReport, SuiteReport

DTYPES = ("float32", "bfloat16", "float16")
VARIANTS = ("plain", "strided", "permuted")
"""Without ``unaligned``, which means nothing here."""
MAX_DEATHS = 3
"""Cases of one kernel that may end their process, or not end, before the rest is given up."""
MAX_ELEMENTS = 1 << 19
"""Numbers in all arguments of the largest call that is interpreted: a tiny program takes 5 to 9 ms."""


class InterpreterFailed(RuntimeError):
    """The process could not do its work: a wrong name, or a Triton that cannot be imported."""


def small(sample: Sample) -> bool:
    """Calls that the interpreter is quick enough for."""
    from k3port.testing.contract.variants import tensors

    return sum(tensor.numel() for _, tensor in tensors(sample.args)) <= MAX_ELEMENTS


def run_interpreted(
    kernels: Sequence[str | KernelSpec],
    *,
    platform: str = "h200",
    dtypes: Sequence[str] = DTYPES,
    samples: str = "k3port.testing.interpreter:small",
    variants: Sequence[str] = VARIANTS,
    plugins: Sequence[str] = (),
    invariants: bool = True,
    timeout_s: float = 600,
    case_s: float = CASE_S,
) -> list[SuiteReport]:
    """Runs the contract suite of some kernels in Triton's interpreter.

    Args:
        kernels: names, or records with these names: built-in, of an installed plugin, or of ``plugins``.
        platform: whose profile the kernels' records are asked about, so that a kernel for GPUs is not refused.
        dtypes: names, such as ``bfloat16``. Strides and the order of calls do not depend on the dtype: the first one
            gets the invariants, and the ordinary samples (all, where every one is adversarial) get all variants in it.
            Everything else is called in the first variant alone.
        samples: ``module:function`` of a predicate on samples; empty takes all.
        plugins: modules with hooks that register more kernels; installed plugins are there anyway.
        timeout_s: seconds for all kernels together.
        case_s: seconds for one case.

    Returns:
        One report per kernel. A case that ended its process, or that did not end, is a fault; the cases after it run in
        a new process, up to :data:`MAX_DEATHS` times.

    Raises:
        InterpreterFailed: an unknown name, or a process that failed outside of any kernel.
    """
    options = [
        *("--platform", platform, "--samples", samples),
        *("--dtypes", *dtypes, "--variants", *variants),
        *(["--plugins", *plugins] if plugins else []),
        *([] if invariants else ["--no-invariants"]),
    ]
    end = time.monotonic() + timeout_s
    return [
        _interpreted(kernel if isinstance(kernel, str) else kernel.name, options, timeout_s, end, case_s)
        for kernel in kernels
    ]


def _interpreted(name: str, options: Sequence[str], timeout_s: float, end: float, case_s: float) -> SuiteReport:
    """One kernel; a case that ends its process, or does not end, is a fault, and the others get a new process."""
    from k3port.testing.suite import SuiteReport

    cases: list[CaseReport] = []
    for deaths in range(1, MAX_DEATHS + 1):
        done = [(case.dtype, case.sample, case.variant) for case in cases]
        found = run_child(name, options, done, end, case_s)
        cases += found.cases
        if found.over:
            break
        if found.case is None:
            raise InterpreterFailed(f"no report on {name}: {found.how}")
        if found.timed_out and time.monotonic() >= end:
            words = f"the whole part did not end within {timeout_s:g} s; what comes after it was not run"
        else:
            words = f"the interpreter's process {found.how}"
            words += f"; after {deaths} such cases the rest was not run" if deaths == MAX_DEATHS else ""
        cases.append(_crashed(name, found.op, found.case, words))
        if time.monotonic() >= end:
            break
    return SuiteReport(name, tuple(cases))


def _crashed(kernel: str, op: str, case: Case, fault: str) -> CaseReport:
    from k3port.testing.contract.sample import SampleReport
    from k3port.testing.suite import CaseReport

    dtype, sample, variant = case
    return CaseReport(dtype, None, sample, variant, 0.0, SampleReport(kernel, op, None, dtype, sample, (), (fault,)))


def _load(path: str) -> Callable[[Sample], bool] | None:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name) if module else None


def _ordinary(
    spec: KernelSpec, dtype: torch.dtype, wanted: Callable[[Sample], bool] | None
) -> Callable[[Sample], bool]:
    """Of the samples that are wanted, those that are not adversarial; all, where every one is."""
    from k3port.testing.contract.reference import contract_samples, op_contracts

    samples = [sample for contract in op_contracts(spec.op) for sample in contract_samples(contract, dtype)]
    taken = [sample for sample in samples if wanted is None or wanted(sample)]
    names = {sample.name for sample in taken if not sample.adversarial} or {sample.name for sample in taken}
    return lambda sample: sample.name in names and (wanted is None or wanted(sample))


def let_arguments_be_counts(interpreter: Any) -> None:
    """As Triton 3.9 does it: 3.6 converts arrays of one element to Python numbers in a way that NumPy 2.4 refuses."""
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def repaired(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = repaired


def main(arguments: Sequence[str] | None = None) -> int:
    """The work of the process: one line of JSON before each case and one after it, and a last one per kernel."""
    parser = argparse.ArgumentParser(prog="python -m k3port.testing.interpreter", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="KERNEL")
    parser.add_argument("--platform", default="h200")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--samples", default="k3port.testing.interpreter:small")
    parser.add_argument("--plugins", nargs="+", default=())
    parser.add_argument("--no-invariants", action="store_true")
    parser.add_argument("--case-seconds", type=float, default=CASE_S, metavar="S")
    parser.add_argument("--done", default="[]", help="cases to leave out, as JSON: lists of dtype, sample and variant")
    options = parser.parse_args(arguments)

    import torch
    from triton import knobs

    if not knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET=1 must be in the environment before Triton is imported")
    # Its default changes with Triton 3.10; every tool of the kit compiles and interprets the same way.
    if hasattr(knobs, "language") and hasattr(knobs.language, "default_fp_fusion"):
        knobs.language.default_fp_fusion = True
    let_arguments_be_counts(importlib.import_module("triton.runtime.interpreter"))
    torch.set_num_threads(1)

    protocol = sys.stdout
    with contextlib.ExitStack() as stack:
        # A stream of its own: whatever else is printed, by Python or by C, must not end up between the lines. Where
        # stdout is no file, nothing but Python can write there.
        with contextlib.suppress(OSError, ValueError):
            protocol = stack.enter_context(open(os.dup(sys.stdout.fileno()), "w", encoding="utf-8"))
        stack.enter_context(prints_to_stderr())
        registry = make_registry([importlib.import_module(name) for name in options.plugins])
        by_name = {spec.name: spec for spec in registry.kernels}
        unknown = [name for name in options.names if name not in by_name]
        if unknown:
            problems = "; ".join(registry.problems) or "no problem with plugins"
            parser.error(f"no kernel {', '.join(unknown)}; {problems}")
        for name in options.names:
            _suite(by_name[name], registry.kernels, options, protocol)
    return 0


def _suite(spec: KernelSpec, kernels: Sequence[KernelSpec], options: argparse.Namespace, protocol: IO[str]) -> None:
    import torch

    from k3port.testing.suite import run_suite

    def tell(**values: Any) -> None:
        protocol.write(json.dumps(values) + "\n")
        protocol.flush()

    done = {tuple(case) for case in json.loads(options.done)}
    run = partial(
        run_suite,
        spec,
        kernels,
        target=load_profiles()[options.platform].target(),
        started=lambda *case: tell(started=case, op=spec.op),
        skipped=lambda *case: case in done,
        # The process that started this one ends it where that is needed, also inside of C.
        budget=Budget(options.case_seconds, PART_S),
    )
    # What the record admits comes first: that dtype gets the memory orders and the invariants.
    dtypes = sorted(options.dtypes, key=lambda dtype: not admits_dtype(spec, dtype))
    first, *others = (getattr(torch, dtype) for dtype in dtypes)
    order, *orders = options.variants

    def finished(case: CaseReport) -> None:
        tell(case=dataclasses.asdict(case))

    wanted = _load(options.samples)
    run(finished=finished, dtypes=[first], variants=[order], samples=wanted, invariants=not options.no_invariants)
    run(finished=finished, dtypes=others, variants=[order], samples=wanted, invariants=False)
    if orders:
        # What is refused has been told.
        run(
            finished=lambda case: None if case.report is None else tell(case=dataclasses.asdict(case)),
            dtypes=[first],
            variants=orders,
            samples=_ordinary(spec, first, wanted),
            invariants=False,
        )
    tell(over=spec.name)


if __name__ == "__main__":
    sys.exit(main())
