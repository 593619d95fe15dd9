"""Masks of GPUs: what the runtimes make of them, and what is said about it."""

from __future__ import annotations

import pytest

from k3port.oracle.sources import Gpu
from k3port.oracle.spec import Device
from k3port.oracle.visibility import Visible, amd_visible, nvidia_visible

UUIDS = ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU-8a51bb2c-0000-0000-0000-000000000001", "GPU-c0ffee00-1")
SLICE = "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2"


def gpu(vendor: str, number: int, uuid: str, arch: str, *, parent: str = "", speed: int = 0, name: str = "") -> Gpu:
    device = Device(vendor, arch, name or f"card {arch}", "fake", uuid=uuid, pci=f"0000:{number + 1:02x}:00.0")
    return Gpu(device, number, ("fake",), parent, speed)


NVIDIA = tuple(gpu("nvidia", n, uuid, "sm_90") for n, uuid in enumerate(UUIDS))
AMD = tuple(gpu("amd", n, f"GPU-{0xABC0 + n:016x}", "gfx942") for n in range(2))


def chosen(visible: Visible) -> list[int]:
    return [gpu.index for gpu in visible.gpus]


def texts(visible: Visible, severity: str = "warning") -> str:
    return "\n".join(f.text for f in visible.findings if f.severity == severity)


NVIDIA_MASKS = [
    # mask, visible, what is said
    (None, [0, 1, 2], ""),
    ("0,1,2", [0, 1, 2], ""),
    ("2,0", [2, 0], ""),
    (" 1 , 2 ", [1, 2], ""),
    (UUIDS[2], [2], ""),
    (f"{UUIDS[1]},{UUIDS[0]}", [1, 0], ""),
    ("GPU-c0ffee", [2], ""),
    ("GPU-8932", [0], ""),
    ("GPU-8", [], "GPU-8 fits 2 GPUs"),
    ("GPU-deadbeef", [], "no GPU has the UUID GPU-deadbeef (there: GPU-8932f937"),
    (f"{UUIDS[0]},GPU-deadbeef,{UUIDS[1]}", [0], f"UUID GPU-deadbeef (there: {', '.join(UUIDS)}); what comes after it"),
    ("0,,1", [0], "entry 2 is empty and ends the list; what comes after it is ignored: 1"),
    (",0", [], "entry 1 is empty and ends the list; what comes after it is ignored: 0"),
    ("0,7,1", [0], "there is no GPU 7 (there: 0 to 2); what comes after it is ignored: 1"),
    ("0,-1,1", [0], "-1 ends the list; what comes after it is ignored: 1"),
    ("0,1,0", [], "0 is named twice, which leaves no GPU at all"),
    (f"{UUIDS[0]},GPU-8932", [], "GPU-8932 is named twice"),
    ("all", [], "'all' is no index"),
    ("0x1", [], "'0x1' is no index"),
    (f"{UUIDS[0]},1", [0], "'1' ends a list of GPU-… entries"),
    (f"0,{UUIDS[1]}", [0], "is no index"),
    ("²", [], "'²' is no index"),
    ("MIG-unknown", [], "no GPU has the UUID MIG-unknown"),
]


@pytest.mark.parametrize(("mask", "expected", "said"), NVIDIA_MASKS, ids=[str(case[0]) for case in NVIDIA_MASKS])
def test_b17_nvidia_masks(mask: str | None, expected: list[int], said: str) -> None:
    visible = nvidia_visible(NVIDIA, {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert chosen(visible) == expected
    assert said in texts(visible)
    assert bool(said) == bool(texts(visible))
    assert visible.because == ("" if len(expected) == 3 else f"CUDA_VISIBLE_DEVICES={mask}")
    assert all(f.id == "devices.visible" and f.remedy == "unset CUDA_VISIBLE_DEVICES" for f in visible.findings
               if "-1 ends" not in f.text)  # fmt: skip


@pytest.mark.parametrize("mask", ["", " ", "-1"])
def test_b17_an_empty_mask_and_minus_one_hide_all(mask: str) -> None:
    visible = nvidia_visible(NVIDIA, {"CUDA_VISIBLE_DEVICES": mask})
    assert (visible.gpus, texts(visible)) == ((), "")
    assert "hides all GPUs" in texts(visible, "info")


def test_b17_mig_slices_by_uuid() -> None:
    slices = [gpu("nvidia", 0, SLICE, "sm_90", parent=UUIDS[0]), gpu("nvidia", 1, "MIG-ffff", "sm_90", parent=UUIDS[0])]
    every = (NVIDIA[0], *slices)
    named = nvidia_visible(every, {"CUDA_VISIBLE_DEVICES": SLICE})
    assert [g.device.uuid for g in named.gpus] == [SLICE]
    assert not named.findings and named.because
    short = nvidia_visible(every, {"CUDA_VISIBLE_DEVICES": "MIG-3eb8"})
    assert short.gpus == named.gpus
    older = nvidia_visible(every, {"CUDA_VISIBLE_DEVICES": f"MIG-{UUIDS[0]}/1/0"})
    assert older.gpus == named.gpus
    assert "is an older spelling, taken as the first of" in texts(older)
    assert "older" not in texts(nvidia_visible(every[:2], {"CUDA_VISIBLE_DEVICES": f"MIG-{UUIDS[0]}/1/0"}))
    two = nvidia_visible(every, {"CUDA_VISIBLE_DEVICES": f"{SLICE},MIG-ffff"})
    assert two.gpus == named.gpus
    assert "one process can use one MIG device" in texts(two)
    unnamed = nvidia_visible(every, {})
    assert "MIG is on (2 slices) and none is named" in texts(unnamed)


DISPLAY = gpu("nvidia", 0, "GPU-display", "sm_120", speed=10, name="RTX 5060")
COMPUTE = gpu("nvidia", 1, "GPU-compute", "sm_103", speed=90, name="B300")


def test_b27_an_index_means_another_card_in_each_order() -> None:
    by_speed = nvidia_visible((DISPLAY, COMPUTE), {"CUDA_VISIBLE_DEVICES": "0"})
    assert by_speed.gpus == (COMPUTE,)
    assert "B300 (0000:02:00.0) is 1 by PCI, 0 in CUDA; RTX 5060 (0000:01:00.0) is 0 by PCI, 1 in CUDA" in texts(
        by_speed
    )
    assert by_speed.findings[0].id == "devices.order"
    assert by_speed.findings[0].remedy == "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
    by_bus = nvidia_visible((DISPLAY, COMPUTE), {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert (by_bus.gpus, by_bus.findings) == ((DISPLAY,), ())
    by_uuid = nvidia_visible((DISPLAY, COMPUTE), {"CUDA_VISIBLE_DEVICES": "GPU-compute"})
    assert by_uuid.gpus == (COMPUTE,)


def test_equal_cards_have_one_order() -> None:
    assert nvidia_visible(NVIDIA, {}).findings == ()


AMD_MASKS = [
    # variables, visible, warning, whether a mask is said to hide something
    ({}, [0, 1], ""),
    ({"ROCR": "1"}, [1], ""),
    ({"ROCR": "1,0"}, [1, 0], ""),
    ({"HIP": "0"}, [0], ""),
    ({"ROCR": "1", "HIP": "1"}, [], "counts what ROCR_VISIBLE_DEVICES=1 leaves (1 of 2 GPUs), not all GPUs: 0 stay"),
    ({"ROCR": "1", "HIP": "0"}, [1], "counts what ROCR_VISIBLE_DEVICES=1 leaves (1 of 2 GPUs), not all GPUs: 1 stay"),
    ({"ROCR": "1", "CUDA": "1"}, [], "CUDA_VISIBLE_DEVICES=1: counts what ROCR_VISIBLE_DEVICES=1 leaves"),
    ({"ROCR": "1,0", "HIP": "0"}, [1], "counts what"),
    ({"HIP": "0", "CUDA": "0"}, [0], ""),
    ({"HIP": "0", "CUDA": "1"}, [0], "HIP_VISIBLE_DEVICES=0 and CUDA_VISIBLE_DEVICES=1 disagree"),
    ({"CUDA": "1"}, [1], ""),
    ({"HIP": "", "CUDA": "1"}, [1], ""),
    ({"HIP": ""}, [], "HIP itself ignores it, PyTorch sees no GPU"),
    ({"HIP": "-1"}, [], ""),
    ({"ROCR": ""}, [], ""),
    ({"ROCR": "GPU-000000000000ABC1"}, [1], ""),
    ({"HIP": "GPU-000000000000abc1"}, [1], ""),
    ({"ROCR": "GPU-00000000"}, [], "GPU-00000000 fits 2 GPUs"),
    ({"ROCR": "GPU-ffff"}, [], "no GPU has the UUID GPU-ffff"),
    ({"ROCR": "0,0,1"}, [0], "0 is named twice and ends the list; what comes after it is ignored: 1"),
    ({"HIP": "0,0,1"}, [0, 1], "0 is named twice"),
    ({"HIP": "0,,1"}, [0], "entry 2 is empty"),
    ({"HIP": "2"}, [], "there is no GPU 2 (there: 0 to 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "expected", "said"), AMD_MASKS, ids=[str(case[0]) for case in AMD_MASKS])
def test_b19_amd_masks(mask: dict[str, str], expected: list[int], said: str) -> None:
    visible = amd_visible(AMD, {f"{name}_VISIBLE_DEVICES": value for name, value in mask.items()})
    assert chosen(visible) == expected
    assert said in texts(visible)
    assert bool(said) == bool(texts(visible))
    assert bool(visible.because) == (len(expected) < 2)


def test_b19_says_which_variable_is_preferred() -> None:
    only_cuda = amd_visible(AMD, {"CUDA_VISIBLE_DEVICES": "1"})
    assert "HIP_VISIBLE_DEVICES is preferred" in texts(only_cuda, "info")
    both = amd_visible(AMD, {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})
    assert "HIP goes by HIP_VISIBLE_DEVICES" in texts(both)
    assert both.findings[-1].remedy == "export CUDA_VISIBLE_DEVICES=0"
    double = amd_visible(AMD, {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"})
    assert double.because == "ROCR_VISIBLE_DEVICES=1 and HIP_VISIBLE_DEVICES=1"
    assert {f.remedy for f in double.findings} == {"unset HIP_VISIBLE_DEVICES"}


def test_b19_the_opencl_variable_hides_nothing() -> None:
    visible = amd_visible(AMD, {"GPU_DEVICE_ORDINAL": "0"})
    assert chosen(visible) == [0, 1]
    assert "GPU_DEVICE_ORDINAL=0 is for OpenCL" in texts(visible)


def test_masks_of_the_other_vendor_say_nothing() -> None:
    assert amd_visible((), {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}).because == ""
    assert nvidia_visible(NVIDIA, {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}).gpus == NVIDIA
