"""Which GPUs a process may use: the masks of both vendors, applied the way their runtimes apply them.

NVIDIA reads one list: indices or prefixes of UUIDs. It ends at the first entry that names nothing; a repeated entry
empties it. AMD has two layers: the system runtime filters first, and the HIP runtime then counts what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from k3port.oracle.sources import Finding, Gpu, Severity
from k3port.oracle.spec import Vendor

CUDA = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER = "CUDA_DEVICE_ORDER"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
ORDINAL = "GPU_DEVICE_ORDINAL"
VARIABLES = (CUDA, CUDA_ORDER, HIP, ROCR, ORDINAL)
MASKS: Mapping[Vendor, str] = {"nvidia": CUDA, "amd": ROCR, "cpu": ""}
"""The one variable per vendor that takes UUIDs and is read first."""
_PCI_ORDER = "PCI_BUS_ID"


@dataclass(frozen=True)
class Visible:
    """The GPUs that stay, in the order in which the runtime numbers them, and what was noticed on the way.

    ``because`` names the variables that hide something, for messages; empty where none does.
    """

    gpus: tuple[Gpu, ...]
    findings: tuple[Finding, ...] = ()
    because: str = ""


class _Mask:
    """One variable over one list of GPUs; collects what is said about it."""

    def __init__(self, name: str, value: str, gpus: Sequence[Gpu]) -> None:
        self.name, self.value, self.gpus = name, value, gpus
        self.findings: list[Finding] = []

    def say(self, text: str, remedy: str = "", severity: Severity = "warning") -> None:
        self.findings.append(Finding("devices.visible", severity, f"{self.name}={self.value}: {text}", remedy))

    def entries(self) -> list[str]:
        return [entry.strip() for entry in self.value.split(",")]

    def ignored_after(self, number: int) -> str:
        rest = self.entries()[number + 1 :]
        return f"; what comes after it is ignored: {','.join(rest)}" if rest else ""

    def by_index(self, entry: str, number: int) -> Gpu | None:
        """The GPU of an index, or None after saying why there is none."""
        if not entry:
            self.say(f"entry {number + 1} is empty and ends the list{self.ignored_after(number)}", self.suggestion())
            return None
        if entry.startswith("-") and entry[1:].isdecimal():
            if number:
                self.say(f"{entry} ends the list{self.ignored_after(number)}")
            return None
        if not entry.isdecimal():
            self.say(f"{entry!r} is no index{self.ignored_after(number)}", self.suggestion())
            return None
        if int(entry) >= len(self.gpus):
            there = f"0 to {len(self.gpus) - 1}" if self.gpus else "none"
            self.say(f"there is no GPU {entry} (there: {there}){self.ignored_after(number)}", self.suggestion())
            return None
        return self.gpus[int(entry)]

    def by_uuid(self, entry: str, number: int, candidates: Iterable[Gpu], *, fold: bool = False) -> Gpu | None:
        """The one GPU whose UUID starts with the entry, or None after saying why there is none."""
        spelled = (lambda text: text.upper()) if fold else (lambda text: text)
        matches = [gpu for gpu in candidates if gpu.device.uuid and spelled(gpu.device.uuid).startswith(spelled(entry))]
        if len(matches) == 1:
            return matches[0]
        known = ", ".join(gpu.device.uuid for gpu in self.gpus if gpu.device.uuid) or "none"
        what = f"fits {len(matches)} GPUs" if matches else f"no GPU has the UUID {entry} (there: {known})"
        self.say(f"{what if not matches else f'{entry} {what}'}{self.ignored_after(number)}", self.suggestion())
        return None

    def suggestion(self) -> str:
        return f"unset {self.name}"


def runtime_order(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], tuple[Finding, ...]]:
    """NVIDIA GPUs as the CUDA runtime counts them: fastest first, the others by PCI address, unless told otherwise."""
    whole = [gpu for gpu in gpus if not gpu.parent]
    if environ.get(CUDA_ORDER) == _PCI_ORDER or len({(g.device.arch, g.device.name) for g in whole}) < 2:
        return tuple(whole), ()
    fastest = max(whole, key=lambda gpu: (gpu.speed, gpu.device.memory_bytes, -gpu.index))
    ordered = (fastest, *(gpu for gpu in whole if gpu is not fastest))
    listing = "; ".join(
        f"{gpu.device.name} ({gpu.device.pci or gpu.device.uuid}) is {gpu.index} by PCI, {number} in CUDA"
        for number, gpu in enumerate(ordered)
    )
    text = f"different GPUs are counted in two orders (that of CUDA is estimated): {listing}"
    return ordered, (Finding("devices.order", "warning", text, f"export {CUDA_ORDER}={_PCI_ORDER}"),)


def _cuda_mask(mask: _Mask, slices: Sequence[Gpu]) -> tuple[Gpu, ...]:
    entries = mask.entries()
    if not mask.value.strip():
        return ()
    # The first entry decides what the list holds; an entry of another kind ends it.
    kind = next((kind for kind in ("GPU-", "MIG-") if entries[0].startswith(kind)), "")
    chosen: list[Gpu] = []
    for number, entry in enumerate(entries):
        if kind and not entry.startswith(kind):
            what = repr(entry) if entry else "an empty entry"
            mask.say(f"{what} ends a list of {kind}… entries{mask.ignored_after(number)}", mask.suggestion())
            break
        gpu = _cuda_entry(mask, kind, entry, number, slices)
        if gpu is None:
            break
        if gpu in chosen:
            mask.say(f"{entry} is named twice, which leaves no GPU at all", mask.suggestion())
            return ()
        chosen.append(gpu)
    if kind == "MIG-" and len(chosen) > 1:
        mask.say("one process can use one MIG device: the first is used", f"export {mask.name}={entries[0]}")
        return tuple(chosen[:1])
    return tuple(chosen)


def _cuda_entry(mask: _Mask, kind: str, entry: str, number: int, slices: Sequence[Gpu]) -> Gpu | None:
    if kind == "GPU-":
        return mask.by_uuid(entry, number, mask.gpus)
    if kind == "MIG-":
        # The older spelling MIG-GPU-<uuid of the GPU>/<instance>/<compute instance> names a slice by its place.
        parent, _, place = entry.removeprefix("MIG-").partition("/")
        if place:
            inside = [gpu for gpu in slices if gpu.parent == parent]
            if len(inside) > 1:
                uuids = ", ".join(gpu.device.uuid for gpu in inside)
                remedy = f"export {CUDA}={inside[0].device.uuid}"
                mask.say(f"{entry} is an older spelling, taken as the first of {uuids}", remedy)
            if inside:
                return inside[0]
        return mask.by_uuid(entry, number, slices)
    return mask.by_index(entry, number)


def nvidia_visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """NVIDIA GPUs that a process with this environment may use."""
    order, findings = runtime_order(gpus, environ)
    slices = [gpu for gpu in gpus if gpu.parent]
    value = environ.get(CUDA)
    if value is None:
        return Visible(order, (*findings, *_unnamed_slices(slices)))
    mask = _Mask(CUDA, value, order)
    chosen = _cuda_mask(mask, slices)
    _say_if_none(mask, chosen)
    hides = len(chosen) < len(order) or any(gpu.parent for gpu in chosen)
    return Visible(chosen, (*findings, *mask.findings), f"{CUDA}={value}" if hides else "")


def _unnamed_slices(slices: Sequence[Gpu]) -> tuple[Finding, ...]:
    if not slices:
        return ()
    text = f"MIG is on ({len(slices)} slices) and none is named: a process uses one slice, the first"
    return (Finding("devices.visible", "warning", text, f"export {CUDA}={slices[0].device.uuid}"),)


def _say_if_none(mask: _Mask, chosen: Sequence[Gpu]) -> None:
    if mask.gpus and not chosen and not mask.findings:
        mask.say("hides all GPUs", mask.suggestion(), "info")


def _amd_mask(mask: _Mask, *, repeats_end: bool) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for number, entry in enumerate(mask.entries() if mask.value.strip() else ()):
        is_uuid = entry.upper().startswith("GPU-")
        find: Callable[[], Gpu | None] = (
            (lambda e=entry, n=number: mask.by_uuid(e, n, mask.gpus, fold=True))
            if is_uuid
            else (lambda e=entry, n=number: mask.by_index(e, n))
        )
        gpu = find()
        if gpu is None:
            break
        if gpu not in chosen:
            chosen.append(gpu)
            continue
        end = f" and ends the list{mask.ignored_after(number)}" if repeats_end else ""
        mask.say(f"{entry} is named twice{end}", mask.suggestion())
        if repeats_end:
            break
    return tuple(chosen)


def amd_visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """AMD GPUs that a process with this environment may use."""
    left = tuple(gpus)
    findings: list[Finding] = []
    hiding: list[str] = []
    if (value := environ.get(ROCR)) is not None:
        mask = _Mask(ROCR, value, left)
        chosen = _amd_mask(mask, repeats_end=True)
        _say_if_none(mask, chosen)
        findings += mask.findings
        hiding += [f"{ROCR}={value}"] if len(chosen) < len(left) else []
        left = chosen
    name = next((name for name in (HIP, CUDA) if environ.get(name)), None)
    name = name or next((name for name in (HIP, CUDA) if name in environ), None)
    if name is not None:
        value = environ[name]
        mask = _Mask(name, value, left)
        chosen = _amd_mask(mask, repeats_end=False)
        if left and not value.strip():
            text = "an empty value: HIP itself ignores it, PyTorch sees no GPU"
            mask.say(text, f"unset {name}, or export {name}=-1 to hide all")
        _say_if_none(mask, chosen)
        if ROCR in environ:
            text = f"counts what {ROCR}={environ[ROCR]} leaves ({len(left)} of {len(gpus)} GPUs), not all GPUs"
            mask.say(f"{text}: {len(chosen)} stay visible", f"unset {name}")
        findings += mask.findings
        hiding += [f"{name}={value}"] if len(chosen) < len(left) else []
        left = chosen
    findings += _amd_interplay(gpus, environ)
    return Visible(left, tuple(findings), " and ".join(hiding))


def _amd_interplay(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Finding]:
    """Variables that say different things to the layers that read them."""
    if not gpus:
        return []
    found = []
    hip, cuda = environ.get(HIP), environ.get(CUDA)
    if hip and cuda is not None and hip != cuda:
        text = f"{HIP}={hip} and {CUDA}={cuda} disagree: HIP goes by {HIP}, programs that ask {CUDA} go by the other"
        found.append(Finding("devices.visible", "warning", text, f"export {CUDA}={hip}"))
    elif cuda and not hip:
        text = f"{CUDA}={cuda} also hides AMD GPUs; {HIP} is preferred, and comes before it"
        found.append(Finding("devices.visible", "info", text, f"export {HIP}={cuda}"))
    if environ.get(ORDINAL):
        text = f"{ORDINAL}={environ[ORDINAL]} is for OpenCL; HIP does not read it in current versions"
        found.append(Finding("devices.visible", "warning", text, f"unset {ORDINAL}"))
    return found
