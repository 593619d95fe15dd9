"""The registry: built-ins through the hooks, broken plugins skipped, name clashes refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from k3port.backends.cuda.device import find_devices as find_nvidia
from k3port.backends.rocm.device import find_devices as find_amd
from k3port.backends.rocm.device import gfx_name
from k3port.hookspecs import hookimpl
from k3port.ops.catalog import OPS
from k3port.oracle.admit import spec_faults
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import Device, KernelSpec, OpQuery, Requires, Target
from k3port.plugins import make_registry
from k3port.runtime.platforms import find_profile


class OneKernel:
    def __init__(self, name: str) -> None:
        self.name = name

    @hookimpl
    def k3port_kernels(self):
        return [KernelSpec(name=self.name, op="linear", load="torch.nn.functional:linear", doc="")]


class Broken:
    @hookimpl
    def k3port_kernels(self):
        raise ImportError("no such library")


def test_every_op_has_a_reference_kernel():
    registry = make_registry(entry_points=False)
    assert {spec.op for spec in registry.kernels if spec.is_reference} == set(OPS)
    assert not registry.problems


def test_a_plugin_adds_a_kernel():
    registry = make_registry([OneKernel("mine.linear")], entry_points=False)
    assert registry.kernel("mine.linear").op == "linear"


def test_b12_a_taken_name_is_a_finding_that_names_both_owners_and_the_built_in_kernel_stays():
    registry = make_registry([OneKernel("reference.linear")], entry_points=False)
    (clash,) = registry.clashes
    assert clash in registry.problems
    assert "k3port.backends.reference" in clash
    assert "OneKernel" in clash
    assert registry.kernel("reference.linear").load == "k3port.ops.linear:linear"


def test_b12_two_plugins_with_one_name_get_neither_whatever_their_order():
    registry = make_registry([OneKernel("mine.linear"), OneKernel("mine.linear")], entry_points=False)
    assert not [spec for spec in registry.kernels if spec.name == "mine.linear"]
    assert "none of them is used" in registry.clashes[0]


def test_b12_a_broken_plugin_is_skipped_and_reported():
    registry = make_registry([Broken(), OneKernel("mine.linear")], entry_points=False)
    assert registry.kernel("mine.linear")
    (problem,) = registry.problems
    assert "ImportError: no such library" in problem
    assert "Broken" in problem


def gives(answer: object, hook: str = "k3port_kernels") -> object:
    """A plugin with one hook that gives ``answer``."""
    return type("Lies", (), {hook: hookimpl(lambda self: answer)})()


class WrongSignature:
    """Its first hook is registered before its second one is refused."""

    @hookimpl
    def k3port_detect(self):
        return [Device("amd", "gfx942", "half", "fake")]

    @hookimpl
    def k3port_kernels(self, registry):
        return []


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (gives(["x"]), "TypeError: k3port_kernels gave a list with 'x' in it, which is no KernelSpec"),
        (gives(3), "TypeError: k3port_kernels gave 3, not a list"),
        (gives("text"), "TypeError: k3port_kernels gave 'text', not a list"),
        (gives(["gpu"], "k3port_detect"), "which is no Device"),
        (gives([1], "k3port_platforms"), "which is no str or Path"),
        (gives([1], "k3port_probes"), "which is no Callable"),
        (gives([1], "k3port_doctor_checks"), "which is no DoctorCheck"),
        (WrongSignature(), "Argument(s) {'registry'} are declared in the hookimpl but can not be found"),
        (gives([], "k3port_kernel"), "there is no hook k3port_kernel; did you mean k3port_kernels?"),
        (object(), "has no hook of k3port; hooks: k3port_kernels,"),
    ],
)
def test_b12_a_plugin_that_lies_is_one_finding(plugin: object, said: str):
    registry = make_registry([plugin, OneKernel("mine.linear")], entry_points=False)
    (problem,) = registry.problems
    assert said in problem and "\n" not in problem
    assert registry.kernel("mine.linear")
    assert "half" not in [device.name for device in registry.devices]


RIGHT = KernelSpec(name="mine.kda", op="kda", load="json:dumps", doc="")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"op": "linaer"}, "op: there is no op 'linaer', did you mean linear?"),
        ({"parts": ("kda_cor",)}, "parts: there is no op 'kda_cor', did you mean kda_core?"),
        ({"covers": ("nothing",)}, "covers: there is no op 'nothing'"),
        ({"covers": "kda_core"}, "covers = 'kda_core': expected a tuple"),
        ({"phases": ("verify",)}, "phases: kda has no phase 'verify'"),
        ({"name": "mine"}, "name = 'mine': expected backend.kernel"),
        ({"load": "module.function"}, "load = 'module.function': expected module:function"),
        ({"pack": "m"}, "pack = 'm': expected module:function"),
        ({"requires": None}, "requires = None: expected a Requires"),
        ({"requires": Requires(packages=(">1",))}, "requires.packages: '>1' is no requirement such as package>=1.0"),
        ({"requires": Requires(symbols=("m.f",))}, "requires.symbols: 'm.f' is no package.module:name"),
        ({"requires": Requires(axes=("H",))}, "requires.axes has 'H' in it: expected AxisRule"),
        ({"check": True}, "check = True: expected a function"),
        ({"priority": "high"}, "priority = 'high': expected a whole number"),
        ({"layouts": ("vk",)}, "layouts = ('vk',): expected a mapping"),
        ({"graph_safe": None}, "graph_safe = None: expected True or False"),
        ({"tokens": 4}, "tokens = 4: expected (first, last) with 1 <= first <= last"),
    ],
)
def test_a_kernel_with_a_wrong_record_is_left_out_alone(fields: dict[str, Any], said: str):
    assert spec_faults(RIGHT) == []
    wrong = replace(RIGHT, **fields)
    registry = make_registry([gives([wrong, replace(RIGHT, name="mine.other")])], entry_points=False)
    (problem,) = registry.problems
    assert problem.startswith(f"plugin Lies (given, 0): kernel {wrong.name} was left out: ") and said in problem
    assert registry.kernel("mine.other")
    assert wrong not in registry.kernels


def test_a_check_that_fails_refuses_its_kernel_alone():
    def check(query: OpQuery, target: Target) -> str | None:
        raise KeyError("H")

    spec = KernelSpec(name="mine.linear", op="linear", load="json:dumps", doc="", check=check, priority=900)
    kernels = make_registry([gives([spec])], entry_points=False).kernels
    target = Target("cpu", Device("cpu", "cpu", "CPU", "fake"))
    plan = resolve([OpQuery("linear", None, {"D": 8}, "float32")], kernels, target)
    chosen = plan.selection("linear")
    assert chosen.kernel == "cpu.linear"
    (refusal,) = [r for r in chosen.rejected if r.kernel == "mine.linear"]
    assert refusal.detail == "its own check failed: KeyError: 'H'"


def test_plugins_that_define_one_platform_twice_cost_that_platform_only(tmp_path: Path):
    """Whichever comes first: the order of plugins does not decide what a platform is."""
    texts = {"a": "lab: {extends: h200}", "b": "lab: {extends: h100}", "c": "desk: {extends: cpu}", "d": "h200: {}"}
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(f"schema: 2\nplatforms:\n  {text}\n")
    for names in ("abcd", "dcba"):
        files = [[tmp_path / f"{name}.yaml"] for name in names]
        registry = make_registry([gives(file, "k3port_platforms") for file in files], entry_points=False)
        assert registry.platforms == (tmp_path / "c.yaml",)
        assert len(registry.problems) == 3
        assert sum("lab is already defined in" in problem for problem in registry.problems) == 2
        assert find_profile("desk", registry=registry).vendor == "cpu"


def test_amd_devices_are_read_from_the_driver_tree(tmp_path: Path):
    for node, version in ((0, 0), (1, 90402), (10, 90500)):
        folder = tmp_path / str(node)
        folder.mkdir()
        (folder / "properties").write_text(f"vendor_id 4098\ngfx_target_version {version}\n")
    assert [device.arch for device in find_amd(tmp_path)] == ["gfx942", "gfx950"]
    assert find_amd(tmp_path / "absent") == []


def test_gfx_names_write_the_stepping_in_hexadecimal():
    assert [gfx_name(v) for v in (90402, 90500, 90010, 120500)] == ["gfx942", "gfx950", "gfx90a", "gfx1250"]


def test_nvidia_devices_are_read_from_the_driver_files(tmp_path: Path):
    folder = tmp_path / "0000:01:00.0"
    folder.mkdir()
    (folder / "information").write_text("Model: \t NVIDIA H200\nIRQ: 12\nGPU UUID: GPU-1-2\n")
    expected = Device("nvidia", "unknown", "NVIDIA H200", "detected", uuid="GPU-1-2", pci="0000:01:00.0")
    assert find_nvidia(tmp_path) == [expected]
    assert find_nvidia(tmp_path / "absent") == []


class Custom:
    def __init__(self, **fields):
        self.fields = fields

    @hookimpl
    def k3port_kernels(self):
        return [KernelSpec(name="mine.linear", op="linear", doc="", priority=999, **self.fields)]


def test_a_kernel_whose_module_is_not_there_is_left_out():
    registry = make_registry([Custom(load="nothere.at.all:fn")], entry_points=False)
    assert not [spec for spec in registry.kernels if spec.name == "mine.linear"]
    assert "there is no module nothere.at.all" in registry.problems[0]


@pytest.mark.parametrize("check", [lambda query, target: 1 / 0, lambda query, target: sys.exit(7)])
def test_a_check_that_raises_refuses_its_kernel_and_the_plan_warns(check):
    registry = make_registry([Custom(load="torch.nn.functional:linear", check=check)], entry_points=False)
    query = OpQuery("linear", None, {}, "float32")
    plan = resolve([query], registry.kernels, Target("cpu", Device("cpu", "cpu", "cpu", "fake")))
    assert plan.selection("linear").kernel == "cpu.linear"
    (warning,) = plan.warnings
    assert warning.startswith("kernel mine.linear is left out: its own check failed: ")
