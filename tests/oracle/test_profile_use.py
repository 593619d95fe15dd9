"""Profiles in use: the kernels they name, those of plugins, and whether this machine is the platform."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from k3port.errors import ExitCode, PlanError, UsageError
from k3port.oracle.host import is_here, require_host
from k3port.oracle.profile import check_kernels, get_profile
from k3port.oracle.spec import Device, KernelSpec
from k3port.plugins import make_registry
from k3port.runtime.platforms import find_profile

PLATFORMS = (
    "b200 b300 cpu dgx-spark gb200-nvl72 gb300-nvl72 h100 h200 mi300x mi325x mi350x mi355x mi450 rtx-pro-6000"
).split()

Write = Callable[..., Path]


# --- kernels that a profile names


def spec(name: str, op: str) -> KernelSpec:
    return KernelSpec(name, op, "", "stub")


def test_kernel_names_are_checked_apart_from_loading(write: Write) -> None:
    file = write(
        "platforms:\n  x:\n    extends: h200\n    kernels:\n      kda: [cuda.kda_fast, cuda.linear]\n"
        "    disable:\n      cuda.kda_slw: too slow\n"
    )
    profile = get_profile("x", (file,))
    assert profile.target().preferences == {"kda": ("cuda.kda_fast", "cuda.linear")}
    specs = [spec("cuda.kda_fats", "kda"), spec("cuda.kda_slow", "kda"), spec("cuda.linear", "linear")]
    assert check_kernels([profile], specs) == [
        f"{file}:6: kernels.kda: no kernel cuda.kda_fast; did you mean cuda.kda_fats?",
        f"{file}:6: kernels.kda: cuda.linear is a kernel of linear",
        f"{file}:8: disable.cuda.kda_slw: no kernel cuda.kda_slw; did you mean cuda.kda_slow?",
    ]


def test_a_user_profile_with_an_unknown_kernel_is_refused_when_it_is_used(write: Write) -> None:
    file = write("platforms:\n  x:\n    extends: cpu\n    kernels: {linear: [cpu.linaer]}\n")
    registry = make_registry(entry_points=False)
    with pytest.raises(UsageError) as caught:
        find_profile("x", (file,), registry=registry)
    assert caught.value.reasons == (
        f"{file}:5: kernels.linear: no kernel cpu.linaer; did you mean cpu.linear?",
    )  # fmt: skip
    assert find_profile("cpu", (file,), registry=registry).name == "cpu"


def test_plugins_bring_platforms_and_a_broken_file_costs_only_itself(write: Write) -> None:
    from k3port.hookspecs import hookimpl

    good = write("platforms:\n  lab: {extends: h200}\n", "good.yaml")
    bad = write("platforms:\n  lab: {extend: h200}\n", "bad.yaml")

    class Plugin:
        @hookimpl
        def k3port_platforms(self) -> list[Path]:
            return [good, bad]

    registry = make_registry([Plugin()], entry_points=False)
    assert registry.platforms == (good,)
    (problem,) = registry.problems
    assert f"{bad}:3: lab: unknown key extend; did you mean extends?" in problem
    assert find_profile("lab", registry=registry).arch == "sm_90"


# --- whether this machine is the platform


def gpu(vendor: str, arch: str, name: str = "a card", count: int = 1) -> Device:
    return Device(vendor, arch, name, "fake", count=count)  # type: ignore[arg-type]


def test_the_architecture_decides_and_a_cpu_is_everywhere() -> None:
    assert is_here(get_profile("cpu"), [])
    assert is_here(get_profile("mi355x"), [gpu("amd", "gfx942"), gpu("amd", "gfx950", "AMD Radeon Graphics")])
    assert not is_here(get_profile("mi355x"), [gpu("amd", "gfx942", "AMD Instinct MI355X")])
    assert not is_here(get_profile("mi355x"), [gpu("nvidia", "gfx950")])


def test_a_device_of_unknown_architecture_does_not_stop_a_run() -> None:
    assert is_here(get_profile("h200"), [gpu("nvidia", "unknown")])
    assert not is_here(get_profile("mi355x"), [gpu("nvidia", "unknown")])


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ([], "found: no GPU"),
        ([gpu("amd", "gfx942", "MI300X", 8), gpu("cpu", "cpu")], "found: 8 x MI300X (gfx942)"),
        ([gpu("nvidia", "sm_90", "H200"), gpu("nvidia", "sm_90", "H200")], "found: 2 x H200 (sm_90)"),
    ],
)
def test_b16_a_platform_that_is_not_here_is_refused_with_what_was_found(devices: list[Device], found: str) -> None:
    with pytest.raises(PlanError) as caught:
        require_host(get_profile("mi355"), devices)
    error = caught.value
    assert error.exit_code == ExitCode.UNSUPPORTED
    assert error.message == "this machine is not mi355x"
    assert found in error.reasons[0] and "gfx950" in error.reasons[0]
    assert "k3port plan --platform mi355x" in error.hint
    require_host(get_profile("mi355"), [gpu("amd", "gfx950")])
