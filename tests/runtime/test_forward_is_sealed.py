"""A step makes no choices: no plugins, no environment, no resolver, no imports, and a table that costs next to nothing."""

from __future__ import annotations

import builtins
import importlib
import os
import timeit
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pluggy
import pytest
import torch
from model_runs import load_runtime
from one_thread import one_thread  # noqa: F401

import k3port.oracle.resolve
import k3port.plugins
import k3port.runtime.binding
from k3port.model.step import Step
from k3port.ops.segment import make_segment
from k3port.ops.table import SLOTS, OpTable
from k3port.runtime.pools import PAGE_TOKENS
from k3port.runtime.request import GREEDY, SamplingParams
from k3port.runtime.runtime import Runtime

FORBIDDEN: list[tuple[Any, str]] = [
    (pluggy.PluginManager, "__init__"),
    (pluggy.HookCaller, "__call__"),
    (type(os.environ), "__getitem__"),
    (type(os.environ), "__contains__"),
    (type(os.environ), "__iter__"),
    (os, "getenv"),
    (k3port.oracle.resolve, "resolve"),
    (k3port.oracle.resolve, "reject"),
    (k3port.plugins, "make_registry"),
    (k3port.plugins, "default_registry"),
    (k3port.runtime.binding, "load_object"),
    (k3port.runtime.binding, "bind_table"),
    (importlib, "import_module"),
]


class SealError(Exception):
    """Something that a step must not use was used."""


@contextmanager
def sealed() -> Iterator[None]:
    def refuse(what: str) -> Callable[..., Any]:
        def used(*args: Any, **kwargs: Any) -> Any:
            raise SealError(f"{what} was used")

        return used

    real_import = builtins.__import__

    def import_for_others(name: str, globals_: Any = None, *args: Any, **kwargs: Any) -> Any:
        # torch imports its own parts inside functions (einsum does in every call); k3port must not.
        if globals_ and str(globals_.get("__name__", "")).startswith("k3port"):
            raise SealError(f"{globals_['__name__']} imports {name}")
        return real_import(name, globals_, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(builtins, "__import__", import_for_others))
        for owner, name in FORBIDDEN:
            label = f"{getattr(owner, '__name__', owner)}.{name}"
            stack.enter_context(mock.patch.object(owner, name, refuse(label)))
        yield


@pytest.fixture(scope="module", params=["tiny_k3_folder", "tiny_linear_folder"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    folder: Path = request.getfixturevalue(request.param)
    return load_runtime(folder)


def steps(runtime: Runtime) -> list[torch.Tensor]:
    """A prefill of two requests, a decode step of both, and a step that mixes a decode with another prefill."""
    pools = runtime.pools
    slots, pages = [pools.states.allocate() for _ in range(3)], [pools.pages.allocate(1) for _ in range(3)]
    try:
        return [
            runtime.model.forward(step, pools.model_state)
            for step in (
                Step(
                    torch.arange(12),
                    (make_segment("prefill", [7, 5], slots[:2], [0, 0], pages[:2], PAGE_TOKENS),),
                    torch.tensor([6, 11]),
                ),
                Step(
                    torch.tensor([3, 4]),
                    (make_segment("decode", [1, 1], slots[:2], [7, 5], pages[:2], PAGE_TOKENS),),
                    torch.tensor([0, 1]),
                ),
                Step(
                    torch.tensor([5, 6, 7, 8]),
                    (
                        make_segment("decode", [1], slots[:1], [8], pages[:1], PAGE_TOKENS),
                        make_segment("prefill", [3], slots[2:], [0], pages[2:], PAGE_TOKENS, 1),
                    ),
                    torch.tensor([0, 3]),
                ),
            )
        ]
    finally:
        for slot, taken in zip(slots, pages, strict=True):
            pools.states.release(slot)
            pools.pages.release(taken)


def test_the_seal_holds() -> None:
    for use in (
        lambda: os.environ["HOME"],
        lambda: os.environ.get("HOME"),
        lambda: os.getenv("HOME"),
        lambda: "HOME" in os.environ,
        lambda: importlib.import_module("json"),
        lambda: pluggy.PluginManager("x"),
        lambda: k3port.plugins.make_registry(),
        lambda: k3port.oracle.resolve.resolve([], [], None),  # type: ignore[arg-type]
        lambda: k3port.plugins.builtin_plugins(),  # imports inside the function
    ):
        with sealed(), pytest.raises(SealError):
            use()
    assert os.environ.get("PATH")


def test_prefill_decode_and_mixed_steps(runtime: Runtime) -> None:
    before = steps(runtime)
    with sealed():
        inside = steps(runtime)
    for one, other in zip(before, inside, strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(one).all()


def test_generation_needs_nothing_either(runtime: Runtime) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=7, ignore_eos=True)
    settings = [params, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)]
    prompts = [[1, 2, 3], [4] * 70]
    before = runtime.generate(prompts, settings)
    with sealed():
        inside = runtime.generate(prompts, settings)
    assert [g.token_ids for g in inside] == [g.token_ids for g in before]
    assert all(len(g.token_ids) == 5 for g in inside)
    assert GREEDY.temperature == 0


def test_a_call_through_the_table_costs_little() -> None:
    """The smallest of many repeats of each, in one run: other work on the machine only adds."""

    def op(x: int, y: int) -> int:
        return x

    table = OpTable(dict.fromkeys(SLOTS, op))
    names = {"op": op, "table": table}
    direct, through = (
        min(timeit.repeat(statement, globals=names, number=20000, repeat=15))
        for statement in ("op(1, 2)", "table.kda_decode(1, 2)")
    )
    assert through < 3 * direct, f"{through / direct:.2f} times a direct call"


def test_the_table_has_a_slot_per_op_and_phase_and_takes_no_others() -> None:
    table = OpTable({"linear": len})
    with pytest.raises(AttributeError, match="kda_decode"):
        _ = table.kda_decode
    with pytest.raises(AttributeError):
        table.other = len  # type: ignore[attr-defined]
    assert not hasattr(table, "__dict__")
    assert dict(table.items()) == {"linear": len}
    assert dict(table.replaced(linear=min).items()) == {"linear": min}
    assert table.linear is len
