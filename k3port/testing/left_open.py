"""What a kernel check leaves open: sentences for its report, so that a green one is not read as more than it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from k3port.oracle.spec import KernelSpec
from k3port.testing.contract.reference import contract_samples, fitted, op_contracts
from k3port.testing.contract.variants import has_variant
from k3port.testing.interpreter import DTYPES, small
from k3port.testing.subject import admits_dtype, is_triton
from k3port.testing.targets import ISAS, TARGETS

if TYPE_CHECKING:
    from k3port.testing.check import SuiteRun
    from k3port.testing.emulation import EmulationReport

INTERPRETER = "Triton's interpreter"
"""The place of a contract suite that ran interpreted."""
_VENDORS = (("nvidia", "NVIDIA"), ("amd", "AMD"))


def is_for(spec: KernelSpec, vendor: str) -> bool:
    """Whether the record admits devices of a vendor."""
    return not spec.requires.vendors or vendor in spec.requires.vendors


def gpu_name() -> str:
    """The product name of the GPU that is here, empty without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def needed_gpu(spec: KernelSpec) -> str:
    """What a kernel that runs nowhere else needs, in words."""
    names = [name for vendor, name in _VENDORS if vendor in spec.requires.vendors]
    return f"a GPU of {' or '.join(names) or 'its vendor'}"


def not_run(
    spec: KernelSpec,
    suites: Sequence[SuiteRun],
    emulations: Sequence[EmulationReport],
    isas: Sequence[str],
    targets: Sequence[str],
    mutate: int,
    dtypes: Sequence[str] = (),
) -> list[str]:
    """A sentence for each thing that a check did not do.

    Args:
        dtypes: those that were asked for; empty for all.
    """
    found: list[str] = []
    on_gpu = any(run.where.startswith("GPU") for run in suites)
    for name in [name for vendor, name in _VENDORS if vendor in spec.requires.vendors]:
        if not (on_gpu and (name == "NVIDIA") == (torch.cuda.is_available() and "NVIDIA" in gpu_name())):
            emulated = ": its code was executed in emulation only" if name == "AMD" and emulations else ""
            found.append(f"{name} hardware{emulated}")
    if not suites:
        found.append(f"the contract suite: {spec.name} needs {needed_gpu(spec)}")
    if not is_triton(spec):
        return found
    for run in suites:
        if run.where == INTERPRETER:
            found += _not_interpreted(spec, run, dtypes)
    if spec.parts:
        found.append(f"compilation: check the parts, {', '.join(spec.parts)}")
    elif missing := [name for name in TARGETS if name not in targets]:
        found.append(f"compilation for {', '.join(missing)}")
    if missing := [name for name in ISAS if name not in isas and is_for(spec, "amd")]:
        found.append(f"emulation of {', '.join(missing)}")
    if emulations:
        found.append(
            "in emulation: strided and permuted rows; invariants on large calls; in further dtypes, large samples"
        )
    if left_out := dict.fromkeys(sample for emulation in emulations for sample in emulation.left_out):
        found.append(f"in emulation, for their size: {', '.join(left_out)}")
    if emulations and not mutate:
        found.append("mutation (--mutate N)")
    return found


def _not_interpreted(spec: KernelSpec, run: SuiteRun, asked: Sequence[str]) -> list[str]:
    """What :func:`k3port.testing.interpreter.run_interpreted` leaves out to end in time, where the op has it at all."""
    # The interpreter's own order: the first dtype that the record admits gets the memory orders and the invariants.
    ordered = sorted((d for d in DTYPES if not asked or d in asked), key=lambda name: not admits_dtype(spec, name))
    ran = dict.fromkeys(case.dtype for case in run.report.ran)
    if not ran:
        return []
    contracts = op_contracts(spec.op)
    taken = [
        (contract, fitted(contract, sample, spec))
        for contract in contracts
        for sample in contract_samples(contract, getattr(torch, ordered[0]))
    ]
    with_rows = [s for contract, s in taken if small(s) and has_variant(s.args, contract.inputs, "strided")]
    parts = ["other memory orders"] if with_rows else []
    parts += ["invariants"] if any(contract.invariants for contract in contracts) else []
    found: list[str] = []
    if (others := [name for name in ran if name != ordered[0]]) and parts:
        found.append(f"in the interpreter, {'/'.join(others)}: {', '.join(parts)}")
    if with_rows:
        # Where every sample is adversarial, all of them get the orders.
        mixed = {s.adversarial for _, s in taken if small(s)} == {True, False}
        adversarial = mixed and any(s.adversarial for s in with_rows)
        more = "; adversarial samples in other memory orders" if adversarial else ""
        found.append(f"in the interpreter: unaligned rows{more}")
    if large := dict.fromkeys(repr(sample.name) for _, sample in taken if not small(sample)):
        found.append(f"in the interpreter, for their size: {', '.join(large)}")
    return found
