"""Binding a plan: what cannot be called is refused before the first step."""

from __future__ import annotations

import pytest
from builtin_kernels import CPU, KERNELS

from k3port.errors import PlanError
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import KernelSpec, OpQuery
from k3port.plugins import Registry
from k3port.runtime.binding import bind_table
from k3port.runtime.runtime import Runtime


def lying(x, weight, bias):
    """A kernel that takes one argument more than its op passes."""


def refusing(linear):
    """A factory that does not take the parts of its op."""


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (KernelSpec("mine.linear", "linear", f"{__name__}:lying", ""), "does not take the arguments of linear"),
        (KernelSpec("mine.linear", "linear", "torch:nosuch", ""), "cannot be loaded"),
        (KernelSpec("mine.linear", "linear", "nosuchmodule:f", ""), "cannot be loaded"),
        (KernelSpec("mine.moe", "moe", f"{__name__}:refusing", "", parts=("moe_route",)), "does not take its parts"),
    ],
)
def test_a_kernel_that_cannot_be_called_is_refused_at_binding(spec: KernelSpec, said: str, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())
    queries = [OpQuery(spec.op, None, {}, "float32"), OpQuery("moe_route", None, {}, "float32", direct=False)]
    plan = resolve(queries, [*KERNELS, spec], CPU, pins={spec.op: spec.name})
    with pytest.raises(PlanError, match=said) as caught:
        bind_table(plan, {s.name: s for s in (*KERNELS, spec)})
    assert caught.value.hint


def test_binding_comes_before_any_weight(tiny_k3_folder, monkeypatch):
    spec = KernelSpec("mine.linear", "linear", "torch:nosuch", "", priority=999)
    registry = Registry((*KERNELS, spec), (), ())
    monkeypatch.setattr("k3port.runtime.runtime.load_weights", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(PlanError, match=r"mine.linear of linear cannot be loaded") as caught:
        Runtime.load(tiny_k3_folder, registry=registry)
    assert "K3PORT_DISABLE=mine.linear" in caught.value.hint


def _this_module():
    import types

    module = types.ModuleType(__name__)
    module.lying, module.refusing = lying, refusing
    return module
