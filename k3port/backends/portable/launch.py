"""How the Triton kernels are launched, for which GPU, and with which tuned configuration."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel

from k3port.backends.portable.tuning import Config, entries

INTERPRETER = "interpreter"
"""Architecture name under Triton's interpreter."""


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up. Triton's own is wrapped for kernels and takes the host ten times as long."""
    return -(-a // b)


@functools.lru_cache(maxsize=4096)
def power_of_2(n: int) -> int:
    """The least power of two that is not less than ``n``, for ``n`` of at least 1."""
    return 1 << (n - 1).bit_length()


def in_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """``x`` of two or three dimensions, or a copy of it where the numbers of a row ``x[i]`` do not lie side by side in
    order, and the distance from one row to the next."""
    distance, *within = x.stride()
    if within == ([1] if len(within) == 1 else [x.shape[2], 1]):
        return x, distance
    x = x.contiguous()
    return x, x.stride(0)


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
def _tuned(kernel: str, arch_name: str, **axes: int) -> Config:
    return next(entry.config for entry in entries(kernel) if entry.fits(arch_name, axes))


def tuned(kernel: str, **axes: int) -> Config:
    """The configuration of ``kernel`` for these axis sizes on the current architecture."""
    if _forced:
        for name, config in reversed(_forced):
            if name == kernel:
                return config
    found = _tuned(kernel, arch(), **axes)
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

    A repeated launch goes to the compiled kernel at once. Triton's own way there takes the host more than twice as
    long: it looks up environment variables, prints the options into its key, compares all global constants of the
    kernel, and asks the driver about every pointer.

    Args:
        function: a ``triton.jit`` function.
        args: tensors, whole numbers, floats and None for the arguments before the constants.
    """
    if _pretended or not isinstance(function, triton.JITFunction):
        function[grid](*args, **constants)
        return
    driver: Any = triton.runtime.driver.active
    device = driver.get_current_device()
    # At least as fine as what Triton compiles anew for: see _kinds.
    kinds, values = _kinds(args, device)
    place = (id(function), device, *constants, *constants.values(), *kinds)
    known = _compiled.get(place)
    hooks = knobs.runtime
    if known is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        found = function[grid](*args, **constants)
        names = function.arg_names[len(args) :]
        if UNKNOWN not in kinds and isinstance(found, CompiledKernel) and all(name in constants for name in names):
            _compiled[place] = function, tuple(constants[name] for name in names), found
        return
    last: tuple[Any, ...] = known[1]
    compiled: Any = known[2]
    stream = driver.get_current_stream(device)
    # What its own runner does, for which it first makes a function, and metadata for hooks that are not there.
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *last)


UNKNOWN = "unknown"
"""Kind of what only Triton itself can judge: a tensor on another device, a number of another library."""


def _kinds(args: tuple[Any, ...], device: int) -> tuple[list[Any], list[Any]]:
    """All that Triton's compiler may know of some arguments, and what the compiled kernel takes for them.

    It knows the type; whether a number is 1 or a multiple of 16 and how many bits it has; whether an address is a
    multiple of 16 and, on AMD, offsets fit 32 bits. The kernel takes the address of a tensor, anything else as it is.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    bits = 0
    for x in args:
        if isinstance(x, torch.Tensor):
            kinds.append(x.dtype if x.get_device() == device else UNKNOWN)
            x = x.data_ptr()
            bits |= x
        else:
            kinds.append(_number_kind(x))
        values.append(x)
    if bits & 15:
        # Seldom: mostly all of them are aligned.
        kinds.append(tuple(address & 15 == 0 for address, x in zip(values, args, strict=True) if x is not address))
    if _pointer_ranges():
        kinds.append(tuple(x.untyped_storage().size() < 1 << 31 for x in args if isinstance(x, torch.Tensor)))
    return kinds, values


@functools.lru_cache(maxsize=65536, typed=True)
def _number_kind(x: Any) -> Any:
    kind = x.__class__
    if kind is int:
        return x if x == 1 else (x & 15 == 0, -(1 << 31) <= x < 1 << 31, x < 1 << 63)
    return kind if x is None or kind in (float, bool) else UNKNOWN


@functools.cache
def _pointer_ranges() -> bool:
    return _device_arch().startswith("gfx")
