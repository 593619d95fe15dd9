"""How the Triton kernels are launched, for which GPU, and with which tuned configuration."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel

from k3port.backends.portable.tuning import Config, entries

INTERPRETER = "interpreter"
"""Architecture name under Triton's interpreter."""


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up. Triton's own is wrapped for kernels and takes the host ten times as long."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is not less than ``n``, for ``n`` of at least 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Lookup:
    """One look-up of a tuned configuration: the file's name in ``configs/``, the axes it was asked with, the answer."""

    name: str
    axes: tuple[tuple[str, int], ...]
    config: tuple[tuple[str, int], ...]


_pretended: list[str] = []
_forced: list[tuple[str, Config]] = []
_watching: list[list[Lookup]] = []


@functools.cache
def _device_arch() -> str:
    if knobs.runtime.interpret:
        return INTERPRETER
    driver: Any = triton.runtime.driver
    target = driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch).split(":", 1)[0]


def arch() -> str:
    """Architecture that kernels are launched for: ``sm_90``, ``gfx950``, ``interpreter``."""
    return _pretended[-1] if _pretended else _device_arch()


@functools.lru_cache(maxsize=65536)
def _tuned(kernel: str, arch_name: str, axes: tuple[tuple[str, int], ...]) -> Config:
    return next(entry.config for entry in entries(kernel) if entry.fits(arch_name, dict(axes)))


def tuned(kernel: str, **axes: int) -> Config:
    """The configuration of ``kernel`` for these axis sizes on the current architecture."""
    for name, config in reversed(_forced):
        if name == kernel:
            return config
    found = _tuned(kernel, arch(), tuple(axes.items()))
    if _watching:
        lookup = Lookup(kernel, tuple(axes.items()), tuple(found.items()))
        for lookups in _watching:
            if lookup not in lookups:
                lookups.append(lookup)
    return found


@contextmanager
def watch_tuned() -> Iterator[list[Lookup]]:
    """The look-ups made inside, each once, in order. A forced configuration is not looked up."""
    found: list[Lookup] = []
    _watching.append(found)
    try:
        yield found
    finally:
        # By identity: two watchers that saw the same are equal lists.
        _watching[:] = [lookups for lookups in _watching if lookups is not found]


@contextmanager
def pretend_arch(name: str) -> Iterator[None]:
    """Launches made inside are made for another architecture; for compiling and emulating without the GPU."""
    _pretended.append(name)
    try:
        yield
    finally:
        _pretended.pop()


@contextmanager
def force_config(kernel: str, config: Config) -> Iterator[None]:
    """Launches of one kernel made inside use this configuration; for tuning and for compiling all of them."""
    _forced.append((kernel, config))
    try:
        yield
    finally:
        _forced.pop()


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], CompiledKernel]] = {}
"""The function itself (which keeps its identity from being used again), its constants, what they were compiled to."""


def launch(function: Any, grid: tuple[int, int, int], *args: Any, **constants: Any) -> None:
    """``function[grid](*args, **constants)``, where ``constants`` are the function's last arguments, all of them, and
    the launch options.

    A repeated launch goes to the compiled kernel at once. Triton's own way there takes the host twice as long: it looks
    up environment variables, prints the options into its key, and compares all global constants of the kernel.

    Args:
        function: a ``triton.jit`` function.
        args: tensors, whole numbers, floats and None for the arguments before the constants.
    """
    if _pretended or not isinstance(function, triton.JITFunction):
        function[grid](*args, **constants)
        return
    driver: Any = triton.runtime.driver.active
    device = driver.get_current_device()
    # At least as fine as what Triton compiles anew for: see _kind.
    key = (id(function), device, tuple(constants), *map(_kind, args), *constants.values())
    known = _compiled.get(key)
    if known is not None:
        known[2][grid](*args, *known[1], stream=driver.get_current_stream(device))
        return
    compiled = function[grid](*args, **constants)
    names = function.arg_names[len(args) :]
    if isinstance(compiled, CompiledKernel) and all(name in constants for name in names):
        _compiled[key] = function, tuple(constants[name] for name in names), compiled


def _kind(x: Any) -> Any:
    """All that Triton's compiler may know of an argument: the type; whether a number is 1 or a multiple of 16 and how
    many bits it has; whether an address is a multiple of 16 and, on AMD, offsets fit 32 bits."""
    kind = x.__class__
    if kind is int:
        return x if x == 1 else (x & 15 == 0, -(1 << 31) <= x < 1 << 31, x < 1 << 63)
    if x is None or kind is float or kind is bool:
        return kind
    try:
        if _pointer_ranges():
            return x.dtype, x.data_ptr() & 15 == 0, x.untyped_storage().size() < 1 << 31
        return x.dtype, x.data_ptr() & 15
    except AttributeError:
        # A number of another library: its own value is the finest key.
        return kind, x


@functools.cache
def _pointer_ranges() -> bool:
    return _device_arch().startswith("gfx")
