"""The registry: built-ins through the hooks, broken plugins skipped, name clashes refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3port.backends.cuda.device import find_devices as find_nvidia
from k3port.backends.rocm.device import find_devices as find_amd
from k3port.backends.rocm.device import gfx_name
from k3port.errors import PlanError
from k3port.hookspecs import hookimpl
from k3port.ops.catalog import OPS
from k3port.oracle.spec import Device, KernelSpec
from k3port.plugins import make_registry


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


def test_b12_a_name_clash_names_both_owners():
    with pytest.raises(PlanError) as caught:
        make_registry([OneKernel("reference.linear")], entry_points=False)
    assert any("k3port.backends.reference" in reason for reason in caught.value.reasons)
    assert any("OneKernel" in reason for reason in caught.value.reasons)


def test_b12_a_broken_plugin_is_skipped_and_reported():
    registry = make_registry([Broken(), OneKernel("mine.linear")], entry_points=False)
    assert registry.kernel("mine.linear")
    (problem,) = registry.problems
    assert "ImportError: no such library" in problem
    assert "Broken" in problem


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
