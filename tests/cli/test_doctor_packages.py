"""``k3port doctor`` on packages and plugins: absent, broken, slow, wrong, clashing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doctor_runs import CUDA_TORCH, EIGHT, PLUGIN, ROOT, Machine, results, texts
from fake_machines import nvidia_probe

from k3port import plugins
from k3port.cli import doctor_facts
from k3port.hookspecs import hookimpl
from k3port.oracle.checks import DoctorCheck
from k3port.oracle.detect import TorchBuild
from k3port.oracle.spec import Device
from k3port.oracle.visibility import VARIABLES


@pytest.fixture(autouse=True)
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


# Packages.


def test_b23_a_version_outside_the_validated_range(k3port: Any, machine: Machine) -> None:
    machine(packages={"triton": "3.8.0"})
    (item,) = results(k3port, "--platform", "mi355")["packages.validated"]
    assert item["status"] == "warning"
    assert "triton 3.8.0 is outside the validated range >=3.7,<3.8" in item["text"]
    assert "InferenceX#2852" in item["text"]
    machine(packages={"triton": "3.7.1"})
    assert "packages.validated" not in results(k3port, "--platform", "mi355")


def test_torch_absent(k3port: Any, machine: Machine) -> None:
    machine(torch=TorchBuild())
    found = results(k3port, code=1)
    (item,) = found["packages.torch"]
    assert (item["status"], item["remedy"]) == ("fail", "pip install torch")
    assert texts(found, "kernels.declared", "ok")


def test_packages_that_are_missing(k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(nvidia_probe(*EIGHT), torch=CUDA_TORCH, packages={"triton": "3.7.0", "amd-aiter": "0.1.7"})
    monkeypatch.setattr(doctor_facts, "REQUIRED", (*doctor_facts.REQUIRED, "never-there"))
    found = results(k3port, code=1)
    assert texts(found, "packages.required", "fail") == "missing: never-there"
    assert "flashinfer-python is not installed" in texts(found, "packages.optional", "warning")
    assert "amd-aiter 0.1.7, not needed on nvidia" in texts(found, "packages.optional", "info")


def environment(*folders: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("K3PORT_")},
        "PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT))),
    }


def run_doctor(*args: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k3port", "doctor", *args]
    return subprocess.run(command, env=environment(folder), capture_output=True, text=True, timeout=60)


def write_package(folder: Path, name: str, version: str, module: str, code: str, entry_point: str = "") -> Path:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_point:
        (info / "entry_points.txt").write_text(f"[k3port]\n{entry_point}\n")
    (folder / f"{module}.py").write_text(code)
    return folder


@pytest.mark.parametrize("effect", ["raise ImportError('no libamdhip64.so')", "import time; time.sleep(30)"])
def test_b08_an_optional_package_is_not_imported(tmp_path: Path, effect: str) -> None:
    write_package(tmp_path, "amd-aiter", "0.1.7", "aiter", f"open({str(tmp_path / 'imported')!r}, 'w'); {effect}")
    begin = time.perf_counter()
    done = run_doctor("-v", folder=tmp_path)
    assert time.perf_counter() - begin < 10
    assert done.returncode == 0, done.stdout
    assert "amd-aiter 0.1.7, not needed on cpu (not imported)" in done.stdout
    assert not (tmp_path / "imported").exists()


def test_b08_a_failing_import_is_reported_with_deep(tmp_path: Path) -> None:
    write_package(tmp_path, "amd-aiter", "0.1.7", "aiter", "raise ImportError('no libamdhip64.so')")
    write_package(tmp_path, "triton", "3.7.0", "triton", "print('noise')")
    (tmp_path / "torch.py").write_text("")  # the real one takes seconds
    done = run_doctor("--deep", "--json", folder=tmp_path)
    items = [item for item in json.loads(done.stdout)["checks"] if item["id"] == "packages.import"]
    said = {item["text"]: item["status"] for item in items}
    assert said["amd-aiter 0.1.7: present, import failed: ImportError: no libamdhip64.so"] == "warning"
    assert said["triton can be imported"] == "ok"


def test_a_slow_import_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_package(tmp_path, "amd-aiter", "0.1.7", "aiter", "import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor_facts, "_IMPORT_SECONDS", 1.0)
    assert doctor_facts._try_imports({"amd-aiter": "0.1.7"}) == {"amd-aiter": "no answer within 1 s"}


def test_a_broken_torch_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is broken', name='torch')\n")
    done = run_doctor(folder=tmp_path)
    assert done.returncode == 1
    assert "x packages.torch: PyTorch is damaged: " in done.stdout
    assert "try: pip install --force-reinstall torch" in done.stdout
    assert done.stderr == ""


# Plugins.

CLASH = """
class Plugin:
    @hookimpl
    def k3port_kernels(self):
        return [KernelSpec(name="reference.linear", op="linear", load="torch:add", doc="")]
plugin = Plugin()
"""
CHECK = """
from k3port.oracle.checks import DoctorCheck, Result
class Plugin:
    @hookimpl
    def k3port_doctor_checks(self):
        return [DoctorCheck("mine.cable", "mine", "the cable", lambda facts: [Result("warning", "loose", "push it")])]
plugin = Plugin()
"""
WRONG = """
class Plugin:
    @hookimpl
    def k3port_kernels(self, more):
        return []
plugin = Plugin()
"""


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        (
            "raise RuntimeError('no licence')",
            0,
            "! plugins.load: plugin bad of bad-kernels (bad_kernels:plugin) was skipped",
        ),
        (WRONG, 0, "! plugins.load: plugin bad of bad-kernels (bad_kernels:plugin) was skipped"),
        (
            CLASH,
            1,
            "x plugins.names: 2 kernels are named reference.linear, of k3port.backends.reference, bad of",
        ),
        (CHECK, 0, "! mine.cable: loose\n           try: push it"),
    ],
    ids=["raises", "wrong signature", "clash", "own check"],
)
def test_b12_plugins(tmp_path: Path, code: str, status: int, said: str) -> None:
    write_package(tmp_path, "bad-kernels", "1.0", "bad_kernels", PLUGIN.format(code=code), "bad = bad_kernels:plugin")
    done = run_doctor("-v", folder=tmp_path)
    assert (done.returncode, done.stderr) == (status, ""), done.stdout
    assert said in done.stdout
    assert "plugins.load: bad (bad-kernels 1.0)" in done.stdout
    assert "kernels declared for cpu" in done.stdout


def test_a_plugin_that_fails_gives_nothing_at_all() -> None:
    class Half:
        @hookimpl
        def k3port_detect(self) -> list[Device]:
            return [Device("amd", "gfx942", "half", "fake")]

        @hookimpl
        def k3port_doctor_checks(self) -> list[DoctorCheck]:
            raise RuntimeError("no")

    registry = plugins.make_registry([Half()], entry_points=False)
    assert "half" not in [device.name for device in registry.devices]
    assert "RuntimeError: no" in registry.problems[0]


def test_the_order_of_plugins_is_that_of_their_registration() -> None:
    class One:
        def __init__(self, name: str) -> None:
            self.device = Device("amd", "gfx942", name, "fake")

        @hookimpl
        def k3port_detect(self) -> list[Device]:
            return [self.device]

    names = [f"plugin {n}" for n in range(12)]
    registry = plugins.make_registry([One(name) for name in names], entry_points=False)
    assert [device.name for device in registry.devices][-12:] == names
