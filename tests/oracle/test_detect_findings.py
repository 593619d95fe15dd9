"""What detection concludes: another vendor's PyTorch, old drivers, mixed machines, sources that disagree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_machines as fake
import pytest
from fake_machines import Card, amd_probe, look, no_nvidia_probe, nvidia_probe, write_kfd

from k3port.backends.cuda import device as cuda
from k3port.backends.rocm import device as rocm
from k3port.oracle import detect as module
from k3port.oracle.detect import Detection, TorchBuild, combine, torch_build
from k3port.oracle.sources import UNKNOWN, Answer, Finding, Gpu, SourceReport, ask_child, pci_address
from k3port.oracle.spec import Device
from k3port.plugins import make_registry

H200 = [Card(f"GPU-{n}", f"00000000:{n + 1:02X}:00.0") for n in range(8)]
DISPLAY = Card("GPU-display", "00000000:01:00.0", "NVIDIA RTX 5060", (12, 0), 8 << 30, 3840, 2500)
B300 = Card("GPU-b300a", "00000000:41:00.0", "NVIDIA B300", (10, 3), 288 << 30, 18944, 2000)
CUDA_TORCH = TorchBuild("2.14.0+cu130", cuda="13.0")
ROCM_TORCH = TorchBuild("2.14.0+rocm7.1", hip="7.1.25424")


def of(detection: Detection, id: str, severity: str = "") -> list[Finding]:
    return [f for f in detection.findings if f.id == id and severity in ("", f.severity)]


def report(detection: Detection, source: str) -> SourceReport:
    return next(r for r in detection.reports if r.source == source)


# PyTorch for another vendor.

TORCH = [
    ("amd", CUDA_TORCH, "PyTorch 2.14.0+cu130 is built for CUDA, the GPUs are from AMD", "rocm7.1"),
    ("nvidia", ROCM_TORCH, "PyTorch 2.14.0+rocm7.1 is built for ROCm, the GPUs are from NVIDIA", "cu130"),
    ("nvidia", TorchBuild("2.14.0+cpu"), "PyTorch 2.14.0+cpu is a CPU build, the GPUs are from NVIDIA", "cu130"),
    ("amd", TorchBuild("2.14.0+cpu"), "PyTorch 2.14.0+cpu is a CPU build, the GPUs are from AMD", "rocm7.1"),
    ("amd", ROCM_TORCH, "", ""),
    ("nvidia", CUDA_TORCH, "", ""),
    ("amd", TorchBuild(), "", ""),
]


@pytest.mark.parametrize(("vendor", "build", "said", "wheels"), TORCH)
def test_torch_of_another_vendor(tmp_path: Path, vendor: str, build: TorchBuild, said: str, wheels: str) -> None:
    probes = [amd_probe()] if vendor == "amd" else [nvidia_probe(*H200[:1])]
    found = look(write_kfd(tmp_path, 90402), *probes, torch=build)
    findings = of(found, "devices.torch")
    assert [f.text for f in findings] == ([said] if said else [])
    assert all(f.remedy.endswith(wheels) for f in findings)


def test_the_torch_build_is_read_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('broken')")
    (package / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.9.0+rocm7.0'\ndebug = False\ncuda: Optional[str] = None\n"
        "git_version = 'abc'\nhip: Optional[str] = '7.0.51831-a3e329ad8'\n"
    )
    monkeypatch.setattr(
        module.importlib.util, "find_spec", lambda _: _Spec([str(package)], str(package / "__init__.py"))
    )
    assert torch_build() == TorchBuild("2.9.0+rocm7.0", "", "7.0.51831-a3e329ad8")
    (package / "version.py").unlink()
    assert "has no version.py" in torch_build().problem
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    assert torch_build() == TorchBuild()


class _Spec:
    def __init__(self, folders: list[str], origin: str) -> None:
        self.submodule_search_locations, self.origin = folders, origin


def test_the_installed_torch_is_described() -> None:
    import torch

    build = torch_build()
    assert (build.version, build.cuda or None, build.hip or None) == (
        torch.__version__, torch.version.cuda, torch.version.hip,
    )  # fmt: skip


# Drivers, mixed machines, groups.


def test_a_gpu_without_driver(tmp_path: Path) -> None:
    fake.write_pci(tmp_path, "0000:41:00.0", 0x10DE)
    fake.write_pci(tmp_path, "0000:42:00.0", 0x1002, kind=0x120000)
    found = look(tmp_path, no_nvidia_probe(), amd_probe())
    assert found.gpus == ()
    assert [(f.text, f.severity, f.remedy) for f in of(found, "devices.driver")] == [
        ("1 NVIDIA GPU(s) on the bus, and no NVIDIA driver lists them", "warning", "sudo modprobe nvidia"),
        ("1 AMD GPU(s) on the bus, and no AMD driver lists them", "warning", "sudo modprobe amdgpu"),
    ]


def test_more_gpus_on_the_bus_than_a_container_was_given(tmp_path: Path) -> None:
    for number in range(8):
        fake.write_pci(tmp_path, f"0000:{number + 1:02x}:00.0", 0x10DE)
    found = look(tmp_path, nvidia_probe(H200[0]))
    assert len(found.gpus) == 1
    assert [f.severity for f in of(found, "devices.driver")] == ["info"]


def test_b27_display_card_and_compute_card(tmp_path: Path) -> None:
    found = look(tmp_path, nvidia_probe(DISPLAY, B300), torch=CUDA_TORCH)
    assert [g.device.arch for g in found.visible["nvidia"]] == ["sm_103", "sm_120"]
    assert [g.device.arch for g in found.gpus] == ["sm_120", "sm_103"]
    (order,) = of(found, "devices.order")
    assert "NVIDIA B300 (0000:41:00.0) is 1 by PCI, 0 in CUDA" in order.text
    (mixed,) = of(found, "devices.mixed")
    assert mixed.remedy == "export CUDA_VISIBLE_DEVICES=GPU-b300a"
    assert found.shortage(1, "nvidia") is None
    refused = found.shortage(2, "nvidia")
    assert (
        refused is not None and "TP2 asked over GPUs of different architectures: 0: NVIDIA B300 (sm_103" in refused.text
    )
    assert refused.remedy == "use --tp 1"


def test_b27_a_mixed_group_names_the_cards_that_go_together(tmp_path: Path) -> None:
    cards = [DISPLAY, B300, Card("GPU-b300b", "00000000:42:00.0", "NVIDIA B300", (10, 3), 288 << 30, 18944, 2000)]
    found = look(tmp_path, nvidia_probe(*cards), CUDA_DEVICE_ORDER="PCI_BUS_ID")
    refused = found.shortage(2)
    assert refused is not None and refused.remedy == "export CUDA_VISIBLE_DEVICES=GPU-b300a,GPU-b300b"
    chosen = look(tmp_path, nvidia_probe(*cards), CUDA_VISIBLE_DEVICES="GPU-b300a,GPU-b300b")
    assert chosen.shortage(2) is None


def test_b27_two_amd_architectures(tmp_path: Path) -> None:
    found = look(write_kfd(tmp_path, 90402, 90500), amd_probe())
    (mixed,) = of(found, "devices.mixed")
    assert "AMD GPUs of different architectures are visible: 0: AMD GPU (gfx942" in mixed.text
    assert mixed.remedy == "export ROCR_VISIBLE_DEVICES=GPU-000000000000abc1"
    assert found.shortage(2) is not None
    one = look(tmp_path, amd_probe(), ROCR_VISIBLE_DEVICES="1")
    assert ([g.device.arch for g in one.visible["amd"]], of(one, "devices.mixed")) == (["gfx950"], [])


def test_b27_both_vendors_have_to_be_chosen_from(tmp_path: Path) -> None:
    found = look(write_kfd(tmp_path, 90402), nvidia_probe(*H200[:1]), amd_probe(), torch=ROCM_TORCH)
    assert found.vendors == ("nvidia", "amd")
    assert "GPUs of NVIDIA and AMD are in one machine" in of(found, "devices.mixed")[0].text
    shortage = found.shortage(1)
    assert shortage is not None and shortage.text == "NVIDIA and AMD GPUs are here: one has to be chosen"
    assert found.shortage(1, "amd") is None
    assert not of(found, "devices.torch")


def test_b22_one_device_of_eight_because_of_the_mask(tmp_path: Path) -> None:
    found = look(tmp_path, nvidia_probe(*H200), CUDA_VISIBLE_DEVICES="GPU-3")
    shortage = found.shortage(8)
    assert shortage is not None
    assert shortage.text == "TP8 asked, 1 device visible because CUDA_VISIBLE_DEVICES=GPU-3"
    assert (shortage.severity, shortage.remedy) == ("error", "unset CUDA_VISIBLE_DEVICES")
    assert look(tmp_path, nvidia_probe(*H200)).shortage(8) is None
    few = look(tmp_path, nvidia_probe(*H200[:4])).shortage(8)
    assert few is not None and (few.text, few.remedy) == ("TP8 asked, 4 devices visible", "use --tp 4")


def test_b22_on_amd_every_mask_is_named(tmp_path: Path) -> None:
    environ = {"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "1"}
    found = look(write_kfd(tmp_path, *[90402] * 8), amd_probe(), **environ)
    shortage = found.shortage(8, "amd")
    assert shortage is not None
    assert shortage.text.endswith("1 device visible because ROCR_VISIBLE_DEVICES=0,1 and HIP_VISIBLE_DEVICES=1")


# Joining what several sources say.


def sighting(source: str, index: int = 0, parent: str = "", arch: str = UNKNOWN, **fields: Any) -> SourceReport:
    device = Device("nvidia", arch, fields.pop("name", ""), "fake", **fields)
    return SourceReport(source, "nvidia", "ok", "", (Gpu(device, index, (source,), parent),))


def test_later_sources_fill_what_is_not_known() -> None:
    first = sighting("a", uuid="GPU-1", compute_units=7)
    second = sighting("b", arch="sm_90", uuid="gpu-1", pci="0000:01:00.0", memory_bytes=5, lds_bytes=3, compute_units=9)
    (gpu,), findings = combine([first, second])
    expected = Device(
        "nvidia", "sm_90", "NVIDIA GPU", "fake", memory_bytes=5, lds_bytes=3, compute_units=7, uuid="GPU-1",
        pci="0000:01:00.0",
    )  # fmt: skip
    assert (gpu.device, gpu.sources, findings) == (expected, ("a", "b"), ())


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [
        ({"uuid": "GPU-1"}, {"uuid": "GPU-2"}, 2),
        ({"pci": "0000:01:00.0"}, {"pci": "0000:02:00.0"}, 2),
        ({"pci": "0000:01:00.0"}, {"pci": "0000:01:00.0", "index": 3}, 1),
        ({"uuid": "GPU-1"}, {"pci": "0000:01:00.0"}, 1),
        ({"uuid": "GPU-1"}, {"pci": "0000:01:00.0", "index": 1}, 2),
    ],
)
def test_which_sightings_are_one_device(a: dict[str, Any], b: dict[str, Any], count: int) -> None:
    gpus, _ = combine([sighting("a", **a), sighting("b", **b)])
    assert len(gpus) == count


def test_a_slice_is_never_joined_with_its_gpu() -> None:
    gpus, _ = combine(
        [
            sighting("a", uuid="GPU-1", pci="0000:01:00.0"),
            sighting("b", uuid="MIG-1", pci="0000:01:00.0", parent="GPU-1"),
        ]
    )
    assert [gpu.device.uuid for gpu in gpus] == ["GPU-1", "MIG-1"]
    nameless = sighting("b", pci="0000:01:00.0", parent="GPU-1")
    assert len(combine([sighting("a", uuid="GPU-1", pci="0000:01:00.0"), nameless])[0]) == 2


def test_nodes_of_others_and_more_than_nine_nodes(tmp_path: Path) -> None:
    fake.write_node(tmp_path, 1, gfx_target_version=90402, vendor_id=0x10DE)
    for number in (2, 10, 9):
        fake.write_node(tmp_path, number, gfx_target_version=90010, vendor_id=4098, location_id=number << 8)
    devices = look(tmp_path, amd_probe()).devices
    assert [device.pci for device in devices] == ["0000:02:00.0", "0000:09:00.0", "0000:0a:00.0"]
    assert {device.arch for device in devices} == {"gfx90a"}


# Probes and helpers.


def test_a_probe_that_raises_does_not_stop_the_others(tmp_path: Path) -> None:
    def broken(root: Path) -> list[SourceReport]:
        raise RuntimeError("no luck")

    found = look(write_kfd(tmp_path, 90402), broken, amd_probe())
    assert len(found.gpus) == 1
    assert "RuntimeError: no luck" in of(found, "devices.sources")[0].text


def test_the_registry_has_the_probes_of_both_vendors() -> None:
    assert make_registry(entry_points=False).probes == (cuda.probe, rocm.probe)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3b:00.0", "0000:3b:00.0"),
        ("00010001:01:00.0", "10001:01:00.0"),
        ("nonsense", "nonsense"),
    ],
)
def test_pci_addresses_have_one_spelling(text: str, expected: str) -> None:
    assert pci_address(text) == expected


def test_a_child_that_prints_hangs_fails_or_crashes() -> None:
    assert ask_child("print('hello')") == Answer("hello\n")
    assert ask_child("import time; time.sleep(60)", 0.5).error == "no answer within 0.5 s"
    assert ask_child("raise ImportError('no such thing')").error == "ImportError: no such thing"
    assert ask_child("import os; os.kill(os.getpid(), 11)").error == "signal 11"


def test_what_children_run_is_valid_and_asks_without_the_mask() -> None:
    for code in (cuda._CU_INIT, rocm._AMDSMI):
        compile(code, "child", "exec")
    assert re.match(r"(code \d+|absent .*)", cuda.ask_cu_init().text)
    assert 'pop("CUDA_VISIBLE_DEVICES"' in cuda._CU_INIT


def test_b09_looking_loads_neither_torch_nor_a_vendor_package() -> None:
    code = (
        "import sys; from k3port.plugins import make_registry; from k3port.oracle.detect import detect\n"
        "detect(environ={}, probes=make_registry(entry_points=False).probes)\n"
        "bad = {'torch', 'triton', 'aiter', 'flashinfer', 'amdsmi', 'pynvml'} & set(sys.modules); assert not bad, bad\n"
        "sys.path.insert(0, 'tests/support'); from gpu_context import traces\n"
        "assert not traces(), traces()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_glance_counts_device_nodes_where_there_are_no_driver_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    assert cuda.glance(tmp_path) == []
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    assert [(d.vendor, d.arch) for d in cuda.glance(tmp_path)] == [("nvidia", "unknown")] * 2
    fake.write_driver_files(tmp_path, Card("GPU-0"))
    assert [d.uuid for d in cuda.glance(tmp_path)] == ["GPU-0"]
