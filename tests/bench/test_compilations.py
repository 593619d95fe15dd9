"""Compilations are counted: with a real kernel, compiled without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from k3port.testing.bench.compilations import count_compilations  # noqa: E402


class CompileOnly:
    """A driver that says which GPU to compile for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compile_only() -> Iterator[None]:
    if knobs.runtime.interpret:
        pytest.skip("the interpreter compiles nothing")
    with mock.patch.object(triton.runtime.driver, "_active", CompileOnly()):
        yield


@triton.jit
def add_one(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)


def test_a_new_variant_counts_and_a_known_one_does_not(compile_only: None) -> None:
    x = torch.zeros(64)
    with count_compilations() as compiled:
        add_one.warmup(x, BLOCK=32, grid=(1,), enable_fp_fusion=True)
        add_one.warmup(x, BLOCK=64, grid=(1,), enable_fp_fusion=True)
    assert [name.rpartition(".")[2] for name in compiled.names] == ["add_one", "add_one"]
    with pytest.raises(AssertionError, match=r"compiled while it should have been warm: .*add_one"):
        compiled.check_none()
    # Only a kernel that was launched knows its spills.
    assert compiled.spills() == 0
    with count_compilations() as compiled:
        add_one.warmup(x, BLOCK=64, grid=(1,), enable_fp_fusion=True)
    compiled.check_none()


def test_spills_of_the_counted_variants_only() -> None:
    function = SimpleNamespace(
        device_caches={0: ({"a": SimpleNamespace(n_spills=12), "b": SimpleNamespace(n_spills=0)}, {})}
    )
    for key, spills in (("a", 12), ("b", 0), ("c", 0)):
        with count_compilations() as compiled:
            knobs.runtime.jit_post_compile_hook(
                fn=SimpleNamespace(name="f", jit_function=function), compile={"key": key}
            )
        assert compiled.spills() == spills


def test_another_hook_is_called_too_and_comes_back() -> None:
    seen: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def mine(**event: Any) -> None:
        seen.append(event["fn"].name)

    knobs.runtime.jit_post_compile_hook = mine
    try:
        with count_compilations() as compiled:
            event = {"fn": SimpleNamespace(name="f", jit_function=None), "compile": {"key": 1}}
            knobs.runtime.jit_post_compile_hook(**event)
        assert knobs.runtime.jit_post_compile_hook is mine
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert (seen, compiled.names) == (["f"], ["f"])
