"""Kernels that people switched off by name or pattern."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from k3port.errors import UsageError


def excluded_kernels(
    patterns: Sequence[str], kernels: Iterable[str], pins: Mapping[str, str], *, source: str = "K3PORT_DISABLE"
) -> dict[str, str]:
    """Why each kernel may not be used, for those that the patterns name.

    A pin chooses one kernel, a pattern excludes a family: the pin wins. Where both name the very same kernel, neither
    can be right.

    Args:
        patterns: names, or patterns such as ``rocm.aiter_*``.
        kernels: all names of the registry.
        pins: kernel by op.
        source: where the patterns come from, for messages.

    Raises:
        UsageError: a kernel is pinned and excluded by name, or a name or pattern fits no kernel.
    """
    names = sorted(kernels)
    clashes = [f"{op}={kernel}" for op, kernel in pins.items() if kernel in patterns]
    if clashes:
        raise UsageError(
            f"a pin (--kernel or K3PORT_KERNELS) names what {source} excludes",
            reasons=clashes,
            hint="drop it from one of the two",
        )
    result: dict[str, str] = {}
    for pattern in patterns:
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "k3port kernels list shows all names"
            raise UsageError(f"{source}: no kernel is named {pattern}", hint=hint)
        result.update((name, f"{source}={pattern}") for name in fitting if name not in pins.values())
    return result
