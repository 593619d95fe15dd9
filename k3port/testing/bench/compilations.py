"""Counts what Triton compiles: after the first calls of a kernel, a request must compile nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import knobs


@dataclass
class Compilations:
    """Names of the kernels that were compiled, or loaded from the cache on disk, in order."""

    names: list[str] = field(default_factory=list)
    variants: list[tuple[Any, Any]] = field(default_factory=list)
    """The JIT function of each, and the key of the variant in the function's own cache."""

    def __len__(self) -> int:
        return len(self.names)

    def spills(self) -> int:
        """Most registers that any of them keeps in memory; known once the kernel was launched."""
        return max((_spills(function, key) for function, key in self.variants), default=0)

    def check_none(self) -> None:
        """Raises AssertionError with the names of what was compiled."""
        assert not self.names, f"compiled while it should have been warm: {', '.join(self.names)}"


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts compilations inside::

        run()  # the first call may compile
        with count_compilations() as compiled:
            run()
        compiled.check_none()

    A kernel that was compiled for these argument types is not counted again; trials of an autotuner are compilations.
    A hook that was there before is called as well.
    """
    found, before = Compilations(), knobs.runtime.jit_post_compile_hook

    def hook(**event: Any) -> bool | None:
        found.names.append(event["fn"].name)
        found.variants.append((event["fn"].jit_function, event["compile"]["key"]))
        return before(**event) if before is not None else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield found
    finally:
        knobs.runtime.jit_post_compile_hook = before


def _spills(function: Any, key: Any) -> int:
    for cache, *_ in function.device_caches.values():
        if key in cache:
            return getattr(cache[key], "n_spills", None) or 0
    return 0
