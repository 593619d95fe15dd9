"""What a measurement is about, by name. Without torch, so that a wrong name is told at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from k3port.errors import UsageError
from k3port.ops.catalog import OPS
from k3port.oracle.spec import KernelSpec
from k3port.testing.subject import is_triton


def check_ops(ops: Iterable[str]) -> None:
    """Raises UsageError for a name that is no op."""
    for op in ops:
        if op not in OPS:
            near = difflib.get_close_matches(op, OPS, n=1)
            raise UsageError(
                f"unknown op {op!r}", hint=f"did you mean {near[0]}?" if near else f"ops: {', '.join(OPS)}"
            )


def find_kernels(names: Sequence[str], kernels: Iterable[KernelSpec]) -> list[KernelSpec]:
    """The records of built kernels, in the order of ``names``.

    Raises:
        UsageError: there is no such kernel, or it is only declared.
    """
    known = {spec.name: spec for spec in kernels}
    found = []
    for name in names:
        if name not in known:
            near = _of_no_backend(name, known.values()) or difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"no kernel {name!r}", hint=f"did you mean {near[0]}?" if near else "k3port kernels list shows all"
            )
        if not known[name].is_built:
            raise UsageError(
                f"kernel {name} is declared but not built in this version: there is nothing to measure",
                hint=f"k3port kernels list --op {known[name].op} says which are built",
            )
        found.append(known[name])
    return found


def _of_no_backend(name: str, kernels: Iterable[KernelSpec]) -> list[str]:
    """Built kernels with a name that lacks its backend; first those in Triton, which can be measured and tuned."""
    found = [spec for spec in kernels if spec.is_built and spec.name.partition(".")[2] == name]
    return [spec.name for spec in sorted(found, key=lambda spec: not is_triton(spec))]
