"""Runs Triton kernels in the emulator, in place on CPU tensors: one by one, or all that are launched in a context.

As in a launch on a GPU, the alignment of pointers, their 32-bit range, divisibility by 16 and the value 1 specialise a
kernel, so buffer instructions and direct-to-LDS copies occur.
"""

from __future__ import annotations

import inspect
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from triton import knobs
from triton.backends.amd.compiler import HIPOptions
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from k3port.backends.portable.launch import pretend_arch
from k3port.testing.amd_isa.build import ARCHS
from k3port.testing.amd_isa.compile import Compiled, attributes, compile_kernel, jit_function, type_of
from k3port.testing.amd_isa.core import WAVE_SIZE, EmuError, Step, nothing
from k3port.testing.amd_isa.execute import MAX_INSTRUCTIONS, Outcome, Trace, execute
from k3port.testing.amd_isa.memory import GlobalMemory
from k3port.testing.amd_isa.program import Program
from k3port.testing.launches import ENABLE_FP_FUSION

_PACK = {
    "i1": "<b", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q",
    "u1": "<B", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q",
    "fp32": "<f", "f32": "<f", "fp64": "<d", "f64": "<d", "fp16": "<e", "f16": "<e",
}  # fmt: skip
_OTHER_OPTIONS = {"maxnreg", "warp_size"}  # accepted by Triton's launcher, without meaning on AMD
Grid = Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]


@dataclass(frozen=True)
class LaunchReport:
    """What one emulated launch did.

    ``races`` are sentences with the instruction and its source line; ``unknown`` are the opcodes in the kernel that are
    not modelled (none of them was reached).
    """

    name: str
    arch: str
    grid: tuple[int, int, int]
    instructions: int
    """Executed, of all waves."""
    static_instructions: int
    """In the kernel."""
    compile_s: float
    run_s: float
    lds_bytes: int
    races: tuple[str, ...]
    unknown: Mapping[str, str]
    num_warps: int
    longest: int
    """Most instructions that one wave executed."""


class Observer(Protocol):
    """Sees every launch, and may replace the steps of a program (the mutation run)."""

    def code(self, program: Program) -> Sequence[Step]: ...
    def limit(self, program: Program) -> int: ...
    def done(self, program: Program, report: LaunchReport) -> None: ...


_reports: list[list[LaunchReport]] = []
_observers: list[Observer] = []


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


def _argument_bytes(v: Any, t: str) -> bytes:
    if isinstance(v, torch.Tensor):
        return struct.pack("<Q", v.data_ptr())
    if t == "bf16":
        return torch.tensor(float(v), dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    return struct.pack(_PACK[t], float(v) if _PACK[t][1] in "fde" else int(v))


def _hidden(grid: tuple[int, int, int], num_warps: int) -> dict[str, int]:
    """What the runtime passes behind the arguments (``tl.num_programs`` reads it); the kinds not here are zero."""
    found = {"hidden_grid_dims": 3}
    for axis, blocks, threads in zip("xyz", grid, (WAVE_SIZE * num_warps, 1, 1), strict=True):
        found[f"hidden_block_count_{axis}"], found[f"hidden_group_size_{axis}"] = blocks, threads
    return found


def _kernarg(
    compiled: Compiled, values: Mapping[str, Any], types: Mapping[str, str], grid: tuple[int, int, int]
) -> tuple[bytes, GlobalMemory]:
    """The block of arguments, and the memory that they reach."""
    all_slots, memory = compiled.program.kernel.args, GlobalMemory()
    slots = [slot for slot in all_slots if not slot[2].startswith("hidden_")]
    if len(slots) < len(values):
        raise EmuError(f"{compiled.program.name} has {len(slots)} arguments in its metadata, not {len(values)}")
    block = bytearray(max((offset + size for offset, size, _ in all_slots), default=0))
    hidden = _hidden(grid, compiled.metadata.num_warps)
    for offset, size, kind in all_slots:
        block[offset : offset + size] = hidden.get(kind, 0).to_bytes(size, "little")
    for (offset, _, _), (name, v) in zip(slots, values.items(), strict=False):
        if isinstance(v, torch.Tensor):
            if v.device.type != "cpu":
                raise EmuError(f"argument {name} is on {v.device}; the emulator takes CPU tensors")
            storage = v.untyped_storage()
            memory.add(storage.data_ptr(), storage.nbytes(), name)
        data = _argument_bytes(v, types[name])
        block[offset : offset + len(data)] = data
    return bytes(block), memory


def _specialised(
    kernel: JITFunction[Any], values: dict[str, Any], constexprs: dict[str, Any], specialize: bool
) -> dict[str, list[list[Any]]]:
    """Moves None and (if ``specialize``) integers 1 to the constants; gives the attributes of the rest."""
    found: dict[str, list[list[Any]]] = {}
    for p in kernel.params:
        if p.name not in values:
            continue
        v = values[p.name]
        one = isinstance(v, int) and not isinstance(v, bool) and v == 1
        if v is None or (one and specialize and not p.do_not_specialize):
            constexprs[p.name] = values.pop(p.name)
        elif specialize and not p.do_not_specialize and attributes(v):
            aligned = not p.do_not_specialize_on_alignment
            known = [a for a in attributes(v) if aligned or a[0] != "tt.divisibility"]
            if known:
                found[p.name] = known
    return found


def run_kernel(
    kernel: Any,
    signature: Mapping[str, str] | None,
    constexprs: Mapping[str, Any],
    grid: Grid,
    args: Sequence[Any] | Mapping[str, Any],
    arch: str = "gfx950",
    num_warps: int = 4,
    *,
    specialize: bool = True,
    race_check: bool = True,
    ulp_noise: bool = False,
    skip: int | None = None,
    max_instructions: int = MAX_INSTRUCTIONS,
    trace: Trace | None = None,
    **options: Any,
) -> LaunchReport:
    """Runs one kernel, in place on CPU tensors.

    Args:
        kernel: the ``triton.jit`` function.
        signature: Triton types (``*bf16``, ``i32``) of arguments whose type is not the one that their value suggests.
        constexprs: values of the constexpr arguments.
        grid: up to three sizes, or a function of all arguments that gives them.
        args: values of the other arguments, in order or by name.
        specialize: compile for the alignment and values of these arguments.
        race_check: report LDS races.
        ulp_noise: errors of up to one ulp in reciprocal, roots, exp2, log2, sin, cos.
        skip: number of an instruction that is left out.
        max_instructions: per wave; more is taken for a hang.
        trace: called after each instruction with the wave and the number of the instruction.
        options: of the AMD backend: ``num_stages``, ``waves_per_eu``, ``matrix_instr_nonkdim``, ``kpack``, ...

    Raises:
        EmuError: the kernel does something forbidden or not modelled; compile errors are Triton's.
    """
    function = jit_function(kernel)
    options.setdefault("enable_fp_fusion", ENABLE_FP_FUSION)
    constants = dict(constexprs)
    names = [n for n in function.arg_names if n not in constants]
    given = dict(args) if isinstance(args, Mapping) else dict(zip(names, args, strict=True))
    if set(given) != set(names):
        raise EmuError(f"{function.__name__} needs values for {names}, there are {list(given)}")
    values = {n: given[n] for n in names}
    attrs = _specialised(function, values, constants, specialize)
    annotated = {p.name: p.annotation_type for p in function.params}
    types = {n: (signature or {}).get(n) or annotated[n] or type_of(v) for n, v in values.items()}
    started = time.perf_counter()
    compiled = compile_kernel(function, types, constants, attrs, arch, ulp_noise, {"num_warps": num_warps, **options})
    compile_s = time.perf_counter() - started
    program, metadata = compiled.program, compiled.metadata
    if getattr(metadata, "global_scratch_size", 0):
        raise EmuError(f"{program.name} needs global scratch, which is not modelled")
    if getattr(metadata, "num_ctas", 1) != 1:
        raise EmuError("clusters are not modelled")
    sizes = [int(n) for n in (grid({**constants, **values}) if callable(grid) else grid)]
    x, y, z = (*sizes, 1, 1)[:3]
    block, memory = _kernarg(compiled, values, types, (x, y, z))
    limit, code = max_instructions, list(program.code)
    for observer in _observers:
        limit, code = min(limit, observer.limit(program)), list(observer.code(program))
    if skip is not None:
        if not 0 <= skip < len(code):
            raise EmuError(f"{program.name} has no instruction {skip} to skip, it has {len(code)}")
        code[skip] = nothing
    started = time.perf_counter()
    outcome: Outcome = execute(
        program, (x, y, z), metadata.num_warps, block, memory, metadata.shared,
        max_instructions=limit, trace=trace, race_check=race_check, code=code,
    )  # fmt: skip
    report = LaunchReport(
        name=program.name,
        arch=arch,
        grid=(x, y, z),
        instructions=outcome.instructions,
        static_instructions=len(program.code),
        compile_s=compile_s,
        run_s=time.perf_counter() - started,
        lds_bytes=metadata.shared,
        races=outcome.races,
        unknown=program.unknown,
        num_warps=metadata.num_warps,
        longest=outcome.longest,
    )
    for reports in _reports:
        reports.append(report)
    for observer in _observers:
        observer.done(program, report)
    return report


def _launch(
    function: JITFunction[Any], args: tuple[Any, ...], grid: Grid, kwargs: dict[str, Any], settings: Mapping[str, Any]
) -> LaunchReport:
    """``kernel[grid](*args, **kwargs)``: what is no argument of the kernel is an option of the backend."""
    options = {k: kwargs.pop(k) for k in list(kwargs) if k not in function.arg_names}
    for name in options:
        if name not in HIPOptions.__dataclass_fields__ and name not in _OTHER_OPTIONS:
            raise KeyError(f"Keyword argument {name} was specified but unrecognised")
    for name in _OTHER_OPTIONS:
        options.pop(name, None)
    bound = inspect.signature(function.fn).bind(*args, **kwargs)
    bound.apply_defaults()
    constexprs: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for p in function.params:
        v = bound.arguments[p.name]
        plain = v is None or isinstance(v, torch.Tensor | int | float)
        (values if plain and not p.is_constexpr else constexprs)[p.name] = v
    return run_kernel(function, None, constexprs, grid, values, **{**options, **settings})


@contextmanager
def emulate(
    arch: str,
    *,
    ulp_noise: bool = False,
    race_check: bool = True,
    skip: int | None = None,
    max_instructions: int = MAX_INSTRUCTIONS,
    specialize: bool = True,
) -> Iterator[list[LaunchReport]]:
    """Inside, ``kernel[grid](...)`` on CPU tensors runs in the emulator; yields the reports of the launches.

    An autotuned kernel takes its first configuration. Contexts nest: the inner settings count, and the outer list gets
    the reports too. See :func:`run_kernel` for the settings.

    Raises:
        EmuError: unknown architecture, or Triton's interpreter is on (kernels would run there instead).
    """
    if arch not in ARCHS:
        raise EmuError(f"no emulation of {arch}; there are {', '.join(ARCHS)}")
    if knobs.runtime.interpret:
        raise EmuError("Triton's interpreter is on; switch it off (TRITON_INTERPRET) before kernels are defined")
    settings = {
        "arch": arch, "ulp_noise": ulp_noise, "race_check": race_check, "skip": skip,
        "max_instructions": max_instructions, "specialize": specialize,
    }  # fmt: skip

    def run(self: JITFunction[Any], *args: Any, grid: Grid, warmup: bool = False, **kwargs: Any) -> LaunchReport:
        if warmup:
            raise EmuError("warm-up compiles without running; the emulator only runs")
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        return _launch(self, args, grid, kwargs, settings)

    def tune(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0]
        chosen = {**kwargs, **config.all_kwargs()}
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **chosen})
        return self.fn.run(*args, **chosen)

    before = JITFunction.run, Autotuner.run
    reports: list[LaunchReport] = []
    _reports.append(reports)
    JITFunction.run, Autotuner.run = run, tune
    try:
        with pretend_arch(arch):
            yield reports
    finally:
        JITFunction.run, Autotuner.run = before
        _reports.pop()
