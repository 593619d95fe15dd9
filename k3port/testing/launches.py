"""Records the Triton launches of ordinary host code instead of running them: on CPU tensors, for GPUs not here.

Each launch is decoded by Triton's own binder for the target, so argument types, constants, divisibility and pointer
ranges are those that a launch on that GPU with the same arguments would be compiled for.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, create_function_from_signature

from k3port.backends.portable.launch import Lookup, pretend_arch, watch_tuned

ENABLE_FP_FUSION = True
"""Products and sums become FMA unless a launch says otherwise. Explicit: Triton's default depends on its version."""


@dataclass(frozen=True)
class FunctionRef:
    """A jit function by ``module`` and dotted ``name``: what another process can look up."""

    module: str
    name: str

    def resolve(self) -> JITFunction[Any]:
        """Imports the function, without what is wrapped around it (autotuner, heuristics).

        Raises:
            ImportError, AttributeError: it is not where it said it was.
        """
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return unwrapped(found)


@dataclass(frozen=True)
class Launch:
    """One recorded launch.

    Attributes:
        function: the jit function itself.
        signature: type by argument: ``*bf16``, ``i32``, ``fp32``, ``constexpr``, tuples for tuples.
        constants: value by path of the argument: ``(3,)`` is the fourth one. None and 1 are constants too.
        attributes: what is known of an argument, by path: ``tt.divisibility``, ``tt.pointer_range``.
        options: ``num_warps`` and the like as they were given, and ``enable_fp_fusion``.
        autotuned: the configuration that an autotuner would have tried; empty where there is none.
    """

    function: Any = field(repr=False)
    arch: str
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], list[Any]]
    options: Mapping[str, Any]
    grid: tuple[int, ...]
    autotuned: str = ""

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def ref(self) -> FunctionRef | None:
        """Where other processes find the function; None for one that was made inside another function."""
        module, name = self.function.fn.__module__, self.function.fn.__qualname__
        if module == "__main__" or "<locals>" in name:
            return None
        ref = FunctionRef(module, name)
        try:
            return ref if ref.resolve() is self.function else None
        except (ImportError, AttributeError):
            return None

    def constant(self, name: str) -> Any:
        """The constant value of one argument.

        Raises:
            KeyError: the argument is not a constant.
        """
        return self.constants[(self.function.arg_names.index(name),)]


@dataclass
class Recording:
    """What happened inside :func:`record`, in order: launches, and look-ups of tuned configurations."""

    arch: str
    launches: list[Launch] = field(default_factory=list)
    tuned: list[Lookup] = field(default_factory=list)


def gpu_target(arch: str) -> GPUTarget:
    """Triton's target of an architecture: ``sm_90`` is CUDA; gfx9 has waves of 64 lanes, gfx12 of 32.

    Raises:
        ValueError: no name of a GPU architecture.
    """
    if arch.startswith("sm_") and arch[3:].isdecimal():
        return GPUTarget("cuda", int(arch[3:]), 32)
    if arch.startswith("gfx") and len(arch) > 5:
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise ValueError(f"{arch!r} is no GPU architecture; names look like sm_90 or gfx950")


def unwrapped(function: Any) -> JITFunction[Any]:
    """The jit function inside autotuners and heuristics.

    Raises:
        TypeError: there is none.
    """
    while not isinstance(function, JITFunction):
        if not hasattr(function, "fn"):
            raise TypeError(f"{function!r} is no Triton function")
        function = function.fn
    return function


@contextmanager
def record(arch: str, *, every_autotuned: bool = False) -> Iterator[Recording]:
    """Inside, launches are recorded for ``arch`` and not run; what they would write keeps what it held before.

    Host code that reads a kernel's result back will see memory that nobody wrote.

    Args:
        every_autotuned: record a launch per configuration of an autotuner instead of the first one only.

    Raises:
        RuntimeError: Triton interprets in this process, so there are no jit functions.
        ValueError: no name of a GPU architecture.
    """
    if knobs.runtime.interpret:
        raise RuntimeError(
            "Triton's interpreter is on in this process: record launches in one without TRITON_INTERPRET"
        )
    target = gpu_target(arch)
    backend = make_backend(target)
    found = Recording(arch)
    labels: list[str] = []

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        found.launches.append(_decode(self, backend, arch, args, kwargs, grid, labels[-1] if labels else ""))

    def tune(self: Autotuner, *args: Any, **kwargs: Any) -> None:
        for config in self.configs if every_autotuned else self.configs[:1]:
            labels.append(str(config))
            try:
                self.fn.run(*args, **{**kwargs, **config.all_kwargs()})
            finally:
                labels.pop()

    with (
        pretend_arch(arch),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(Autotuner, "run", tune),
        watch_tuned() as found.tuned,
    ):
        yield found


def _decode(
    function: JITFunction[Any],
    backend: Any,
    arch: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    grid: tuple[int, ...] | Callable[[Mapping[str, Any]], tuple[int, ...]],
    autotuned: str,
) -> Launch:
    binder = create_function_from_signature(function.signature, function.params, backend)
    given = {"enable_fp_fusion": ENABLE_FP_FUSION, **kwargs}
    bound, specialization, _ = binder(*args, **given)
    # The private method refuses options that the target does not have, in the words that a launch would use.
    with warnings.catch_warnings():
        # Those of the options come again when the launch is compiled, and are kept there.
        warnings.simplefilter("ignore")
        _, signature, constants, attributes = function._pack_args(backend, given, bound, specialization, None)
    size = tuple(grid(bound) if callable(grid) else grid)
    return Launch(
        function=function,
        arch=arch,
        signature=signature,
        constants=constants,
        attributes={path: known for path, known in attributes.items() if known},
        options={name: value for name, value in given.items() if name not in function.arg_names},
        grid=(*size, *(1,) * (3 - len(size))),
        autotuned=autotuned,
    )


def _sendable(value: Any) -> Any:
    """A constant in a form that can be sent to another process: jit functions become references.

    Raises:
        ValueError: a jit function that other processes cannot look up.
    """
    if isinstance(value, JITFunction):
        ref = Launch(value, "", {}, {}, {}, {}, ()).ref
        if ref is None:
            raise ValueError(f"{value.__name__} cannot be imported by name")
        return ref
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_sendable(item) for item in value)
    return value


def _restored(value: Any) -> Any:
    """What :func:`_sendable` was given."""
    if isinstance(value, FunctionRef):
        return value.resolve()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_restored(item) for item in value)
    return value


@dataclass(frozen=True)
class PortableLaunch:
    """A :class:`Launch` that can be pickled."""

    ref: FunctionRef
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, launch: Launch) -> PortableLaunch:
        """Raises:
        ValueError: the function, or one among its constants, cannot be imported by name.
        """
        if launch.ref is None:
            raise ValueError(f"{launch.name} cannot be imported by name")
        values = {f.name: getattr(launch, f.name) for f in dataclasses.fields(Launch) if f.name != "function"}
        constants = {path: _sendable(value) for path, value in launch.constants.items()}
        return cls(launch.ref, {**values, "constants": constants})

    def launch(self) -> Launch:
        values = dict(self.fields)
        values["constants"] = {path: _restored(value) for path, value in values["constants"].items()}
        return Launch(self.ref.resolve(), **values)
