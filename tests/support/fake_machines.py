"""Machines that are not here: file trees of the kernel drivers, a management library, answers of child processes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from k3port.backends.cuda import device as cuda
from k3port.backends.rocm import device as rocm
from k3port.oracle.detect import Detection, TorchBuild, detect
from k3port.oracle.sources import Answer, Probe

NODES = "sys/class/kfd/kfd/topology/nodes"
UNSUPPORTED = 3


@dataclass
class Card:
    """An NVIDIA GPU as the management library shows it."""

    uuid: str
    pci: str = "00000000:01:00.0"
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    memory: int = 141 << 30
    cores: int = 16896
    clock: int = 1980
    slices: tuple[str, ...] = ()
    mig_on: bool = True


@dataclass
class FakeNvml:
    """The functions of libnvidia-ml that the probe calls; ``fail`` gives the code of a function that refuses."""

    cards: Sequence[Card]
    driver: str = "580.95.05"
    cuda: int = 13000
    fail: Mapping[str, int] = field(default_factory=dict)
    closed: int = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("nvml") or not hasattr(type(self), f"do_{name}"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            if name in self.fail:
                return self.fail[name]
            return getattr(self, f"do_{name}")(*args) or 0

        return call

    def handle(self, handle: Any) -> tuple[Card, str]:
        """The card of a handle, and the UUID of the slice where it is one."""
        number, part = divmod(handle.value - 1, 100)
        card = self.cards[number]
        return card, card.slices[part - 1] if part else ""

    def do_nvmlInit_v2(self) -> None: ...

    def do_nvmlShutdown(self) -> None:
        self.closed += 1

    def do_nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> None:
        buffer.value = self.driver.encode()

    def do_nvmlSystemGetCudaDriverVersion_v2(self, out: Any) -> None:
        out._obj.value = self.cuda

    def do_nvmlDeviceGetCount_v2(self, out: Any) -> None:
        out._obj.value = len(self.cards)

    def do_nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> None:
        out._obj.value = index.value * 100 + 1

    def do_nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> None:
        card, part = self.handle(handle)
        buffer.value = (part or card.uuid).encode()

    def do_nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> None:
        card, part = self.handle(handle)
        buffer.value = f"{card.name} MIG 1g".encode() if part else card.name.encode()

    def do_nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> None:
        major._obj.value, minor._obj.value = self.handle(handle)[0].capability

    def do_nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> None:
        card, part = self.handle(handle)
        out._obj.total = card.memory // 8 if part else card.memory

    def do_nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> None:
        out._obj.bus_id = self.handle(handle)[0].pci.encode()

    def do_nvmlDeviceGetNumGpuCores(self, handle: Any, out: Any) -> None:
        out._obj.value = self.handle(handle)[0].cores

    def do_nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: Any, out: Any) -> None:
        out._obj.value = self.handle(handle)[0].clock

    def do_nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        card = self.handle(handle)[0]
        current._obj.value, pending._obj.value = int(card.mig_on), 1
        return 0 if card.slices else UNSUPPORTED

    def do_nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> None:
        out._obj.value = 7

    def do_nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, out: Any) -> int:
        card = self.handle(handle)[0]
        if index.value >= len(card.slices):
            return 6
        out._obj.value = handle.value + 1 + index.value
        return 0


def no_library() -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file")


def nvidia_probe(
    *cards: Card, code: int = 0, answer: Answer | None = None, nvml: FakeNvml | None = None, **options: Any
) -> Probe:
    library = FakeNvml(cards, **options) if nvml is None else nvml
    # A handle is a pointer: ctypes must be able to hold it.
    assert ctypes.sizeof(ctypes.c_void_p) >= 4
    return partial(cuda.probe, nvml=lambda: library, cu_init=lambda: answer or Answer(f"code {code}\n"))


def no_nvidia_probe() -> Probe:
    return partial(cuda.probe, nvml=no_library, cu_init=lambda: Answer("absent libcuda.so.1"))


def amd_probe(smi: Answer | None = None, openable: bool = True) -> Probe:
    return partial(rocm.probe, amdsmi=lambda: smi, openable=lambda path: openable)


def write_kfd(root: Path, *versions: int, lds_kb: int = 64, memory: int = 192 << 30, device: bool = True) -> Path:
    """A topology with one CPU node and one GPU node per ``gfx_target_version``."""
    write_node(root, 0, cpu_cores_count=64, simd_count=0, gfx_target_version=0, vendor_id=0)
    for number, version in enumerate(versions, start=1):
        write_node(
            root, number, cpu_cores_count=0, simd_count=1216, simd_per_cu=4, gfx_target_version=version,
            vendor_id=4098, lds_size_in_kb=lds_kb, location_id=number << 8, domain=0, unique_id=0xABC0 + number,
        )  # fmt: skip
        write_bank(root, number, 0, heap_type=1, size_in_bytes=memory)
    if device:
        (root / "dev").mkdir(exist_ok=True)
        (root / "dev/kfd").touch()
    return root


def write_node(root: Path, number: int, **fields: int) -> None:
    folder = root / NODES / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in fields.items()))


def write_bank(root: Path, node: int, number: int, **fields: int) -> None:
    folder = root / NODES / str(node) / "mem_banks" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in fields.items()))


def write_driver_files(root: Path, *cards: Card) -> Path:
    for card in cards:
        folder = root / "proc/driver/nvidia/gpus" / card.pci[-12:]
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {card.name}\nIRQ: 12\nGPU UUID: \t {card.uuid}\n")
    return root


def write_pci(root: Path, address: str, vendor: int, kind: int = 0x030200) -> Path:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, value in (("vendor", f"{vendor:#06x}"), ("class", f"{kind:#08x}"), ("device", "0x2335")):
        (folder / name).write_text(value + "\n")
    return root


def look(root: Path, *probes: Probe, torch: TorchBuild | None = None, **environ: str) -> Detection:
    return detect(root, environ=environ, probes=probes, torch=torch or TorchBuild())
