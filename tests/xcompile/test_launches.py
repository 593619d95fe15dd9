"""The recorder: what a launch on a target would be compiled for, from an ordinary call on CPU tensors."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be compiled")

import torch
import triton
import xcompile_kernels as toys
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from k3port.backends.portable import launch as portable_launch
from k3port.testing.launches import Launch, PortableLaunch, gpu_target, record


def arguments(x: torch.Tensor, arch: str = "gfx950", **changed: Any) -> Launch:
    values = {"none_ptr": None, "one": 1, "sixteen": 64, "seven": 7, "switch": True, "number": 0.5, **changed}
    with record(arch) as recording:
        toys.arguments_kernel[(3, 2)](
            x, y_ptr=torch.empty(8), stride=x.stride(0), D=96, T=triton.language.bfloat16, num_warps=2, **values
        )
    (launch,) = recording.launches
    return launch


def test_arguments_become_types_constants_and_attributes() -> None:
    launch = arguments(torch.empty(4, 32, dtype=torch.bfloat16))
    assert launch.name == "arguments_kernel"
    assert launch.grid == (3, 2, 1)
    assert launch.signature == {
        "x_ptr": "*bf16",
        "none_ptr": "constexpr",
        "y_ptr": "*fp32",
        "one": "constexpr",
        "sixteen": "i32",
        "seven": "i32",
        "switch": "u1",
        "number": "fp32",
        "stride": "i32",
        "D": "constexpr",
        "T": "constexpr",
    }
    assert (launch.constant("none_ptr"), launch.constant("one"), launch.constant("D")) == (None, 1, 96)
    assert launch.constant("T") == triton.language.bfloat16
    with pytest.raises(KeyError):
        launch.constant("seven")
    place = {name: (index,) for index, name in enumerate(launch.signature)}
    assert launch.attributes == {
        place["x_ptr"]: [["tt.divisibility", 16], ["tt.pointer_range", 32]],
        place["y_ptr"]: [["tt.divisibility", 16], ["tt.pointer_range", 32]],
        place["sixteen"]: [["tt.divisibility", 16]],
        place["stride"]: [["tt.divisibility", 16]],
    }
    assert launch.options == {"num_warps": 2, "enable_fp_fusion": True}


@pytest.mark.parametrize(("value", "kind"), [(2**31 - 1, "i32"), (2**31, "i64"), (2**63, "u64"), (-(2**31) - 1, "i64")])
def test_wide_integers(value: int, kind: str) -> None:
    assert arguments(torch.empty(4, 32), seven=value).signature["seven"] == kind


def test_what_is_known_of_pointers_depends_on_offset_size_and_vendor() -> None:
    wide = torch.empty(5, 34, dtype=torch.bfloat16)
    strided = arguments(wide[:, :32])
    assert (0,) in strided.attributes
    assert (8,) not in strided.attributes, "a stride of 34 is no multiple of 16"
    assert arguments(wide[:, 1:33]).attributes[(0,)] == [["tt.pointer_range", 32]], "2 bytes off a multiple of 16"
    huge = torch.empty(2**30, 2, dtype=torch.bfloat16)
    assert arguments(huge).attributes[(0,)] == [["tt.divisibility", 16]], "over 2 GiB, offsets need 64 bits"
    assert arguments(wide, "sm_90").attributes[(0,)] == [["tt.divisibility", 16]], "NVIDIA has no pointer range"


def test_nothing_runs_and_everything_is_put_back() -> None:
    before, run = torch.full((1024,), 7.0), JITFunction.run
    after = before.clone()

    def use() -> None:
        assert portable_launch.arch() == "gfx942"
        toys.copy_kernel[(1,)](torch.zeros(1024), after, BLOCK=1024)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"), record("gfx942"):
        use()
    assert torch.equal(before, after)
    assert JITFunction.run is run
    assert not portable_launch._pretended


def test_autotuners_and_heuristics() -> None:
    x = torch.empty(256)
    with record("sm_90") as recording:
        toys.autotuned_kernel[(1,)](x, x)
        toys.heuristic_kernel[(1,)](x, x, 1)
        toys.heuristic_kernel[(1,)](x, x, 2)
    assert [launch.constant("BLOCK") for launch in recording.launches] == [64, 64, 128]
    assert recording.launches[0].options["num_warps"] == 2
    with record("sm_90", every_autotuned=True) as recording:
        toys.autotuned_kernel[(1,)](x, x)
    assert [launch.constant("BLOCK") for launch in recording.launches] == [64, 128]
    assert len({launch.autotuned for launch in recording.launches}) == 2


def test_a_grid_may_be_a_function_of_the_arguments() -> None:
    x = torch.empty(256)
    with record("sm_90") as recording:
        toys.copy_kernel[lambda meta: (meta["BLOCK"] // 64,)](x, x, BLOCK=256)
    assert recording.launches[0].grid == (4, 1, 1)


def test_options_that_the_target_does_not_have_are_refused_as_in_a_launch() -> None:
    x = torch.empty(256)
    for arch, option in (("sm_90", "waves_per_eu"), ("gfx950", "maxnreg")):
        with pytest.raises(KeyError, match=option), record(arch):
            toys.copy_kernel[(1,)](x, x, BLOCK=256, **{option: 1})


def test_look_ups_of_tuned_configurations_are_noted() -> None:
    from k3port.backends.portable.kernels.rms_norm import rms_norm

    with record("gfx950") as recording:
        rms_norm(torch.empty(3, 7168), torch.empty(7168), 1e-5)
    (tuned,) = recording.tuned
    assert (tuned.name, dict(tuned.axes)["D"]) == ("rms_norm", 7168)


def test_a_launch_travels_to_another_process() -> None:
    launch = arguments(torch.empty(4, 32, dtype=torch.bfloat16))
    back = pickle.loads(pickle.dumps(PortableLaunch.of(launch))).launch()
    assert back == launch
    assert back.function is toys.arguments_kernel

    @triton.jit
    def inner(x_ptr):  # type: ignore[no-untyped-def]
        pass

    with record("sm_90") as recording:
        inner[(1,)](torch.empty(4))
    with pytest.raises(ValueError, match="inner cannot be imported"):
        PortableLaunch.of(recording.launches[0])


def test_a_recorded_launch_is_what_the_compiler_takes() -> None:
    launch = arguments(torch.empty(4, 32, dtype=torch.bfloat16))
    source = ASTSource(
        launch.function,
        dict(launch.signature),
        dict(launch.constants),
        {k: list(v) for k, v in launch.attributes.items()},
    )
    kernel = triton.compile(source, target=gpu_target(launch.arch), options=dict(launch.options))
    assert kernel.metadata.num_warps == 2


def test_there_is_nothing_to_record_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="interpreter is on"), record("sm_90"):
        pass


@pytest.mark.parametrize("name", ["cpu", "sm_", "gfx", "90"])
def test_only_gpus_are_targets(name: str) -> None:
    with pytest.raises(ValueError, match="no GPU architecture"), record(name):
        pass


def test_waves_are_64_lanes_on_gfx9_and_32_on_gfx12() -> None:
    assert [gpu_target(arch).warp_size for arch in ("gfx942", "gfx950", "gfx1250", "sm_120")] == [64, 64, 32, 32]
