"""Binding a plan: what cannot be called is refused before the first step."""

from __future__ import annotations

import sys
import types

import pytest
from builtin_kernels import CPU, KERNELS

from k3port.errors import PlanError
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import KernelSpec, OpQuery
from k3port.plugins import Registry
from k3port.runtime.binding import bind_table, load_kernel
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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def linear(:\n", "badkernel: SyntaxError: "),
        ("import no_such_module_xyz\n", "badkernel: ModuleNotFoundError: No module named 'no_such_module_xyz' ("),
        ("import sys\nsys.exit('bye')\n", "badkernel: SystemExit: bye ("),
        ("a = 1\nb = a / 0\n", "badkernel: ZeroDivisionError: division by zero ("),
        ("raise RuntimeError('first\\n  second')\n", "badkernel: RuntimeError: first second ("),
        ("def other(x, weight): ...\n", "badkernel: AttributeError: module 'badkernel' has no attribute 'linear'"),
        ("linear = 5\n", "badkernel.linear is of type int, which cannot be called"),
    ],
)
def test_whatever_a_module_raises_is_one_error_of_its_kernel(source: str, said: str, tmp_path, monkeypatch):
    (tmp_path / "badkernel.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    spec = KernelSpec("mine.linear", "linear", "badkernel:linear", "", pack="badkernel:linear")
    plan = resolve([OpQuery("linear", None, {}, "float32")], [*KERNELS, spec], CPU, pins={"linear": spec.name})
    specs = {s.name: s for s in (*KERNELS, spec)}
    for bind in (lambda: bind_table(plan, specs), lambda: load_kernel(spec, spec.pack)):
        with pytest.raises(PlanError, match=r"^error: kernel mine.linear of linear cannot be loaded") as caught:
            bind()
        (reason,) = caught.value.reasons
        assert reason.startswith(said)
        assert "badkernel.py, line" in reason or " of type " in reason or "AttributeError" in reason
        assert caught.value.hint.endswith("K3PORT_DISABLE=mine.linear")
    sys.modules.pop("badkernel", None)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (lambda moe_route: 1 / 0, "does not take its parts moe_route"),
        (lambda moe_route: None, "makes no function of its parts moe_route"),
    ],
)
def test_a_factory_that_fails_is_one_error_of_its_kernel(factory, said: str, monkeypatch):
    module = types.ModuleType("badfactory")
    monkeypatch.setattr(module, "moe", factory, raising=False)
    monkeypatch.setitem(sys.modules, "badfactory", module)
    spec = KernelSpec("mine.moe", "moe", "badfactory:moe", "", parts=("moe_route",))
    queries = [OpQuery("moe", None, {}, "float32"), OpQuery("moe_route", None, {}, "float32", direct=False)]
    plan = resolve(queries, [*KERNELS, spec], CPU, pins={"moe": spec.name})
    with pytest.raises(PlanError, match=f"kernel mine.moe of moe {said}"):
        bind_table(plan, {s.name: s for s in (*KERNELS, spec)})


def _this_module():
    module = types.ModuleType(__name__)
    module.lying, module.refusing = lying, refusing
    return module
