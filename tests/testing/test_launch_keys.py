"""The key of a repeated launch: never coarser than what Triton compiles anew for, on both vendors' backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
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
        kinds = launch._kind(a), launch._kind(b)
    if kinds[0] == kinds[1]:
        assert specialised(arch, a) == specialised(arch, b)


def test_keys_tell_alignment_and_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_pointer_ranges", lambda: False)
    x = torch.zeros(64, dtype=torch.uint8)
    assert launch._kind(x) != launch._kind(x[1:])
    assert launch._kind(16) == launch._kind(32) != launch._kind(17)
    assert launch._kind(1) != launch._kind(17) != launch._kind(1 << 40)
    assert launch._kind(None) != launch._kind(0.0)


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
