"""Compiles one recorded launch for its target and keeps what is worth knowing of the result."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from subprocess import CalledProcessError
from typing import Any

import triton
from triton import knobs
from triton.compiler import ASTSource

from k3port.testing import kernel_code
from k3port.testing.launches import Launch, PortableLaunch, gpu_target
from k3port.testing.xcompile.measure import Resources, amd_resources, nvidia_resources, widened


@dataclass(frozen=True)
class Compiled:
    """The result for one launch on one target.

    Attributes:
        error: why it does not compile, in the compiler's words; empty where it does.
        warnings: what the compiler warned about, Python's warnings and lines on stderr.
        shared: bytes of shared memory (LDS) of a block.
        resources: None where it does not compile.
        seconds: of the compilation.
        widened: kinds of 8-bit floats that are multiplied in another type (:func:`measure.widened`).
        lasting: whether it would be the same again: False where memory, disk or processes of this machine gave out.
    """

    error: str
    warnings: tuple[str, ...]
    shared: int
    num_warps: int
    resources: Resources | None
    seconds: float
    lasting: bool = True
    widened: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Compiled:
        resources = values["resources"]
        return cls(
            **{
                **values,
                "warnings": tuple(values["warnings"]),
                "widened": tuple(values["widened"]),
                "resources": None if resources is None else Resources(**resources),
            }
        )


def compile_launch(launch: Launch) -> Compiled:
    """Compiles without Triton's own cache: a cached result would not repeat its warnings."""
    target = gpu_target(launch.arch)
    source = ASTSource(launch.function, dict(launch.signature), dict(launch.constants), dict(launch.attributes))
    start = time.perf_counter()
    kernel, error, lasting = None, "", True
    with _compiler_state(), caught() as said:
        try:
            kernel = triton.compile(source, target=target, options=dict(launch.options))
        except Exception as exc:  # whatever the compiler raises is a finding
            error, lasting = kernel_code.said(exc), not _is_of_this_machine(exc)
    seconds = time.perf_counter() - start
    if kernel is None:
        return Compiled(error, said.warnings(), 0, int(launch.options.get("num_warps", 4)), None, seconds, lasting)
    shared, num_warps = kernel.metadata.shared, kernel.metadata.num_warps
    if target.backend == "hip":
        resources = amd_resources(kernel.asm["amdgcn"], launch.arch, shared, num_warps)
    else:
        resources = nvidia_resources(kernel.asm["ptx"], said.output)
    found = widened(kernel.asm["ttir"], resources.matrix)
    return Compiled("", said.warnings(), shared, num_warps, resources, seconds, widened=found)


def _is_of_this_machine(exc: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says nothing of the kernel: Triton wraps what happens below it."""
    seen: list[BaseException] = []
    while exc is not None and exc not in seen:
        # A negative exit status is the signal that ended an assembler.
        killed = isinstance(exc, CalledProcessError) and exc.returncode < 0
        if killed or isinstance(exc, OSError | MemoryError):
            return True
        seen.append(exc)
        exc = exc.__cause__ or exc.__context__
    return False


def compile_portable(launch: PortableLaunch) -> Compiled:
    """:func:`compile_launch` in another process."""
    return compile_launch(launch.launch())


@contextlib.contextmanager
def _compiler_state() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory(prefix="k3port-xcompile-") as folder,
        knobs.cache.scope(),
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
    ):
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        # The report of ptxas, which Triton runs with -v anyway.
        knobs.nvidia.dump_ptxas_log = True
        yield


class Said:
    """What the compiler said: Python's warnings, its output, and what its C++ parts wrote to stderr."""

    def __init__(self) -> None:
        self.caught: list[warnings.WarningMessage] = []
        self.output = ""
        self.errors = ""

    def warnings(self) -> tuple[str, ...]:
        found = [str(item.message) for item in self.caught]
        found += [line.strip() for line in self.errors.splitlines() if "warning" in line.lower()]
        return tuple(dict.fromkeys(found))

    def others(self) -> str:
        """What was printed and is no warning, for a caller that shows it after all."""
        lines = self.output.splitlines(keepends=True)
        lines += [line for line in self.errors.splitlines(keepends=True) if "warning" not in line.lower()]
        return "".join(lines)


@contextlib.contextmanager
def caught() -> Iterator[Said]:
    """Inside, what Triton's compiler says is kept; so is all that others print."""
    said, output = Said(), io.StringIO()
    caught: list[warnings.WarningMessage] = []
    with tempfile.TemporaryFile() as errors:
        sys.stderr.flush()
        kept = os.dup(2)
        os.dup2(errors.fileno(), 2)
        try:
            with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output):
                warnings.simplefilter("always")
                yield said
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            errors.seek(0)
            said.caught, said.output = list(caught), output.getvalue()
            said.errors = errors.read().decode(errors="replace")
