"""What accelerators this machine has, which of them a process may use, and whether they can compute.

Several sources per vendor are asked and compared, since each of them fails on some machines. Nothing is remembered:
every call of :func:`detect` looks again, so a driver that comes up late is seen by the next call.
"""

from __future__ import annotations

import datetime
import importlib.util
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from k3port.oracle.sources import UNKNOWN, Finding, Gpu, Probe, SourceReport, read_text
from k3port.oracle.spec import Device, Vendor
from k3port.oracle.visibility import MASKS, Visible, amd_visible, nvidia_visible

VENDOR_NAMES: Mapping[Vendor, str] = {"nvidia": "NVIDIA", "amd": "AMD", "cpu": "CPU"}
_VENDORS: tuple[Vendor, ...] = ("nvidia", "amd", "cpu")
_VISIBLE: Mapping[Vendor, Callable[[Sequence[Gpu], Mapping[str, str]], Visible]] = {
    "nvidia": nvidia_visible,
    "amd": amd_visible,
}
_WHEELS = "https://download.pytorch.org/whl"


@dataclass(frozen=True)
class TorchBuild:
    """The installed PyTorch as its ``version.py`` describes it; the package itself is not imported.

    ``problem`` says why nothing is known; all fields are empty where PyTorch is not installed.
    """

    version: str = ""
    cuda: str = ""
    hip: str = ""
    problem: str = ""


def torch_build() -> TorchBuild:
    """Reads the text of ``torch/version.py`` of this environment."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as exc:
        return TorchBuild(problem=f"it cannot be found: {exc}")
    if spec is None:
        return TorchBuild()
    folders = spec.submodule_search_locations
    text = read_text(Path(next(iter(folders))) / "version.py") if folders else None
    if text is None:
        return TorchBuild(problem=f"{spec.origin or 'it'} has no version.py beside it")
    values = dict(re.findall(r"^(\w+)\s*(?::[^=\n]+)?=\s*['\"]([^'\"\n]+)['\"]", text, re.MULTILINE))
    return TorchBuild(values.get("__version__", UNKNOWN), values.get("cuda", ""), values.get("hip", ""))


@dataclass(frozen=True)
class Detection:
    """One look at the machine.

    Attributes:
        gpus: all GPUs of all vendors, MIG slices after their GPU.
        visible: those that this process may use, by vendor, in the order in which the runtime numbers them.
        because: the variables that hide the others, by vendor.
        reports: what each source said, in words too.
        blocked: why GPUs that are seen cannot compute, by vendor.
        at: when this was, in UTC.
    """

    gpus: tuple[Gpu, ...] = ()
    visible: Mapping[Vendor, tuple[Gpu, ...]] = field(default_factory=dict)
    because: Mapping[Vendor, str] = field(default_factory=dict)
    reports: tuple[SourceReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    blocked: Mapping[Vendor, str] = field(default_factory=dict)
    torch: TorchBuild = field(default_factory=TorchBuild)
    at: str = ""
    seconds: float = 0.0

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(gpu.device for gpu in self.gpus)

    @property
    def vendors(self) -> tuple[Vendor, ...]:
        """Vendors of which there is a GPU."""
        return tuple(vendor for vendor in _VENDORS if any(g.device.vendor == vendor for g in self.gpus))

    @property
    def runtime(self) -> dict[str, str]:
        """Versions of driver and runtime, for a target of the resolver."""
        return {name: value for report in self.reports for name, value in report.facts.items()}

    @property
    def why_cpu(self) -> tuple[str, ...]:
        """Why there is no GPU to use, source by source."""
        return tuple(f"{report.source}: {report.detail}" for report in self.reports if not report.gpus)

    def usable(self, vendor: Vendor) -> tuple[Gpu, ...]:
        """Visible GPUs of a vendor, or none where something keeps them from computing."""
        return () if self.blocked.get(vendor) else self.visible.get(vendor, ())

    def shortage(self, count: int, vendor: Vendor | None = None) -> Finding | None:
        """Why ``count`` GPUs of one architecture cannot work together here, or None. The CPU is never short."""
        if vendor == "cpu":
            return None
        vendors: tuple[Vendor, ...] = self.vendors if vendor is None else (vendor,)
        vendors = tuple(v for v in vendors if any(gpu.device.vendor == v for gpu in self.gpus))
        if vendor is None and len(vendors) > 1:
            names = " and ".join(VENDOR_NAMES[v] for v in vendors)
            return Finding(
                "devices.group", "error", f"{names} GPUs are here: one has to be chosen", "give --platform NAME"
            )
        if not vendors:
            kind = f"{VENDOR_NAMES[vendor]} GPU" if vendor else "GPU"
            return Finding("devices.group", "error", f"{_asked(count)}, no {kind} was found", "k3port doctor -v")
        vendor = vendors[0]
        if reason := self.blocked.get(vendor):
            return Finding("devices.group", "error", f"{_asked(count)}, no GPU can compute: {reason}", "k3port doctor")
        visible = self.visible.get(vendor, ())
        if len(visible) < count:
            noun = "device" if len(visible) == 1 else "devices"
            text = f"{_asked(count)}, {len(visible)} {noun} visible"
            if because := self.because.get(vendor, ""):
                name = because.split(" and ")[0].partition("=")[0]
                return Finding("devices.group", "error", f"{text} because {because}", f"unset {name}")
            return Finding("devices.group", "error", text, f"use --tp {max(len(visible), 1)}")
        archs = [gpu.device.arch for gpu in visible]
        if len(set(archs[:count])) > 1:
            listing = ", ".join(f"{number}: {gpu.label}" for number, gpu in enumerate(visible[:count]))
            best = max(dict.fromkeys(archs), key=archs.count)
            same = [gpu.device.uuid for gpu in visible if gpu.device.arch == best][:count]
            fits = len(same) == count and all(same)
            remedy = f"export {MASKS[vendor]}={','.join(same)}" if fits else f"use --tp {max(len(same), 1)}"
            return Finding(
                "devices.group", "error", f"{_asked(count)} over GPUs of different architectures: {listing}", remedy
            )
        return None


def _asked(count: int) -> str:
    return f"TP{count} asked"


def detect(
    root: Path = Path("/"),
    *,
    environ: Mapping[str, str],
    probes: Iterable[Probe],
    torch: TorchBuild | None = None,
) -> Detection:
    """Looks at the machine now.

    Args:
        root: where its file system starts; tests give a fake one.
        environ: the variables that mask devices; see :data:`k3port.oracle.visibility.VARIABLES`.
        probes: one per vendor, most often those of the registry.
        torch: the build to compare the devices with; None reads that of this environment.
    """
    begin = time.perf_counter()
    reports: list[SourceReport] = []
    findings: list[Finding] = []
    for probe in probes:
        try:
            reports += probe(root)
        except Exception as exc:
            name = getattr(probe, "__module__", "a probe")
            findings.append(Finding("devices.sources", "warning", f"{name}: {type(exc).__name__}: {exc}"))
    gpus: list[Gpu] = []
    visible: dict[Vendor, tuple[Gpu, ...]] = {}
    because: dict[Vendor, str] = {}
    blocked: dict[Vendor, str] = {}
    for vendor in _VENDORS:
        mine = [report for report in reports if report.vendor == vendor]
        if not mine:
            continue
        found, said = combine(mine)
        seen = _VISIBLE[vendor](found, environ) if vendor in _VISIBLE else Visible(found)
        gpus += found
        findings += (*(f for report in mine for f in report.findings), *said, *seen.findings)
        visible[vendor], because[vendor] = seen.gpus, seen.because
        reason = next((report.blocked for report in mine if report.blocked), "")
        if reason:
            blocked[vendor] = reason
    build = torch_build() if torch is None else torch
    detection = Detection(
        gpus=tuple(gpus),
        visible=visible,
        because=because,
        reports=tuple(reports),
        blocked=blocked,
        torch=build,
        at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=time.perf_counter() - begin,
    )
    return replace(detection, findings=(*findings, *_mixed(detection), *_torch_findings(detection)))


def combine(reports: Sequence[SourceReport]) -> tuple[tuple[Gpu, ...], tuple[Finding, ...]]:
    """The GPUs of one vendor from all its sources, and where those disagree. Earlier sources are believed first."""
    merged: list[Gpu] = []
    findings: list[Finding] = []
    for report in reports:
        if report.counts_only:
            continue
        taken: set[int] = set()
        for gpu in report.gpus:
            place = next((n for n, other in enumerate(merged) if n not in taken and _same(gpu, other)), None)
            if place is None:
                merged.append(gpu)
                taken.add(len(merged) - 1)
                continue
            taken.add(place)
            known = merged[place]
            ours, theirs = known.device.arch, gpu.device.arch
            if UNKNOWN not in (ours, theirs) and ours != theirs:
                text = f"{known.label}: {known.sources[0]} says {ours}, {report.source} says {theirs}; {ours} is used"
                findings.append(Finding("devices.sources", "warning", text))
            merged[place] = _filled(known, gpu)
    findings += _count_findings(reports)
    merged = [gpu if gpu.device.name else replace(gpu, device=_named(gpu.device)) for gpu in merged]
    whole = [gpu for gpu in merged if not gpu.parent]
    numbered: list[Gpu] = []
    for number, gpu in enumerate(whole):
        numbered.append(replace(gpu, index=number))
        numbered += [part for part in merged if part.parent and part.parent == gpu.device.uuid]
    return tuple(numbered), tuple(findings)


def _named(device: Device) -> Device:
    return replace(device, name=f"{VENDOR_NAMES[device.vendor]} GPU")


def _same(a: Gpu, b: Gpu) -> bool:
    if a.parent or b.parent:
        return a.device.uuid == b.device.uuid
    if a.device.uuid and b.device.uuid:
        return a.device.uuid.lower() == b.device.uuid.lower()
    if a.device.pci and b.device.pci:
        return a.device.pci == b.device.pci
    return a.index == b.index


def _filled(known: Gpu, other: Gpu) -> Gpu:
    """What is not known yet is taken from another source."""
    a, b = known.device, other.device
    device = replace(
        a,
        arch=b.arch if a.arch == UNKNOWN else a.arch,
        name=a.name or b.name,
        memory_bytes=a.memory_bytes or b.memory_bytes,
        lds_bytes=a.lds_bytes or b.lds_bytes,
        compute_units=a.compute_units or b.compute_units,
        uuid=a.uuid or b.uuid,
        pci=a.pci or b.pci,
    )
    sources = tuple(dict.fromkeys((*known.sources, *other.sources)))
    return replace(known, device=device, sources=sources, speed=known.speed or other.speed)


def _count_findings(reports: Sequence[SourceReport]) -> list[Finding]:
    listing = [(report, sum(not gpu.parent for gpu in report.gpus)) for report in reports if not report.counts_only]
    answered = [(report.source, count) for report, count in listing if report.state == "ok"]
    most = max((count for _, count in answered), default=0)
    if not most:
        return []
    used = next(source for source, count in answered if count)
    found = []
    for report, count in listing:
        if report.state == "failed":
            text = f"{report.source} gives nothing ({report.detail}); {used} is used"
            found.append(Finding("devices.sources", "warning", text))
        elif report.state == "ok" and count != most:
            text = f"{report.source} lists {count} GPU(s), {used} lists {dict(answered)[used]}; {used} is used first"
            found.append(Finding("devices.sources", "warning", text))
    return found


def _mixed(detection: Detection) -> list[Finding]:
    found = []
    if len(detection.vendors) > 1:
        names = " and ".join(VENDOR_NAMES[vendor] for vendor in detection.vendors)
        text = f"GPUs of {names} are in one machine: a run uses one vendor, which has to be chosen"
        found.append(Finding("devices.mixed", "warning", text, "give --platform NAME"))
    for vendor, gpus in detection.visible.items():
        archs = dict.fromkeys(gpu.device.arch for gpu in gpus)
        if len(archs) > 1:
            listing = ", ".join(f"{number}: {gpu.label}" for number, gpu in enumerate(gpus))
            text = f"{VENDOR_NAMES[vendor]} GPUs of different architectures are visible: {listing}"
            first = next(iter(archs))
            uuids = [gpu.device.uuid for gpu in gpus if gpu.device.arch == first and gpu.device.uuid]
            remedy = f"export {MASKS[vendor]}={','.join(uuids)}" if uuids else ""
            found.append(Finding("devices.mixed", "warning", text, remedy))
    return found


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``13.0`` and ``7.0.51831-abc`` alike."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def _torch_findings(detection: Detection) -> list[Finding]:
    """Whether the installed PyTorch can use the GPUs that are here."""
    build, vendors = detection.torch, detection.vendors
    if not build.version or not vendors:
        return []
    own: Vendor | None = "nvidia" if build.cuda else "amd" if build.hip else None
    name = f"PyTorch {build.version}"
    if own is None or own not in vendors:
        kind = f"is built for {'CUDA' if own == 'nvidia' else 'ROCm'}" if own else "is a CPU build"
        names = " and ".join(VENDOR_NAMES[vendor] for vendor in vendors)
        remedy = f"pip install --force-reinstall torch --index-url {_wheels(detection)}"
        return [Finding("devices.torch", "warning", f"{name} {kind}, the GPUs are from {names}", remedy)]
    ceiling = detection.runtime.get("cuda_ceiling", "")
    if own == "nvidia" and ceiling and version_tuple(build.cuda) > version_tuple(ceiling):
        driver = detection.runtime.get("driver", "")
        text = f"{name} is built for CUDA {build.cuda}, driver {driver} goes up to CUDA {ceiling}"
        remedy = f"update the NVIDIA driver, or: pip install --force-reinstall torch --index-url {_wheels(detection)}"
        if version_tuple(build.cuda)[0] > version_tuple(ceiling)[0]:
            return [Finding("devices.torch", "error", f"{text}: kernels will not start", remedy)]
        text += ": compiled kernels run (same major version), those compiled at run time may be refused"
        return [Finding("devices.torch", "warning", text, remedy)]
    return []


def _wheels(detection: Detection) -> str:
    if "nvidia" not in detection.vendors:
        return f"{_WHEELS}/rocm7.1"
    ceiling = version_tuple(detection.runtime.get("cuda_ceiling", "13.0"))
    return f"{_WHEELS}/{'cu130' if ceiling >= (13,) else 'cu128' if ceiling >= (12, 8) else 'cu126'}"
