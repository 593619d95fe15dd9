"""The kernel that a check is about, by name. Without torch, so that a wrong name is told at once."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterable, Sequence

from packaging.requirements import Requirement

from k3port.errors import K3Error, UsageError
from k3port.oracle.spec import KernelSpec
from k3port.plugins import Registry

DTYPES = ("float32", "bfloat16", "float16", "float64")
_NAMED = 5
"""Most kernels that a hint names."""


def find_subject(name: str, registry: Registry) -> KernelSpec:
    """A built kernel of the registry whose checks can run here.

    Raises:
        UsageError: no name, no such kernel, or one that is declared without an adapter: there is nothing to run.
        K3Error: it is written in Triton, which is not installed.
    """
    if not name.strip():
        raise UsageError("NAME is empty", hint="give a kernel; k3port kernels list shows all")
    known = {spec.name: spec for spec in registry.kernels}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "k3port kernels list shows all; a plugin has to be installed"
        # Only what is said of this very kernel: what is wrong with others is a warning, where warnings are wanted.
        whole = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)")
        lost = [problem for problem in registry.problems if whole.search(problem)]
        if lost:
            hint = "correct its record; k3port kernels list shows the others"
        raise UsageError(f"no kernel {name!r}", reasons=lost, hint=hint)
    spec = known[name]
    if not spec.is_built:
        others = sorted(s.name for s in registry.kernels if s.op == spec.op and s.is_built)
        raise UsageError(
            f"kernel {name} is declared but not built in this version: there is nothing to check",
            hint=f"built kernels of {spec.op}: {_few(others) or 'none'}",
        )
    if is_triton(spec) and importlib.util.find_spec("triton") is None:
        raise K3Error(
            f"kernel {name} is written in Triton, which is not installed",
            hint="pip install triton; it needs no GPU here",
        )
    return spec


def _few(names: Sequence[str]) -> str:
    """The names, the first ones where there are many."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def is_triton(spec: KernelSpec) -> bool:
    """Whether the kernel is made of Triton code of its own package, so that it can be interpreted and compiled."""
    return any(Requirement(text).name == "triton" for text in spec.requires.packages)


def admits_dtype(spec: KernelSpec, name: str) -> bool:
    """Whether the record admits activations of a dtype."""
    return not spec.requires.dtypes or name in spec.requires.dtypes


def runs_on_cpu(spec: KernelSpec) -> bool:
    """Whether the kernel takes CPU tensors as it is."""
    return not spec.requires.vendors or "cpu" in spec.requires.vendors


def gpu_kernels(specs: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    """The built kernels that the contract tests on a CPU cannot judge: written in Triton, or not for the CPU."""
    return tuple(spec for spec in specs if spec.is_built and (is_triton(spec) or not runs_on_cpu(spec)))


def triton_kernels(specs: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    """The built kernels whose records ask for Triton; a composite's parts are kernels of their own."""
    return tuple(spec for spec in specs if spec.is_built and not spec.parts and is_triton(spec))
