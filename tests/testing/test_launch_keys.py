"""The key of a repeated launch: never coarser than what Triton compiles anew for, on both vendors' backends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from k3port.backends.portable import launch
from k3port.testing.launches import gpu_target, record


@triton.jit
def two(a, b):  # type: ignore[no-untyped-def]
    pass


def specialised(arch: str, value: Any) -> Any:
    """What Triton's own key says of an argument."""
    binder = create_function_from_signature(two.signature, two.params, make_backend(gpu_target(arch)))
    return binder(value, None)[1][0]


CPU = torch.zeros(0).get_device()
"""The device of the tensors here."""


def kind(value: Any) -> Any:
    """What the key of a launch says of an argument."""
    kinds, _ = launch._kinds((value,), CPU)
    return kinds


class Large(torch.Tensor):
    """A tensor whose storage says that it is larger than 2 GiB."""

    def untyped_storage(self) -> Any:  # type: ignore[override]
        class Storage:
            def size(self) -> int:
                return 1 << 31

        return Storage()


def tensors() -> st.SearchStrategy[torch.Tensor]:
    def make(dtype: torch.dtype, offset: int, large: bool) -> torch.Tensor:
        x = torch.zeros(64, dtype=torch.uint8)[offset * dtype.itemsize :]
        x = x[: x.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return x.as_subclass(Large) if large else x

    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8])
    return st.builds(make, dtypes, st.integers(0, 8), st.booleans())


NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 15, 16, 17, 32, 1 << 31, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, 1 << 63]),
    st.integers(-(1 << 63), (1 << 64) - 1),
)
VALUES = st.one_of(NUMBERS, tensors(), st.none(), st.booleans(), st.floats(allow_nan=False))


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
@given(VALUES, VALUES)
@settings(max_examples=300, deadline=None)
def test_equal_keys_mean_equal_code(arch: str, a: Any, b: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_pointer_ranges", lambda: arch.startswith("gfx"))
        kinds = kind(a), kind(b)
    if kinds[0] == kinds[1] and launch.UNKNOWN not in kinds[0]:
        assert specialised(arch, a) == specialised(arch, b)


def test_each_argument_has_its_own_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_pointer_ranges", lambda: False)
    x = torch.zeros(64, dtype=torch.uint8)
    calls = [(a, 17, b) for a in (x, x[1:]) for b in (x, x[1:])]
    assert len({str(launch._kinds(args, CPU)[0]) for args in calls}) == 4
    assert launch._kinds((x, 17, None), CPU)[1] == [x.data_ptr(), 17, None]


def test_keys_tell_alignment_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_pointer_ranges", lambda: False)
    x = torch.zeros(64, dtype=torch.uint8)
    assert kind(x) != kind(x[1:])
    assert kind(16) == kind(32) != kind(17)
    assert kind(1) != kind(17) != kind(1 << 40)
    assert kind(None) != kind(0.0)


def test_a_recorded_launch_is_never_taken_from_the_cache() -> None:
    x = torch.zeros(64)
    for _ in range(2):
        with record("gfx950") as found:
            launch.launch(two, (1, 1, 1), x, 3)
        assert [one.name for one in found.launches] == ["two"]


@pytest.mark.parametrize("n, power", [(1, 1), (2, 2), (3, 4), (128, 128), (129, 256)])
def test_powers_of_two(n: int, power: int) -> None:
    assert launch.power_of_2(n) == power
    assert launch.ceil_div(n, 2) == (n + 1) // 2


class Compiled:
    """Stands for Triton's compiled kernel: remembers the arguments of its launches."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, constants: dict[str, Any]) -> None:
        self.constants, self.calls = constants, list[Any]()

    def run(self, *args: Any) -> None:
        self.calls.append(args)


@triton.jit
def tiled(x, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """What was compiled, in order, on a machine that only pretends to compile and to launch."""
    found: list[Compiled] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> Compiled:
        found.append(Compiled(constants))
        return found[-1]

    driver = SimpleNamespace(get_current_device=lambda: CPU, get_current_stream=lambda device: "stream")
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(type(tiled), "run", run)
    monkeypatch.setattr(launch, "CompiledKernel", Compiled)
    monkeypatch.setattr(launch, "_pointer_ranges", lambda: False)
    monkeypatch.setattr(launch, "_compiled", {})
    return found


def test_a_repeated_launch_goes_to_the_compiled_kernel(compiled: list[Compiled]) -> None:
    x, y = torch.zeros(64), torch.ones(64)
    launch.launch(tiled, (1, 1, 1), x, 16, ROWS=2, BLOCK=8, num_warps=4)
    launch.launch(tiled, (3, 2, 1), y, 32, ROWS=2, BLOCK=8, num_warps=4)
    (kernel,) = compiled
    # Its arguments are those of the second call, the constants in the function's order, without the options.
    hooks = (None, None, None)
    assert kernel.calls == [(3, 2, 1, "stream", "function", "metadata", *hooks, y.data_ptr(), 32, 2, 8)]


def test_hooks_of_a_profiler_see_every_launch(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            launch.launch(tiled, (1, 1, 1), x, 16, ROWS=2, BLOCK=8)
            patch.setattr(getattr(launch.knobs.runtime, name), "calls", [lambda metadata: None])
            before = len(compiled)
            launch.launch(tiled, (1, 1, 1), x, 16, ROWS=2, BLOCK=8)
        # Through Triton itself, which calls the hooks.
        assert len(compiled) == before + 1


def test_triton_judges_what_is_unknown_each_time(compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(64)
    for _ in range(2):
        launch.launch(two, (1, 1, 1), x, np.int64(16))
    assert len(compiled) == 2
    # A tensor that is not on the device: its address must not reach the kernel.
    monkeypatch.setattr(triton.runtime.driver.active, "get_current_device", lambda: CPU + 1)
    for _ in range(2):
        launch.launch(two, (1, 1, 1), x, 16)
    assert len(compiled) == 4


def test_what_triton_compiles_anew_is_not_shared(compiled: list[Compiled]) -> None:
    x = torch.zeros(64)
    calls: list[tuple[tuple[Any, ...], dict[str, int]]] = [
        ((x, 16), {"ROWS": 2, "BLOCK": 4}),
        ((x[1:], 16), {"ROWS": 2, "BLOCK": 4}),
        ((x.bfloat16(), 16), {"ROWS": 2, "BLOCK": 4}),
        ((x, 17), {"ROWS": 2, "BLOCK": 4}),
        ((x, 1), {"ROWS": 2, "BLOCK": 4}),
        ((x, 16), {"ROWS": 4, "BLOCK": 2}),
        ((x, 16), {"BLOCK": 2, "ROWS": 4, "num_warps": 8}),
        ((x, 16), {"BLOCK": 2, "ROWS": 4, "num_stages": 8}),
        # With ROWS and BLOCK the other way round it is another kernel.
        ((x, 16), {"ROWS": 2, "BLOCK": 4, "num_warps": 8}),
    ]
    for args, constants in calls:
        launch.launch(tiled, (1, 1, 1), *args, **constants)
    assert [kernel.constants for kernel in compiled] == [constants for _, constants in calls]
    assert not any(kernel.calls for kernel in compiled)
