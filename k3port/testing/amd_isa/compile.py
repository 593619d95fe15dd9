"""Compiles Triton kernels for an AMD architecture without that GPU, and keeps the translated programs."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from k3port.testing.amd_isa.core import EmuError
from k3port.testing.amd_isa.program import Program
from k3port.testing.launches import gpu_target, unwrapped

TYPES: dict[torch.dtype, str] = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.bool: "i1",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
_KEPT = 256
_RANGE_32 = 2**31 - 1


@dataclass(frozen=True)
class Compiled:
    """A translated kernel, Triton's metadata, and the warnings that compiling it gave."""

    program: Program
    metadata: Any
    warned: tuple[warnings.WarningMessage, ...]
    shown: dict[Any, Any] = field(default_factory=dict)
    """Python's record of warnings already shown: the usual filters show each once."""


_cache: OrderedDict[tuple[Any, ...], Compiled] = OrderedDict()


def jit_function(kernel: Any) -> JITFunction[Any]:
    """The plain kernel under autotuning and heuristics."""
    try:
        return unwrapped(kernel)
    except TypeError:
        raise EmuError(f"{kernel!r} is no Triton kernel, or one for Triton's interpreter") from None


def type_of(v: Any) -> str:
    """Triton's type of an argument.

    Raises:
        EmuError: Triton kernels take no such argument.
    """
    if isinstance(v, torch.Tensor) and v.dtype in TYPES:
        return "*" + TYPES[v.dtype]
    if isinstance(v, bool):
        return "u1"
    if isinstance(v, int):
        return "i32" if -(2**31) <= v < 2**31 else "i64" if v < 2**63 else "u64"
    if isinstance(v, float):
        return "fp32"
    raise EmuError(f"no Triton type for the argument {v!r}")


def attributes(v: Any) -> list[list[Any]]:
    """What Triton's launcher would tell the compiler of an argument: alignment to 16, 32-bit range of a pointer."""
    if isinstance(v, torch.Tensor):
        found: list[list[Any]] = [["tt.divisibility", 16]] if v.data_ptr() % 16 == 0 else []
        return [*found, ["tt.pointer_range", 32]] if v.untyped_storage().nbytes() <= _RANGE_32 else found
    if isinstance(v, int) and not isinstance(v, bool) and v % 16 == 0:
        return [["tt.divisibility", 16]]
    return []


def compile_kernel(
    kernel: JITFunction[Any],
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    attrs: Mapping[str, list[list[Any]]],
    arch: str,
    ulp_noise: bool,
    options: Mapping[str, Any],
) -> Compiled:
    """Compiles and translates, or finds it done before in this process. Triton's warnings are given either way (unless
    its own cache on disk had the kernel: then there are none)."""
    names = kernel.arg_names
    constants = tuple((k, repr(v), getattr(v, "cache_key", None)) for k, v in constexprs.items())
    settings = arch, ulp_noise, repr(sorted(options.items()))
    key = (kernel.cache_key, tuple(signature.items()), constants, repr(attrs), *settings)
    found = _cache.get(key)
    if found is None:
        source = ASTSource(
            fn=kernel,
            signature={n: "constexpr" if n in constexprs else signature[n] for n in names},
            constexprs={(names.index(k),): v for k, v in constexprs.items()},
            attrs={(names.index(k),): v for k, v in attrs.items()},
        )
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            done: Any = triton.compile(source, target=gpu_target(arch), options=dict(options))
        program = Program(done.asm["amdgcn"], arch, done.metadata.name, ulp_noise)
        found = _cache[key] = Compiled(program, done.metadata, tuple(warned))
        if len(_cache) > _KEPT:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    for w in found.warned:
        warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, registry=found.shown)
    return found
