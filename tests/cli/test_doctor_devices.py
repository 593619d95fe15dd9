"""``k3port doctor`` on devices and platforms: what is seen, visible, usable, and which profile fits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from doctor_runs import CUDA_TORCH, EIGHT, Machine, gpu, results, texts
from fake_machines import Card, amd_probe, nvidia_probe, write_kfd, write_node

from k3port.cli.doctor_facts import fitting_profiles
from k3port.oracle.detect import TorchBuild
from k3port.oracle.profile import load_profiles
from k3port.oracle.sources import Answer, Gpu
from k3port.oracle.visibility import VARIABLES


@pytest.fixture(autouse=True)
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


# Devices.


def test_b15_doctor_shows_the_source_that_was_used(k3port: Any, machine: Machine, tmp_path: Path) -> None:
    write_node(tmp_path, 1, vendor_id=4098, gfx_target_version=90500)
    machine(amd_probe(Answer("[]")), torch=TorchBuild("2.14.0", hip="7.1"))
    found = results(k3port, code=1)  # the device file is not there
    assert "amdsmi lists 0 GPU(s), kfd lists 1; kfd is used first" in texts(found, "devices.sources", "warning")
    assert "1 GPU(s) seen, 1 visible, 0 usable: AMD GPU (gfx950)" in texts(found, "devices.found", "ok")
    assert "/dev/kfd is not there" in texts(found, "devices.usable", "fail")


@pytest.mark.parametrize(
    ("environ", "visible", "warning"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, 0, "counts what ROCR_VISIBLE_DEVICES=1 leaves"),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0"}, 1, ""),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, 1, "disagree: HIP goes by HIP_VISIBLE_DEVICES"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1, ""),
    ],
)
def test_b19_doctor_computes_the_effective_set(
    k3port: Any, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str],
    visible: int, warning: str,
) -> None:  # fmt: skip
    write_kfd(tmp_path, 90402, 90402)
    machine(amd_probe(), torch=TorchBuild("2.14.0", hip="7.1"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    result = k3port("doctor", "--json")
    found = {c["id"]: c for c in json.loads(result.out)["checks"] if c["id"] == "devices.visible"}
    assert f"2 GPU(s) seen, {visible} visible" in result.out
    said = [
        c["text"] for c in json.loads(result.out)["checks"] if c["id"] == "devices.visible" and c["status"] == "warning"
    ]
    assert bool(said) == bool(warning)
    assert warning in "".join(said)
    assert found or not warning


@pytest.mark.parametrize("mask", ["GPU-8", "GPU-0", "MIG-1", "0,,1", "", "-1", "99", "x"])
def test_b17_no_mask_stops_doctor(k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    machine(nvidia_probe(*EIGHT), torch=CUDA_TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    result = k3port("doctor", "-v")
    assert result.code in (0, 1)
    assert "8 GPU(s) seen" in result.out
    assert "error: " not in result.err


def test_b17_an_unknown_uuid_is_named(k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(nvidia_probe(*EIGHT), torch=CUDA_TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-feed")
    assert "no GPU has the UUID GPU-feed" in k3port("doctor").out


def test_b22_fewer_devices_than_ranks(k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(nvidia_probe(*EIGHT), torch=CUDA_TORCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-3")
    result = k3port("doctor", "--tp", "8")
    assert result.code == 1
    assert "x devices.group: TP8 asked, 1 device visible because CUDA_VISIBLE_DEVICES=GPU-3\n" in result.out
    assert "try: unset CUDA_VISIBLE_DEVICES" in result.out
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "devices.group: 8 GPUs of one architecture are usable together" in k3port("doctor", "--tp", "8", "-v").out


def test_b25_time_and_source_of_the_look(k3port: Any, machine: Machine, tmp_path: Path) -> None:
    write_kfd(tmp_path)
    machine(amd_probe())
    before = json.loads(k3port("doctor", "--json").out)["detection"]
    write_kfd(tmp_path, *[90500] * 8)
    after = json.loads(k3port("doctor", "--json").out)["detection"]
    assert (len(before["gpus"]), len(after["gpus"])) == (0, 8)
    assert re.match(r"\d{4}-.*\+00:00$", after["at"])
    assert [(s["source"], s["state"]) for s in after["sources"]] == [
        ("kfd", "ok"),
        ("amdsmi", "absent"),
        ("pci", "absent"),
    ]


def test_b27_mixed_cards(k3port: Any, machine: Machine) -> None:
    display = Card("GPU-d", "00000000:01:00.0", "NVIDIA RTX 5060", (12, 0), 8 << 30, 3840, 2500)
    b300 = Card("GPU-c", "00000000:41:00.0", "NVIDIA B300", (10, 3), 288 * 10**9, 18944, 2000)
    machine(nvidia_probe(display, b300), torch=CUDA_TORCH)
    found = results(k3port, code=None)
    assert "NVIDIA B300 (0000:41:00.0) is 1 by PCI, 0 in CUDA" in texts(found, "devices.order", "warning")
    assert "different architectures" in texts(found, "devices.mixed", "warning")
    assert "b300 (sm_103), recognised by its architecture" in texts(found, "profiles.platform", "ok")
    asked = results(k3port, "--tp", "2", code=1)
    assert "TP2 asked over GPUs of different architectures" in texts(asked, "devices.group", "fail")


def test_b27_two_vendors(k3port: Any, machine: Machine, tmp_path: Path) -> None:
    write_kfd(tmp_path, 90402)
    machine(nvidia_probe(*EIGHT[:1]), amd_probe(), torch=CUDA_TORCH)
    assert "a run uses one vendor, which has to be chosen" in k3port("doctor").out


@pytest.mark.parametrize(("code", "cause"), [(802, "fabric manager"), (803, "different versions"), (804, "compat")])
def test_b28_seen_and_not_usable(k3port: Any, machine: Machine, code: int, cause: str) -> None:
    machine(nvidia_probe(*EIGHT, code=code), torch=TorchBuild("2.14.0", cuda="13.2"))
    found = results(k3port, code=1)
    assert "8 GPU(s) seen, 8 visible, 0 usable" in texts(found, "devices.found")
    assert cause in texts(found, "devices.usable", "fail")
    assert "built for CUDA 13.2, driver 580.95.05 goes up to CUDA 13.0" in texts(found, "devices.torch", "warning")
    assert "no GPU can compute" in texts(found, "devices.group", "fail")


def test_torch_of_another_vendor(k3port: Any, machine: Machine, tmp_path: Path) -> None:
    write_kfd(tmp_path, 90402)
    machine(amd_probe(), torch=CUDA_TORCH)
    assert "is built for CUDA, the GPUs are from AMD" in texts(results(k3port, code=None), "devices.torch", "warning")


# Platforms.


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mi355", "mi355x (gfx950)"), ("mi350", "mi350x (gfx950)"), ("MI355X", "mi355x (gfx950)"),
        ("mi325", "mi325x (gfx942)"), ("gfx1250", "mi450 (gfx1250)"),
    ],
)  # fmt: skip
def test_b21_platform_names(k3port: Any, machine: Machine, name: str, line: str) -> None:
    machine()
    found = results(k3port, "--platform", name)
    assert texts(found, "profiles.platform", "info").startswith(
        f"{line}, from --platform; answers come from the profile"
    )


def test_b21_ambiguous_and_unknown_names(k3port: Any, machine: Machine) -> None:
    machine()
    several = k3port("doctor", "--platform", "gfx950")
    assert (several.code, "mi350x and mi355x" in several.err) == (2, True)
    unknown = k3port("doctor", "--platform", "mi999q")
    assert unknown.code == 2
    assert all(name in unknown.err for name in ("mi300x", "b300", "cpu"))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (gpu("AMD Instinct MI355X", "gfx950"), ["mi355x"]),
        (gpu("AMD Instinct MI350X OAM", "gfx950"), ["mi350x"]),
        (gpu("AMD Radeon Graphics", "gfx950"), ["mi350x", "mi355x"]),
        (gpu("AMD Instinct MI355X", "gfx942", 256 * 10**9), ["mi325x"]),
        (gpu("", "gfx942", 192 * 10**9), ["mi300x"]),
        (gpu("NVIDIA H200 NVL", "sm_90", vendor="nvidia"), ["h200"]),
        (gpu("NVIDIA GB300", "sm_103", vendor="nvidia"), ["gb300-nvl72"]),
        (gpu("MI300X", "sm_90", 80 * 10**9, vendor="nvidia"), ["h100"]),
        (gpu("MI300X", "gfx1100"), []),
    ],
)
def test_b21_the_architecture_decides_and_names_only_tell_equals_apart(found: Gpu, expected: list[str]) -> None:
    assert [profile.name for profile in fitting_profiles(found, load_profiles())] == expected


def test_several_platforms_fit(k3port: Any, machine: Machine, tmp_path: Path) -> None:
    write_kfd(tmp_path, 90500, memory=288 * 10**9)
    machine(amd_probe(), torch=TorchBuild("2.14.0", hip="7.1"))
    text = texts(results(k3port, code=None), "profiles.platform", "warning")
    assert text == "the GPUs fit several platforms: mi350x, mi355x"
