"""NVIDIA devices: the management library (NVML), the kernel driver's process files, the PCI bus.

None of them makes a GPU context. Whether kernels could start is asked of ``cuInit`` in a process of its own. The
architecture is the compute capability; product names are labels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3port.oracle.sources import (
    UNKNOWN,
    Answer,
    Finding,
    Gpu,
    SourceReport,
    ask_child,
    missing_driver,
    pci_address,
    pci_report,
    read_text,
)
from k3port.oracle.spec import Device

DRIVER_ROOT = Path("/proc/driver/nvidia/gpus")
VENDOR_ID = 0x10DE
_SM_CLOCK = 1
_MIG_ON = 1

LoadNvml = Callable[[], Any]
AskInit = Callable[[], Answer]

# The mask would hide the cards whose health is asked about. The environment of this process stays as it is.
_CU_INIT = """
import ctypes, os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as exc:
    print("absent", exc)
else:
    print("code", cuda.cuInit(0))
"""

_INIT_ERRORS = {
    100: (
        "the driver has no device for this process: a container without its device nodes",
        "docker run --gpus all ...",
    ),
    802: (
        "the system is not ready: on machines with NVSwitch the fabric manager is not running",
        "sudo systemctl restart nvidia-fabricmanager",
    ),
    803: (
        "the driver's kernel module and its user library have different versions, most often after an update",
        "sudo reboot",
    ),
    804: (
        "a forward-compatibility library is in use, and this GPU or driver does not support it",
        "remove cuda-compat from LD_LIBRARY_PATH, or update the NVIDIA driver",
    ),
    999: (
        "the driver failed without saying why, most often because nvidia_uvm is not loaded",
        "sudo modprobe nvidia_uvm",
    ),
}

_NVML_ERRORS = {
    4: ("no permission", "run as a user that may open /dev/nvidiactl"),
    9: ("the driver is not loaded", "sudo modprobe nvidia"),
    15: ("a GPU has fallen off the bus", "sudo reboot"),
    18: ("driver and library have different versions", "sudo reboot"),
}


def load_nvml() -> Any:
    """The management library of the driver. Raises OSError where there is none."""
    return ctypes.CDLL("libnvidia-ml.so.1")


def ask_cu_init() -> Answer:
    return ask_child(_CU_INIT, timeout=30.0)


def find_devices(root: Path = DRIVER_ROOT) -> list[Device]:
    """One entry per GPU in the driver's files: the quick look that every start can afford.

    The architecture is not in these files, so it stays ``unknown``.
    """
    devices = []
    for info in sorted(root.glob("*/information")):
        pairs = (line.partition(":") for line in (read_text(info) or "").splitlines())
        fields = {key.strip(): value.strip() for key, _, value in pairs}
        uuid = fields.get("GPU UUID", "")
        devices.append(
            Device(
                vendor="nvidia",
                arch=UNKNOWN,
                name=fields.get("Model", "NVIDIA GPU"),
                source="detected",
                uuid="" if "?" in uuid else uuid,  # question marks: the driver has not started this GPU yet
                pci=pci_address(info.parent.name),
            )
        )
    return devices


def glance(root: Path = Path("/")) -> list[Device]:
    """The devices that every start sees: by the driver's files, or by the device nodes where a sandbox has no files."""
    if devices := find_devices(root / DRIVER_ROOT.relative_to("/")):
        return devices
    nodes = [path for path in (root / "dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return [Device("nvidia", UNKNOWN, "NVIDIA GPU", "detected") for _ in nodes]


def probe(
    root: Path = Path("/"), *, nvml: LoadNvml = load_nvml, cu_init: AskInit = ask_cu_init
) -> Sequence[SourceReport]:
    """All sources of NVIDIA devices, most trusted first."""
    bus = pci_report(root, "nvidia", VENDOR_ID, "NVIDIA GPU")
    files = _read_driver_files(root)
    library = _read_nvml(nvml)
    listed = max(len(files.gpus), sum(not gpu.parent for gpu in library.gpus))
    if files.gpus and not library.gpus:
        text = f"the architecture of {len(files.gpus)} NVIDIA GPU(s) is unknown ({library.detail}): no kernel fits them"
        remedy = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility ..."
        files = replace(files, findings=(Finding("devices.sources", "warning", text, remedy),))
    remedy = "sudo modprobe nvidia"
    files = replace(files, findings=(*files.findings, *missing_driver("NVIDIA", len(bus.gpus), listed, remedy)))
    reports = [library, files, bus]
    return [*reports, _check_init(cu_init, listed)] if listed else reports


def _read_driver_files(root: Path) -> SourceReport:
    folder = root / DRIVER_ROOT.relative_to("/")
    if not folder.is_dir():
        return SourceReport("driver files", "nvidia", "absent", f"{folder} is not there")
    gpus = tuple(Gpu(device, number, ("driver files",)) for number, device in enumerate(find_devices(folder)))
    return SourceReport("driver files", "nvidia", "ok", str(folder), gpus)


def _check_init(ask: AskInit, listed: int) -> SourceReport:
    """``cuInit``: a GPU that is seen may still refuse to compute."""
    name, answer = "cuInit", ask()
    kind, _, rest = answer.text.strip().partition(" ")
    if kind == "code" and rest == "0":
        return SourceReport(name, "nvidia", "ok", "libcuda.so.1 starts", counts_only=True)
    if kind == "code" and rest.isdecimal():
        cause, remedy = _INIT_ERRORS.get(int(rest), ("the driver refuses to start", "nvidia-smi"))
        blocked = f"cuInit gives error {rest}: {cause}"
    elif kind == "absent":
        blocked, remedy = f"libcuda.so.1 cannot be loaded ({rest})", "docker run --gpus all ..."
    else:
        blocked, remedy = f"cuInit did not answer: {answer.error or 'nothing printed'}", "nvidia-smi"
    text = f"{listed} NVIDIA GPU(s) are seen and none is usable: {blocked}"
    finding = Finding("devices.usable", "error", text, remedy)
    return SourceReport(name, "nvidia", "failed", blocked, (), {}, (finding,), blocked, counts_only=True)


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _NvmlError(Exception):
    """A call that the library refused."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} gives error {code}")
        self.code = code


def _call(library: Any, function: str, *args: Any) -> None:
    try:
        code = getattr(library, function)(*args)
    except AttributeError:
        code = 13  # a library older than the function
    if code:
        raise _NvmlError(function, code)


def _read_nvml(load: LoadNvml) -> SourceReport:
    try:
        library = load()
    except OSError as exc:
        return SourceReport("nvml", "nvidia", "absent", f"libnvidia-ml.so.1 cannot be loaded ({exc})")
    try:
        _call(library, "nvmlInit_v2")
    except _NvmlError as exc:
        cause, remedy = _NVML_ERRORS.get(exc.code, ("the management library does not start", "nvidia-smi"))
        finding = Finding("devices.sources", "warning", f"NVML: {cause} ({exc})", remedy)
        return SourceReport("nvml", "nvidia", "failed", f"{cause} ({exc})", findings=(finding,))
    try:
        gpus = tuple(_nvml_gpus(library))
        facts = {"driver": _text(library, "nvmlSystemGetDriverVersion", 80)}
        version = _number(library, "nvmlSystemGetCudaDriverVersion_v2")
        facts["cuda_ceiling"] = f"{version // 1000}.{version % 1000 // 10}" if version else ""
        facts = {name: value for name, value in facts.items() if value}
        return SourceReport("nvml", "nvidia", "ok", "libnvidia-ml.so.1", gpus, facts)
    except _NvmlError as exc:
        cause, remedy = _NVML_ERRORS.get(exc.code, ("the devices cannot be listed", "nvidia-smi"))
        finding = Finding("devices.sources", "warning", f"NVML: {cause} ({exc})", remedy)
        return SourceReport("nvml", "nvidia", "failed", f"{cause} ({exc})", findings=(finding,))
    finally:
        library.nvmlShutdown()


def _nvml_gpus(library: Any) -> Iterator[Gpu]:
    """GPUs in PCI order, each followed by its MIG slices."""
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    for index in range(count.value):
        handle = ctypes.c_void_p()
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        gpu = _nvml_gpu(library, handle, index)
        yield gpu
        yield from _slices(library, handle, gpu)


def _nvml_gpu(library: Any, handle: Any, index: int) -> Gpu:
    major, minor = ctypes.c_int(), ctypes.c_int()
    pci, memory = _PciInfo(), _Memory()
    arch = UNKNOWN
    if _allowed(library, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor)):
        arch = f"sm_{major.value}{minor.value}"
    # Some systems have one memory for CPU and GPU and answer that it is not supported: it stays unknown.
    _allowed(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    _allowed(library, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    address = (pci.bus_id or pci.legacy).decode(errors="replace")
    cores = _number(library, "nvmlDeviceGetNumGpuCores", handle)
    clock = _number(library, "nvmlDeviceGetMaxClockInfo", handle, ctypes.c_uint(_SM_CLOCK))
    device = Device(
        vendor="nvidia",
        arch=arch,
        name=_text(library, "nvmlDeviceGetName", 96, handle) or "NVIDIA GPU",
        source="detected",
        memory_bytes=memory.total,
        uuid=_text(library, "nvmlDeviceGetUUID", 96, handle),
        pci=pci_address(address) if address else "",
    )
    return Gpu(device, index, ("nvml",), speed=cores * clock)


def _slices(library: Any, handle: Any, whole: Gpu) -> Iterator[Gpu]:
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if not _allowed(library, "nvmlDeviceGetMigMode", handle, ctypes.byref(current), ctypes.byref(pending)):
        return
    if current.value != _MIG_ON or not _allowed(library, "nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most)):
        return
    for index in range(most.value):
        part, memory = ctypes.c_void_p(), _Memory()
        if not _allowed(
            library, "nvmlDeviceGetMigDeviceHandleByIndex", handle, ctypes.c_uint(index), ctypes.byref(part)
        ):
            continue
        _allowed(library, "nvmlDeviceGetMemoryInfo", part, ctypes.byref(memory))
        device = replace(
            whole.device,
            name=_text(library, "nvmlDeviceGetName", 96, part) or f"{whole.device.name} MIG {index}",
            memory_bytes=memory.total,
            uuid=_text(library, "nvmlDeviceGetUUID", 96, part),
        )
        yield Gpu(device, index, ("nvml",), parent=whole.device.uuid)


def _allowed(library: Any, function: str, *args: Any) -> bool:
    """Whether an optional question was answered."""
    try:
        _call(library, function, *args)
    except _NvmlError:
        return False
    return True


def _text(library: Any, function: str, size: int, *before: Any) -> str:
    buffer = ctypes.create_string_buffer(size)
    if not _allowed(library, function, *before, buffer, ctypes.c_uint(size)):
        return ""
    return buffer.value.decode(errors="replace")


def _number(library: Any, function: str, *before: Any) -> int:
    value = ctypes.c_uint()
    return value.value if _allowed(library, function, *before, ctypes.byref(value)) else 0
