"""Detection on machines that are not here: sources, their disagreements, and what keeps a GPU from computing."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import fake_machines as fake
import pytest
from fake_machines import Card, FakeNvml, amd_probe, look, no_nvidia_probe, nvidia_probe, write_kfd

from k3port.backends.cuda import device as cuda
from k3port.oracle.detect import Detection, TorchBuild
from k3port.oracle.sources import Answer, Finding, SourceReport

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
