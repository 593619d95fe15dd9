"""Detection on machines that are not here: sources, their disagreements, and what keeps a GPU from computing."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fake_machines as fake
import pytest
from fake_machines import Card, FakeNvml, amd_probe, look, no_nvidia_probe, nvidia_probe, write_kfd

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


# No GPU is normal.


def test_b16_no_gpu_is_no_finding_and_has_reasons(tmp_path: Path) -> None:
    found = look(tmp_path, no_nvidia_probe(), amd_probe(), torch=CUDA_TORCH)
    assert (found.gpus, found.findings, found.vendors) == ((), (), ())
    reasons = "\n".join(found.why_cpu)
    assert "libnvidia-ml.so.1 cannot be loaded" in reasons
    assert "no /dev/kfd" in reasons
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", found.at)
    assert found.shortage(1, "cpu") is None
    shortage = found.shortage(1)
    assert shortage is not None and shortage.text == "TP1 asked, no GPU was found"
    missing = found.shortage(8, "amd")
    assert missing is not None and missing.text == "TP8 asked, no AMD GPU was found"


# AMD: the driver's tree.


def test_amd_devices_have_everything_that_the_tree_knows(tmp_path: Path) -> None:
    write_kfd(tmp_path, 90402, 90500)
    fake.write_bank(tmp_path, 1, 1, heap_type=2, size_in_bytes=1 << 30)
    fake.write_bank(tmp_path, 1, 2, heap_type=4, size_in_bytes=5 << 30)  # on-chip memory is no memory of the GPU
    (tmp_path / "opt/rocm/.info").mkdir(parents=True)
    (tmp_path / "opt/rocm/.info/version").write_text("7.1.0-123\n")
    first, second = look(tmp_path, amd_probe()).devices
    assert (first.arch, second.arch) == ("gfx942", "gfx950")
    assert (first.memory_bytes, second.memory_bytes) == (193 << 30, 192 << 30)
    assert (first.lds_bytes, first.compute_units) == (65536, 304)
    assert (first.uuid, first.pci) == ("GPU-000000000000abc1", "0000:01:00.0")
    assert look(tmp_path, amd_probe()).runtime == {"rocm": "7.1.0-123"}


def test_pci_place_of_a_node(tmp_path: Path) -> None:
    fake.write_node(tmp_path, 1, gfx_target_version=90402, location_id=(0xC5 << 8) | (3 << 3) | 1, domain=2)
    (gpu,) = look(tmp_path, amd_probe()).gpus
    assert gpu.device.pci == "0002:c5:03.1"


def test_b15_a_management_library_that_lists_nothing(tmp_path: Path) -> None:
    fake.write_node(tmp_path, 1, vendor_id=4098, gfx_target_version=90500)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    found = look(tmp_path, amd_probe(Answer("[]")))
    assert [d.arch for d in found.devices] == ["gfx950"]
    assert found.gpus[0].sources == ("kfd",)
    (finding,) = of(found, "devices.sources", "warning")
    assert finding.text == "amdsmi lists 0 GPU(s), kfd lists 1; kfd is used first"
    assert len(found.usable("amd")) == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(error="no answer within 10 s"), "no answer within 10 s"),
        (Answer("Segmentation"), "its answer cannot be read: JSONDecodeError"),
        (Answer('[{"name": "x"}]'), "its answer cannot be read: KeyError"),
        (Answer(""), "its answer cannot be read: IndexError"),
    ],
)
def test_b15_a_management_library_that_fails(tmp_path: Path, answer: Answer, reason: str) -> None:
    found = look(write_kfd(tmp_path, 90402), amd_probe(answer))
    assert [d.arch for d in found.devices] == ["gfx942"]
    (finding,) = of(found, "devices.sources", "warning")
    assert finding.text == f"amdsmi gives nothing ({reason}); kfd is used"


def smi(*entries: tuple[str, str, str]) -> Answer:
    import json

    return Answer("a line of its own\n" + json.dumps([{"pci": p, "name": n, "gfx": g} for p, n, g in entries]))


@pytest.mark.parametrize(
    ("name", "version", "arch"),
    [
        ("AMD Instinct MI355X", 90500, "gfx950"),
        ("MI350X OAM", 90500, "gfx950"),
        ("AMD Instinct MI325X", 90402, "gfx942"),
        ("AMD Radeon Graphics", 90500, "gfx950"),
        ("", 90402, "gfx942"),
        ("NVIDIA H200 NVL", 90402, "gfx942"),
    ],
)
def test_b21_names_are_labels_on_amd(tmp_path: Path, name: str, version: int, arch: str) -> None:
    found = look(write_kfd(tmp_path, version), amd_probe(smi(("0000:01:00.0", name, ""))))
    (gpu,) = found.gpus
    assert gpu.device.arch == arch
    assert gpu.device.name == (name or "AMD GPU")
    assert gpu.sources == ("kfd", "amdsmi")
    assert not found.findings


@pytest.mark.parametrize(
    ("name", "capability", "arch"),
    [
        ("NVIDIA H200 NVL", (9, 0), "sm_90"),
        ("NVIDIA GB300", (10, 3), "sm_103"),
        ("AMD Instinct MI300X", (12, 1), "sm_121"),
        ("", (10, 0), "sm_100"),
    ],
)
def test_b21_names_are_labels_on_nvidia(tmp_path: Path, name: str, capability: tuple[int, int], arch: str) -> None:
    (gpu,) = look(tmp_path, nvidia_probe(Card("GPU-0", name=name, capability=capability))).gpus
    assert (gpu.device.vendor, gpu.device.arch, gpu.device.name) == ("nvidia", arch, name or "NVIDIA GPU")


def test_sources_that_disagree_on_the_architecture(tmp_path: Path) -> None:
    found = look(write_kfd(tmp_path, 90402), amd_probe(smi(("0000:01:00.0", "MI355X", "gfx950"))))
    assert found.devices[0].arch == "gfx942"
    (finding,) = of(found, "devices.sources")
    assert "kfd says gfx942, amdsmi says gfx950; gfx942 is used" in finding.text


def test_amdsmi_and_hip_count_differently(tmp_path: Path) -> None:
    answer = smi(("0000:02:00.0", "MI300X", "gfx942"), ("0000:01:00.0", "MI300X", "gfx942"))
    found = look(write_kfd(tmp_path, 90402, 90402), amd_probe(answer))
    assert [d.pci for d in found.devices] == ["0000:01:00.0", "0000:02:00.0"]
    (finding,) = of(found, "devices.order")
    assert finding.text.endswith("0000:01:00.0 is 1 and 0, 0000:02:00.0 is 0 and 1")


def test_partitions_of_one_gpu_stay_apart(tmp_path: Path) -> None:
    for node in (1, 2):
        fake.write_node(tmp_path, node, gfx_target_version=90402, location_id=0x100, unique_id=7)
    assert len(look(tmp_path, amd_probe()).gpus) == 2


def test_nodes_that_cannot_be_read_belong_to_others(tmp_path: Path) -> None:
    write_kfd(tmp_path, 90402)
    (tmp_path / fake.NODES / "5/properties").mkdir(parents=True)  # reading it fails, as a denied one does
    found = look(tmp_path, amd_probe())
    assert len(found.gpus) == 1
    assert "1 nodes belong to others" in report(found, "kfd").detail


@pytest.mark.parametrize("text", ["", "garbage", "gfx_target_version\n", "gfx_target_version x\n", "\x00\xff"])
def test_damaged_nodes_are_no_devices(tmp_path: Path, text: str) -> None:
    write_kfd(tmp_path, 90402)
    (tmp_path / fake.NODES / "1/properties").write_text(text)
    assert look(tmp_path, amd_probe()).gpus == ()


def test_amd_device_file_missing_or_closed(tmp_path: Path) -> None:
    missing = look(write_kfd(tmp_path, 90402, device=False), amd_probe())
    assert (len(missing.gpus), missing.usable("amd")) == (1, ())
    (finding,) = of(missing, "devices.usable", "error")
    assert finding.text == "1 AMD GPU(s) are seen and none is usable: /dev/kfd is not there"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    closed = look(tmp_path, amd_probe(openable=False))
    (finding,) = of(closed, "devices.usable", "error")
    assert finding.remedy == "sudo usermod -aG render,video $USER"
    shortage = closed.shortage(1, "amd")
    assert shortage is not None and "no GPU can compute: /dev/kfd may not be opened" in shortage.text
    assert not of(look(tmp_path, amd_probe()), "devices.usable")


def test_b25_detection_looks_again(tmp_path: Path) -> None:
    write_kfd(tmp_path)
    first = look(tmp_path, amd_probe())
    assert (first.gpus, report(first, "kfd").state) == ((), "ok")
    write_kfd(tmp_path, *[90500] * 8)
    second = look(tmp_path, amd_probe())
    assert [d.arch for d in second.devices] == ["gfx950"] * 8
    assert second.at and report(second, "kfd").detail.endswith("kfd/topology/nodes")


# NVIDIA: library, driver files, cuInit.


def test_nvidia_devices_have_everything_that_the_library_knows(tmp_path: Path) -> None:
    library = FakeNvml(H200[:2])
    found = look(tmp_path, nvidia_probe(nvml=library))
    device = found.devices[1]
    assert (device.arch, device.name, device.uuid, device.pci) == ("sm_90", "NVIDIA H200", "GPU-1", "0000:02:00.0")
    assert device.memory_bytes == 141 << 30
    assert found.runtime == {"driver": "580.95.05", "cuda_ceiling": "13.0"}
    assert (found.findings, len(found.usable("nvidia")), library.closed) == ((), 2, 1)


def test_sources_are_joined_by_uuid_and_place(tmp_path: Path) -> None:
    fake.write_driver_files(tmp_path, *H200[:2])
    fake.write_pci(tmp_path, "0000:01:00.0", 0x10DE)
    fake.write_pci(tmp_path, "0000:02:00.0", 0x10DE)
    fake.write_pci(tmp_path, "0000:03:00.0", 0x10DE, kind=0x040300)  # the sound device of a card
    found = look(tmp_path, nvidia_probe(*H200[:2]))
    assert [gpu.sources for gpu in found.gpus] == [("nvml", "driver files")] * 2
    assert found.findings == ()


def test_memory_that_is_not_reported_stays_unknown(tmp_path: Path) -> None:
    found = look(tmp_path, nvidia_probe(*H200[:1], fail={"nvmlDeviceGetMemoryInfo": 3, "nvmlDeviceGetNumGpuCores": 3}))
    assert (found.devices[0].memory_bytes, found.devices[0].arch) == (0, "sm_90")


def test_an_older_library_lacks_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "do_nvmlDeviceGetNumGpuCores")
    monkeypatch.delattr(FakeNvml, "do_nvmlSystemGetCudaDriverVersion_v2")
    found = look(tmp_path, nvidia_probe(*H200[:1]))
    assert (found.devices[0].arch, found.runtime) == ("sm_90", {"driver": "580.95.05"})


def test_without_the_library_the_architecture_is_unknown(tmp_path: Path) -> None:
    fake.write_driver_files(tmp_path, H200[0])
    probe = partial(cuda.probe, nvml=fake.no_library, cu_init=lambda: Answer("code 0"))
    found = look(tmp_path, probe)
    assert [(d.arch, d.name, d.uuid) for d in found.devices] == [("unknown", "NVIDIA H200", "GPU-0")]
    (finding,) = of(found, "devices.sources", "warning")
    assert "the architecture of 1 NVIDIA GPU(s) is unknown (libnvidia-ml.so.1 cannot be loaded" in finding.text


@pytest.mark.parametrize(
    ("fail", "cause", "remedy"),
    [
        ({"nvmlInit_v2": 18}, "driver and library have different versions (nvmlInit_v2 gives error 18)", "sudo reboot"),
        ({"nvmlInit_v2": 9}, "the driver is not loaded", "sudo modprobe nvidia"),
        ({"nvmlInit_v2": 77}, "the management library does not start (nvmlInit_v2 gives error 77)", "nvidia-smi"),
        ({"nvmlDeviceGetHandleByIndex_v2": 15}, "a GPU has fallen off the bus", "sudo reboot"),
        ({"nvmlDeviceGetCount_v2": 1}, "the devices cannot be listed", "nvidia-smi"),
    ],
)
def test_a_library_that_fails(tmp_path: Path, fail: dict[str, int], cause: str, remedy: str) -> None:
    fake.write_driver_files(tmp_path, H200[0])
    found = look(tmp_path, nvidia_probe(*H200[:1], fail=fail))
    assert [gpu.sources for gpu in found.gpus] == [("driver files",)]
    finding = of(found, "devices.sources", "warning")[0]
    assert finding.text.startswith(f"NVML: {cause}") and finding.remedy == remedy
    assert any("nvml gives nothing" in f.text and "driver files is used" in f.text for f in found.findings)


def test_mig_slices_follow_their_gpu(tmp_path: Path) -> None:
    cards = [Card("GPU-0", H200[0].pci, slices=("MIG-a", "MIG-b")), Card("GPU-1", H200[1].pci)]
    found = look(tmp_path, nvidia_probe(*cards), CUDA_VISIBLE_DEVICES="MIG-b")
    assert [(g.device.uuid, g.parent) for g in found.gpus] == [
        ("GPU-0", ""), ("MIG-a", "GPU-0"), ("MIG-b", "GPU-0"), ("GPU-1", ""),
    ]  # fmt: skip
    (visible,) = found.visible["nvidia"]
    assert (visible.device.uuid, visible.device.arch) == ("MIG-b", "sm_90")
    assert visible.device.memory_bytes == (141 << 30) // 8


def test_mig_that_is_configured_and_switched_off(tmp_path: Path) -> None:
    found = look(tmp_path, nvidia_probe(Card("GPU-0", slices=("MIG-a",), mig_on=False)))
    assert [g.device.uuid for g in found.gpus] == ["GPU-0"]


def test_a_uuid_that_the_driver_does_not_know_yet(tmp_path: Path) -> None:
    fake.write_driver_files(tmp_path, Card("GPU-????????-????-????-????-????????????"))
    assert cuda.find_devices(tmp_path / "proc/driver/nvidia/gpus")[0].uuid == ""


INIT = [
    (802, "fabric manager is not running", "sudo systemctl restart nvidia-fabricmanager"),
    (803, "kernel module and its user library have different versions", "sudo reboot"),
    (804, "forward-compatibility library", "remove cuda-compat"),
    (100, "no device for this process", "docker run --gpus all"),
    (999, "nvidia_uvm", "sudo modprobe nvidia_uvm"),
    (46, "refuses to start", "nvidia-smi"),
]


@pytest.mark.parametrize(("code", "cause", "remedy"), INIT)
def test_b28_seen_is_not_usable(tmp_path: Path, code: int, cause: str, remedy: str) -> None:
    found = look(tmp_path, nvidia_probe(*H200, code=code), torch=CUDA_TORCH)
    assert (len(found.gpus), len(found.visible["nvidia"]), found.usable("nvidia")) == (8, 8, ())
    (finding,) = of(found, "devices.usable", "error")
    assert f"8 NVIDIA GPU(s) are seen and none is usable: cuInit gives error {code}" in finding.text
    assert cause in finding.text
    assert finding.remedy.startswith(remedy)
    shortage = found.shortage(8, "nvidia")
    assert shortage is not None and cause in shortage.text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Answer("absent libcuda.so.1: cannot open"), "libcuda.so.1 cannot be loaded (libcuda.so.1: cannot open)"),
        (Answer(error="no answer within 30 s"), "cuInit did not answer: no answer within 30 s"),
        (Answer(""), "cuInit did not answer: nothing printed"),
    ],
)
def test_b28_a_driver_that_does_not_answer(tmp_path: Path, answer: Answer, text: str) -> None:
    found = look(tmp_path, nvidia_probe(*H200[:1], answer=answer))
    assert found.blocked == {"nvidia": text}


@pytest.mark.parametrize(
    ("built", "ceiling", "severity", "said"),
    [
        ("13.0", 13000, "", ""),
        ("12.8", 13000, "", ""),
        ("13.2", 13000, "warning", "built for CUDA 13.2, driver 580.95.05 goes up to CUDA 13.0: compiled kernels run"),
        ("13.0", 12080, "error", "built for CUDA 13.0, driver 580.95.05 goes up to CUDA 12.8: kernels will not start"),
    ],
)
def test_b28_runtime_newer_than_the_driver(tmp_path: Path, built: str, ceiling: int, severity: str, said: str) -> None:
    found = look(tmp_path, nvidia_probe(*H200[:1], cuda=ceiling), torch=TorchBuild("2.14.0", cuda=built))
    assert [f.severity for f in of(found, "devices.torch")] == ([severity] if severity else [])
    assert said in "".join(f.text for f in found.findings)
    if severity == "error":
        assert of(found, "devices.torch")[0].remedy.endswith("/cu128")


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
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "found = [line for line in maps.splitlines() if any(n in line for n in ('libcuda.so', 'libcudart', 'libamdhip'))]\n"
        "assert not found, found\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
