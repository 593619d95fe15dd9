"""The checks of ``k3port doctor`` on installed packages, from their metadata; nothing is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from k3port.oracle.checks import DoctorCheck, Facts, Result
from k3port.oracle.packages import outside_validated
from k3port.oracle.spec import Vendor

OPTIONAL: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("triton", "flashinfer-python", "fla-core"),
    "amd": ("triton", "amd-aiter", "fla-core"),
    "cpu": (),
}
"""Packages with kernels, by vendor, in the order in which they are worth installing."""

MODULES = {"amd-aiter": "aiter", "flashinfer-python": "flashinfer", "fla-core": "fla"}
"""Import names that are not the name of the distribution."""


def _torch(facts: Facts) -> Iterable[Result]:
    build = facts.detection.torch
    if build.problem:
        yield Result("fail", f"PyTorch is damaged: {build.problem}", "pip install --force-reinstall torch")
    elif not build.version:
        yield Result("fail", "PyTorch is not installed: planning works, running does not", "pip install torch")
    else:
        kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "CPU"
        yield Result("ok", f"PyTorch {build.version}, built for {kind} (not imported)")


def _required(facts: Facts) -> Iterable[Result]:
    missing = [name for name in facts.required if name not in facts.packages]
    if missing:
        yield Result("fail", f"missing: {', '.join(missing)}", f"pip install {' '.join(missing)}")


def _optional(facts: Facts) -> Iterable[Result]:
    profile = facts.profile
    vendor: Vendor = profile.vendor if profile is not None else "cpu"
    wanted = OPTIONAL[vendor]
    assumed = profile.packages if profile is not None else {}
    every = dict.fromkeys((*wanted, *(name for names in OPTIONAL.values() for name in names)))
    for name in every:
        version = facts.packages.get(name)
        if version is not None:
            need = "" if name in wanted else f", not needed on {vendor}"
            yield Result("info", f"{name} {version}{need} (not imported)")
        elif name in wanted and facts.here:
            yield Result("warning", f"{name} is not installed: its kernels cannot be chosen", f"pip install {name}")
        elif name in wanted:
            yield Result("info", f"{name} is not installed here; the plan assumes {assumed.get(name, 'no version')}")


def _validated(facts: Facts) -> Iterable[Result]:
    if facts.profile is None:
        return
    for outside in outside_validated(facts.profile, facts.packages):
        yield Result("warning", str(outside), f'pip install "{outside.package}{outside.validated}"')


def _imports(facts: Facts) -> Iterable[Result]:
    for name, problem in (facts.imports or {}).items():
        if problem:
            text = f"{name} {facts.packages.get(name, '')}: present, import failed: {problem}"
            yield Result("warning", text, f"pip install --force-reinstall {name}")
        else:
            yield Result("ok", f"{name} can be imported")


PACKAGE_CHECKS: tuple[DoctorCheck, ...] = (
    DoctorCheck("packages.torch", "packages", "PyTorch is installed", _torch),
    DoctorCheck("packages.required", "packages", "everything that k3port needs is installed", _required),
    DoctorCheck("packages.optional", "packages", "packages with kernels for the platform", _optional),
    DoctorCheck("packages.validated", "packages", "versions are in the range validated for the platform", _validated),
    DoctorCheck("packages.import", "packages", "optional packages can be imported (with --deep)", _imports),
)
