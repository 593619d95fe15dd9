"""The launcher: ordinary launches, reports, specialisation, autotuning, errors of callers and of Triton."""

from __future__ import annotations

import warnings

import amd_kernels as kernels
import pytest
import torch
import triton
import triton.language as tl
import xcompile_kernels as toys
from triton.compiler.errors import CompilationError
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from k3port.backends.portable import launch as portable
from k3port.testing.amd_isa import EmuError, LaunchReport, emulate, launch, run_kernel
from k3port.testing.amd_isa.compile import attributes, type_of
from k3port.testing.launches import record


@triton.jit
def scale(x, o, factor, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(o + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def wrong_types(x, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, tl.load(x + i) + tl.zeros((B * 2,), tl.float32))


@triton.jit
def positions(o):
    at = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(o + at, at)


def test_a_report() -> None:
    x, o = torch.randn(1000), torch.zeros(1000)
    with emulate("gfx950") as reports:
        assert portable.arch() == "gfx950"
        returned = scale[(4,)](x, o, 2.0, 1000, B=256, num_warps=2)
    torch.testing.assert_close(o, 2 * x)
    (report,) = reports
    assert returned is report
    assert isinstance(report, LaunchReport)
    assert (report.name, report.arch, report.grid, report.num_warps) == ("scale", "gfx950", (4, 1, 1), 2)
    assert report.instructions > report.static_instructions > 10
    assert report.instructions / 8 <= report.longest <= report.static_instructions
    assert (report.races, report.unknown, report.lds_bytes) == ((), {}, 0)
    assert report.compile_s > 0 < report.run_s


def test_everything_is_as_before_afterwards() -> None:
    before = JITFunction.run, Autotuner.run, list(portable._pretended)
    with emulate("gfx942"):
        assert JITFunction.run is not before[0]
        assert portable._pretended == [*before[2], "gfx942"]
    with pytest.raises(ZeroDivisionError), emulate("gfx942"):
        print(1 / 0)
    assert (JITFunction.run, Autotuner.run, list(portable._pretended)) == before


def test_contexts_nest() -> None:
    x, o = torch.randn(64), torch.zeros(64)
    with emulate("gfx942") as outer:
        with emulate("gfx950") as inner:
            scale[(1,)](x, o, 2.0, 64, B=64)
        scale[(1,)](x, o, 2.0, 64, B=64)
    assert [r.arch for r in outer] == ["gfx950", "gfx942"]
    assert [r.arch for r in inner] == ["gfx950"]


def test_an_autotuned_kernel_takes_its_first_configuration() -> None:
    configs = [triton.Config({"B": 128}, num_warps=1), triton.Config({"B": 256}, num_warps=8)]
    tuned = triton.runtime.autotuner.Autotuner(scale, scale.arg_names, configs, ["n"], None, None)
    x, o = torch.randn(300), torch.zeros(300)
    with emulate("gfx942") as reports:
        tuned[lambda meta: (triton.cdiv(300, meta["B"]),)](x, o, 3.0, 300)
    torch.testing.assert_close(o, 3 * x)
    assert (reports[0].grid, reports[0].num_warps) == ((3, 1, 1), 1)


def test_heuristics() -> None:
    chosen = triton.heuristics({"B": lambda args: triton.next_power_of_2(args["n"])})(scale)
    x, o = torch.randn(300), torch.zeros(300)
    with emulate("gfx942"):
        chosen[(1,)](x, o, 3.0, 300)
    torch.testing.assert_close(o, 3 * x)


def test_a_grid_of_three_axes() -> None:
    o = torch.zeros(24, dtype=torch.int32)
    report = run_kernel(positions, None, {}, (2, 3, 4), [o], "gfx942")
    assert o.tolist() == list(range(24))
    assert report.grid == (2, 3, 4)


def test_explicit_types_and_unspecialised_arguments() -> None:
    x, o = torch.randn(64), torch.zeros(64)
    for specialize in (True, False):
        run_kernel(scale, {"factor": "fp32", "n": "i64"}, {"B": 64}, (1,), {"n": 1, "factor": 2, "x": x, "o": o}, "gfx942",
                   specialize=specialize)  # fmt: skip
        assert (o[0], o[1]) == (2 * x[0], 0)


def test_what_the_compiler_is_told() -> None:
    x = torch.zeros(64)
    assert attributes(x) == [["tt.divisibility", 16], ["tt.pointer_range", 32]]
    assert attributes(x[1:]) == [["tt.pointer_range", 32]]
    assert (attributes(32), attributes(33), attributes(True)) == ([["tt.divisibility", 16]], [], [])
    assert [type_of(v) for v in (x, True, 3, 2**31, 2**63, 0.5)] == ["*fp32", "u1", "i32", "i64", "u64", "fp32"]


def test_a_trace() -> None:
    seen: list[int] = []
    x, o = torch.randn(64), torch.zeros(64)
    report = run_kernel(scale, None, {"B": 64}, (1,), [x, o, 2.0, 64], "gfx942", 1, trace=lambda w, pc: seen.append(pc))
    assert len(seen) == report.instructions


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([torch.zeros(4, device="meta"), torch.zeros(4), 1.0, 4], "takes CPU tensors"),
        ([torch.zeros(4), torch.zeros(4), {}, 4], "no Triton type"),
    ],
)
def test_arguments_that_cannot_be(args: list[object], message: str) -> None:
    with pytest.raises(EmuError, match=message):
        run_kernel(scale, None, {"B": 4}, (1,), args, "gfx942", 1)


def test_options_and_architectures_that_are_not_there() -> None:
    x = torch.zeros(4)
    with emulate("gfx942"), pytest.raises(KeyError, match="num_wraps"):
        scale[(1,)](x, x, 1.0, 4, B=4, num_wraps=4)
    with pytest.raises(EmuError, match="gfx90a"), emulate("gfx90a"):
        pass
    with pytest.raises(EmuError, match="no Triton kernel"):
        run_kernel(len, None, {}, (1,), [], "gfx942")


def test_compile_errors_are_tritons(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.zeros(64)
    with emulate("gfx942"), pytest.raises(CompilationError):
        wrong_types[(1,)](x, x, B=64)


def test_warnings_of_the_compiler_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first launch and at those that find the kernel compiled."""
    from k3port.testing.amd_isa import compile as module

    real = module.triton.compile

    def warning_compile(*args: object, **kwargs: object) -> object:
        warnings.warn("fp8 is computed as fp16", UserWarning, stacklevel=1)
        return real(*args, **kwargs)

    monkeypatch.setattr(module.triton, "compile", warning_compile)
    x, o = torch.randn(32), torch.zeros(32)
    for _ in range(2):
        with emulate("gfx942"), pytest.warns(UserWarning, match="computed as fp16"):
            scale[(1,)](x, o, 2.0, 32, B=32, num_warps=1)
    with warnings.catch_warnings(action="error"), emulate("gfx942"), pytest.raises(UserWarning, match="as fp16"):
        scale[(1,)](x, o, 2.0, 32, B=32, num_warps=1)


def test_not_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(EmuError, match="interpreter"), emulate("gfx942"):
        pass


def test_ordinary_launch_of_a_kernel_with_default_options() -> None:
    x, o = torch.randn(4, 500).to(torch.bfloat16), torch.empty(4, 500)
    with emulate("gfx942") as reports:
        kernels.softmax[(4,)](x, o, 500, N=512)
    assert reports[0].num_warps == 4
    assert ((o.double() - x.double().softmax(1)).norm() / x.double().softmax(1).norm()) < 1e-6


def test_an_instruction_that_is_not_there_cannot_be_skipped() -> None:
    x = torch.zeros(64)
    with emulate("gfx942", skip=100_000), pytest.raises(EmuError, match="no instruction 100000"):
        scale[(1,)](x, x, 1.0, 64, B=64)


def test_num_programs_and_group_sizes_are_passed() -> None:
    """The runtime passes them behind the arguments: an emulator that leaves zeros there is silently wrong."""
    o = torch.zeros(6, dtype=torch.int32)
    with emulate("gfx950"):
        positions[(3, 2)](o)
    assert o.tolist() == list(range(6))


class Stopped(Exception):
    """Raised in place of a compilation."""


@pytest.mark.parametrize(
    "changed", [{}, {"seven": 1, "one": 2**31}, {"sixteen": 0, "switch": False}, {"none_ptr": 3.5}]
)
@pytest.mark.parametrize("offset", [0, 1])
def test_a_launch_is_read_as_triton_itself_reads_it(
    changed: dict[str, object], offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types, constants, alignment and ranges are those of Triton's own binder, so the same code is compiled."""
    x = torch.empty(5, 34, dtype=torch.bfloat16)[:, offset : offset + 32]
    values = {"none_ptr": None, "one": 1, "sixteen": 64, "seven": 7, "switch": True, "number": 0.5, **changed}
    values |= {"y_ptr": torch.empty(8), "stride": x.stride(0), "D": 96, "T": tl.bfloat16}
    seen: list[tuple[object, ...]] = []

    def stop(function: object, types: object, constants: object, attrs: object, *rest: object) -> None:
        seen.append((types, constants, attrs, rest[-1]))
        raise Stopped

    monkeypatch.setattr(launch, "compile_kernel", stop)
    with record("gfx950") as recording:
        toys.arguments_kernel[(3, 2)](x, num_warps=2, **values)
    with pytest.raises(Stopped), emulate("gfx950"):
        toys.arguments_kernel[(3, 2)](x, num_warps=2, **values)
    (wanted,) = recording.launches
    names = list(wanted.signature)
    types = {name: kind for name, kind in wanted.signature.items() if kind != "constexpr"}
    constants = {names[path[0]]: value for path, value in wanted.constants.items()}
    known = {names[path[0]]: value for path, value in wanted.attributes.items()}
    assert seen == [(types, constants, known, dict(wanted.options))]
