"""Portable kernels on a machine without a GPU: Triton's interpreter, in a process of its own.

Triton decides while it is imported whether its functions are compiled or interpreted, so the switch must be in the
environment of a fresh process. :func:`run_interpreted` starts one and reads one JSON document a line from its stdout.

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
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from k3port.oracle.profile import load_profiles
from k3port.oracle.spec import KernelSpec
from k3port.plugins import make_registry
from k3port.testing.subject import admits_dtype

if TYPE_CHECKING:
    import torch

    from k3port.ops.contract import Sample
    from k3port.testing.suite import SuiteReport

DTYPES = ("float32", "bfloat16", "float16")
VARIANTS = ("plain", "strided", "permuted")
"""Without ``unaligned``, which means nothing here."""
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

    Returns:
        One report per kernel. A process that died leaves a report whose fault names the case that it was in.

    Raises:
        InterpreterFailed: an unknown name, or a process that failed outside of any kernel.
    """
    options = [
        *("--platform", platform, "--samples", samples),
        *("--dtypes", *dtypes, "--variants", *variants),
        *(["--plugins", *plugins] if plugins else []),
        *([] if invariants else ["--no-invariants"]),
    ]
    names = [kernel if isinstance(kernel, str) else kernel.name for kernel in kernels]
    reports: dict[str, SuiteReport] = {}
    # A kernel that ends the process takes those after it along: they get a process of their own.
    while missing := [name for name in names if name not in reports]:
        reports |= _run(missing, options, timeout_s)
    return [reports[name] for name in names]


def _run(names: Sequence[str], options: Sequence[str], timeout_s: float) -> dict[str, SuiteReport]:
    """One process; the reports of at least one kernel."""
    command = [
        *("env", "TRITON_INTERPRET=1", f"PYTHONPATH={os.pathsep.join(path or os.curdir for path in sys.path)}"),
        *(sys.executable, "-m", "k3port.testing.interpreter", *names, *options),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        output, errors, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as exc:
        output, errors, status = _text(exc.stdout), _text(exc.stderr), None
    reports = _read(output, errors, status)
    if not reports:
        raise InterpreterFailed(f"no report on {', '.join(names)}: {errors.strip()[-2000:]}")
    return reports


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _read(output: str, errors: str, status: int | None) -> dict[str, SuiteReport]:
    from k3port.testing.contract.sample import SampleReport
    from k3port.testing.suite import CaseReport, SuiteReport

    reports: dict[str, SuiteReport] = {}
    kernel, op, case = "", "", ("", "", "")
    for line in output.splitlines():
        # A line that was cut off by the end of the process says nothing.
        if not line.startswith("{") or not line.endswith("}"):
            continue
        item = json.loads(line)
        if "report" in item:
            report = SuiteReport.from_dict(item["report"])
            reports[report.kernel] = report
            kernel = ""
        else:
            kernel, op, case = item["kernel"], item["op"], item["case"]
    if kernel:
        how = "did not end in time" if status is None else f"ended with status {status}"
        hint = " (a wild address?)" if status is not None and status < 0 else ""
        last = errors.strip().splitlines()[-1:] or [""]
        fault = f"the interpreter's process {how}{hint} {last[0]}".rstrip()
        dtype, sample, variant = case
        crashed = SampleReport(kernel, op, None, dtype, sample, (), (fault,))
        reports[kernel] = SuiteReport(kernel, (CaseReport(dtype, None, sample, variant, 0.0, crashed),))
    return reports


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
    """The work of the process: one line of JSON before each case, one with the report after each kernel."""
    parser = argparse.ArgumentParser(prog="python -m k3port.testing.interpreter", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="KERNEL")
    parser.add_argument("--platform", default="h200")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--samples", default="k3port.testing.interpreter:small")
    parser.add_argument("--plugins", nargs="+", default=())
    parser.add_argument("--no-invariants", action="store_true")
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

    from k3port.testing.suite import SuiteReport, run_suite

    modules = [importlib.import_module(name) for name in options.plugins]
    registry = make_registry(modules)
    target = load_profiles()[options.platform].target()

    def tell(**values: Any) -> None:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()

    by_name = {spec.name: spec for spec in registry.kernels}
    unknown = [name for name in options.names if name not in by_name]
    if unknown:
        parser.error(f"no kernel {', '.join(unknown)}; {'; '.join(registry.problems) or 'no problem with plugins'}")
    for name in options.names:
        spec = by_name[name]

        def started(*case: str, spec: KernelSpec = spec) -> None:
            tell(kernel=spec.name, op=spec.op, case=case)

        run = partial(run_suite, spec, registry.kernels, target=target, started=started)
        # What the record admits comes first: that dtype gets the memory orders and the invariants.
        dtypes = sorted(options.dtypes, key=lambda dtype: not admits_dtype(spec, dtype))
        first, *others = (getattr(torch, dtype) for dtype in dtypes)
        order, *orders = options.variants
        wanted = _load(options.samples)
        cases = run(dtypes=[first], variants=[order], samples=wanted, invariants=not options.no_invariants).cases
        cases += run(dtypes=others, variants=[order], samples=wanted, invariants=False).cases
        if orders:
            cases += run(dtypes=[first], variants=orders, samples=_ordinary(spec, first, wanted), invariants=False).ran
        tell(report=SuiteReport(name, cases).to_dict())
    return 0


if __name__ == "__main__":
    sys.exit(main())
