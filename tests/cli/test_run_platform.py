"""``k3port run`` where a GPU is in the machine: which platform it takes, what it says, and when it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_machines as fake
import pytest
import torch
from fake_machines import Card, amd_probe, look, nvidia_probe, write_kfd
from pretend_gpu import pretend_placement

from k3port import plugins
from k3port.errors import CapacityError, ExitCode, PlanError
from k3port.oracle.detect import Detection, TorchBuild
from k3port.oracle.spec import Device
from k3port.plugins import Registry
from k3port.runtime.choice import idle_gpus

CUDA_TORCH = TorchBuild("2.14.0+cu130", cuda="13.0")
GPU = Device("nvidia", "unknown", "NVIDIA H200", "fake")
SHORT = ("-n", "4", "--seed", "7")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3PORT_THREADS", "1")


def use(
    monkeypatch: pytest.MonkeyPatch, detection: Detection, *devices: Device, without: tuple[str, ...] = ()
) -> Registry:
    """A machine with these GPUs, whose device is the CPU in truth; kernels of ``without`` do not exist."""
    everything = plugins.make_registry(entry_points=False)
    kept = tuple(spec for spec in everything.kernels if not spec.name.startswith(without))
    registry = dataclasses.replace(everything, devices=devices or (GPU,), kernels=kept, problems=())
    monkeypatch.setattr("k3port.runtime.prepare.default_registry", lambda: registry)
    monkeypatch.setattr("k3port.runtime.prepare.detect_here", lambda registry: detection)
    monkeypatch.setattr("k3port.runtime.runtime.open_placement", pretend_placement)
    return registry


@pytest.fixture
def h200(tmp_path: Path) -> Detection:
    return look(tmp_path, nvidia_probe(Card("GPU-0")), torch=CUDA_TORCH)


@pytest.fixture
def bare_h200(monkeypatch: pytest.MonkeyPatch, h200: Detection) -> Detection:
    """An H200 for which nothing is built: only references and declared kernels."""
    monkeypatch.setattr("k3port.oracle.spec.KernelSpec.is_built", property(_is_reference))
    use(monkeypatch, h200, without=("portable.", "cpu."))
    return h200


def _is_reference(spec: Any) -> bool:
    return spec.is_reference and bool(spec.load)


def test_without_built_kernels_the_run_stops_and_names_the_way_out(
    k3port: Callable[..., Any], tiny_checkpoint: Path, bare_h200: Detection
) -> None:
    for more in ((), ("--dry-run",), ("--json",)):
        result = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--platform", "h200", *more)
        assert result.code == ExitCode.UNSUPPORTED == 3
        (first,) = [line for line in result.err.splitlines() if line.startswith("error:")]
        assert first.startswith("error: no kernel for h200 is built for ")
        # Fine ops that only a composite calls are named too.
        assert {"mla_attend_decode", "moe_experts", "linear"} <= set(re.split(r"[ ,]+", first))
        assert "hint: --allow-reference runs slow references there; --platform cpu runs on the CPU" in result.err
    reasons = json.loads(result.out)["error"]["reasons"]
    assert any(reason.startswith("moe_experts: reference.moe_experts: REFERENCE ") for reason in reasons)
    assert not any("reference.moe:" in reason or "all_reduce" in reason for reason in reasons)


def test_references_that_are_allowed_run_and_are_named_in_one_line(
    k3port: Callable[..., Any], tiny_checkpoint: Path, bare_h200: Detection
) -> None:
    common = ("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--platform", "h200", "--allow-reference")
    result = k3port(*common, "--dtype", "float32", "--json")
    assert result.code == 0
    (banner,) = json.loads(result.out)["warnings"]
    ops, _, rest = banner.partition(" run on references on h200")
    assert {"mla_append", "mla_attend", "moe_experts", "moe_route", "linear"} <= set(ops.split(", "))
    assert not {"moe", "kda", "mla", "dense_mlp", "all_reduce"} & set(ops.split(", "))
    assert rest == ": right, and far slower than kernels"
    lines = result.err.splitlines()
    assert lines.count(f"warning: {banner}") == 1
    assert any(line.startswith("k3port ") and "h200 (float32)" in line and "Pretend GPU" in line for line in lines)
    assert re.search(r"peak 0\.\d GiB on the GPU · length · seed 7$", result.err.rstrip())
    assert json.loads(result.out)["timings"]["peak_device_bytes"] > 0
    on_cpu = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--platform", "cpu", "--json")
    assert json.loads(on_cpu.out)["token_ids"] == json.loads(result.out)["token_ids"]
    assert json.loads(on_cpu.out)["timings"]["peak_device_bytes"] is None
    assert json.loads(on_cpu.out)["warnings"] == []


def test_the_platform_decides_the_type(k3port: Callable[..., Any], tiny_checkpoint: Path, bare_h200: Detection) -> None:
    common = ("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--platform", "h200", "--allow-reference")
    assert "h200 (bfloat16)" in k3port(*common).err
    dry = k3port(*common, "--dry-run")
    assert dry.code == 0
    assert re.search(r"^moe_experts +- +reference\.moe_experts +.*a reference, allowed on this GPU$", dry.out, re.M)
    assert re.search(r"^moe +- +reference\.moe +(?!.*allowed)", dry.out, re.M)


def test_an_idle_gpu_is_mentioned_with_the_way_to_use_it(
    k3port: Callable[..., Any], tiny_checkpoint: Path, bare_h200: Detection
) -> None:
    for more in ((), ("--dry-run",)):
        common = ("run", "Hello", "--model", tiny_checkpoint, *SHORT, *more)
        result = k3port(*common)
        assert result.code == 0
        (line,) = [line for line in result.err.splitlines() if "NVIDIA" in line]
        assert line.startswith("1 NVIDIA GPU is present; running on cpu: no kernel for h200 is built for ")
        assert line.endswith("; --platform h200 --allow-reference runs there, with references")
        assert "cpu (float32)" in result.err
        assert "NVIDIA" not in k3port(*common, "--platform", "cpu").err
    taken = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--allow-reference")
    assert "h200 (bfloat16)" in taken.err


def test_a_gpu_with_all_kernels_is_taken_without_asking(
    k3port: Callable[..., Any], tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, h200: Detection
) -> None:
    registry = use(monkeypatch, h200)
    full = [dataclasses.replace(spec, fallback=False) for spec in registry.kernels if spec.is_reference]
    complete = dataclasses.replace(registry, kernels=tuple(full))
    monkeypatch.setattr("k3port.runtime.prepare.default_registry", lambda: complete)
    result = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT)
    assert result.code == 0
    assert "h200 (bfloat16)" in result.err
    assert "present" not in result.err and "warning" not in result.err
    # What the GPU cannot do as asked goes to the CPU, with the reason.
    pinned = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--kernel", "linear=cpu.linear", "--dry-run")
    assert pinned.code == ExitCode.USAGE  # this registry has no such kernel


def test_a_pin_names_a_reference_without_further_leave(
    k3port: Callable[..., Any], tiny_checkpoint: Path, bare_h200: Detection
) -> None:
    common = ("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--platform", "h200", "--dry-run", "--json")
    result = k3port(*common, "--kernel", "moe_experts=reference.moe_experts")
    reasons = json.loads(result.out)["error"]["reasons"]
    assert not any(reason.startswith("moe_experts:") for reason in reasons)
    assert any(reason.startswith("moe_route:") for reason in reasons)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (TorchBuild("2.14.0+cpu"), "PyTorch 2.14.0+cpu is a CPU build, the GPUs are from NVIDIA"),
        (TorchBuild("2.14.0+rocm7.1", hip="7.1"), "is built for ROCm, the GPUs are from NVIDIA"),
    ],
)
def test_a_pytorch_for_something_else_is_refused(
    k3port: Callable[..., Any],
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    build: TorchBuild,
    said: str,
) -> None:
    use(monkeypatch, look(tmp_path, nvidia_probe(Card("GPU-0")), torch=build))
    common = ("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--allow-reference")
    result = k3port(*common, "--platform", "h200")
    assert (result.code, said in result.err) == (ExitCode.UNSUPPORTED, True)
    idle = k3port(*common)
    assert idle.code == 0
    assert f"running on cpu: PyTorch cannot use the GPU; {said}" in idle.err or said in idle.err


def test_gpus_that_cannot_be_used_leave_the_cpu(
    k3port: Callable[..., Any], tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    common = ("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--dry-run")
    amd = Device("amd", "gfx950", "x", "fake")
    nvidia = nvidia_probe(Card("GPU-0"))
    both = look(write_kfd(tmp_path / "both", 90500), nvidia, amd_probe(), torch=CUDA_TORCH)
    cases = [
        (look(tmp_path / "a", nvidia_probe(Card("GPU-0"), code=802), torch=CUDA_TORCH), "cuInit gives error 802"),
        (look(tmp_path / "b", nvidia, torch=CUDA_TORCH, CUDA_VISIBLE_DEVICES=""), "hidden by CUDA_VISIBLE_DEVICES="),
        (look(tmp_path / "c", nvidia_probe(Card("GPU-0", capability=(7, 0)))), "no platform is known for sm_70"),
        (look(tmp_path / "d", fake.no_nvidia_probe()), "k3port doctor looks closer"),
        (both, "GPUs of two vendors: --platform NAME chooses"),
    ]
    for detection, said in cases:
        use(monkeypatch, detection)
        result = k3port(*common)
        assert result.code == 0
        assert f"running on cpu: {said}" in result.err
    assert idle_gpus([GPU, GPU, amd, Device("cpu", "cpu", "cpu", "detected")]).startswith("2 NVIDIA and 1 AMD GPUs are")
    assert idle_gpus([]) == ""


def test_a_saved_plan_with_references_runs_again(
    k3port: Callable[..., Any], tiny_checkpoint: Path, tmp_path: Path, bare_h200: Detection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its pins name the references, so they need no further leave."""
    from k3port.runtime import prepare

    dry = k3port("run", "--model", tiny_checkpoint, "--platform", "h200", "--allow-reference", "--dry-run")
    assert dry.code == 0
    found = prepare.prepare(tiny_checkpoint, platform="h200", allow_reference=True, max_requests=1)
    file = tmp_path / "plan.json"
    file.write_text(found.plan.to_json())
    again = k3port("run", "Hello", "--model", tiny_checkpoint, *SHORT, "--plan", file)
    assert again.code == 0, again.err
    assert "h200 (bfloat16)" in again.err


def test_memory_that_others_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3port.runtime.placement import open_placement

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 141 << 30))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert open_placement("cuda:0", 2 << 30).name == "NVIDIA H200"
    with pytest.raises(CapacityError, match="not enough of the GPU's memory is free"):
        open_placement("cuda:0", 4 << 30)
    with pytest.raises(PlanError, match="PyTorch cannot use the GPU"):
        open_placement("cuda:1")


def place(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, platform: str, detection: Detection) -> tuple[str, int]:
    """The device of a run, and the memory that its plan counts on."""
    from k3port.runtime.prepare import prepare

    use(monkeypatch, detection)
    found = prepare(checkpoint, platform=platform, allow_reference=True)
    return found.device, found.plan.device.memory_bytes


def test_the_first_gpu_that_fits_is_taken(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    display = Card("GPU-d", "00000000:01:00.0", "NVIDIA RTX 5060", (12, 0), 8 << 30, 3840, 2500)
    cards = [display, Card("GPU-0", "00000000:02:00.0"), Card("GPU-1", "00000000:03:00.0")]

    def on(platform: str, *cards: Card, **environ: str) -> tuple[str, int]:
        detection = look(tmp_path / "x", nvidia_probe(*cards), torch=CUDA_TORCH, **environ)
        return place(monkeypatch, tiny_checkpoint, platform, detection)

    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert on("h200", *cards, **order) == ("cuda:1", 141 * 10**9)
    assert on("h200", *cards, **order, CUDA_VISIBLE_DEVICES="2,0") == ("cuda:0", 141 * 10**9)
    assert on("h200", *cards, **order, CUDA_VISIBLE_DEVICES="0,2")[0] == "cuda:1"
    with pytest.raises(PlanError, match="no visible GPU is sm_90"):
        on("h200", *cards, **order, CUDA_VISIBLE_DEVICES="0")
    # A slice of a GPU has less memory than the platform says.
    sliced = Card("GPU-0", slices=("MIG-a",))
    assert on("h200", sliced, CUDA_VISIBLE_DEVICES="MIG-a") == ("cuda:0", (141 << 30) // 8)


def test_torch_names_an_amd_gpu_the_same_way(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rocm = TorchBuild("2.14.0+rocm7.1", hip="7.1.25424")
    detection = look(write_kfd(tmp_path, 90402), amd_probe(), torch=rocm)
    assert place(monkeypatch, tiny_checkpoint, "mi300x", detection) == ("cuda:0", 192 * 10**9)
