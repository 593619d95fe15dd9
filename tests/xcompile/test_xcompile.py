"""Cross-compilation on planted kernels: what must be a fault is one, what is measured is there, the cache is right."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be compiled")

import triton
from packaging.version import Version

from k3port.backends.portable import launch
from k3port.backends.portable.tuning import Entry
from k3port.oracle.spec import AxisRule, KernelSpec, Requires
from k3port.testing.targets import TARGETS
from k3port.testing.xcompile import (
    CompileReport,
    compile_all,
    compile_kernel,
    default_cache_dir,
    jobs,
    triton_kernels,
)
from k3port.testing.xcompile.__main__ import main


def toy(name: str, **fields: object) -> KernelSpec:
    return KernelSpec(f"toy.{name}", "rms_norm", f"xcompile_kernels:{name}", "planted", **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("xcompile")


def run(name: str, cache: Path, *targets: str) -> CompileReport:
    return compile_kernel(toy(name), targets=targets or TARGETS, jobs=1, cache_dir=cache)


def test_a_product_compiles_everywhere_and_its_matrix_instructions_are_counted(cache: Path) -> None:
    report = run("product", cache)
    assert report.faults == ()
    found = {row.target: row.resources for row in report.rows}
    assert set(found) == set(TARGETS)
    # 32 x 32 x 32: one wave takes 4 steps of 8, or 2 of 16; on gfx1250 each of 4 waves takes one tile of 16 x 16.
    counted = {target: dict(resources.matrix) for target, resources in found.items() if resources}
    assert counted["gfx942"] == {"v_mfma_f32_32x32x8_bf16": 4}
    assert counted["gfx950"] == {"v_mfma_f32_32x32x16_bf16": 2}
    # Triton 3.6 multiplies this shape with FMAs on gfx1250, which the table has to show too.
    has_wmma = Version(triton.__version__) >= Version("3.7")
    assert counted["gfx1250"] == ({"v_wmma_f32_16x16x32_bf16": 1} if has_wmma else {})
    assert list(counted["sm_90"]) == ["mma m16n8k16 f32.bf16.bf16.f32"]
    assert all(resources and resources.registers > 0 for resources in found.values())
    assert all(resources and (resources.waves > 0) == target.startswith("gfx") for target, resources in found.items())


def test_widths_of_loads_follow_from_alignment(cache: Path) -> None:
    aligned = {row.target: row.resources for row in run("copy", cache).rows}
    off = {row.target: row.resources for row in run("copy_misaligned", cache).rows}
    for target, wide, narrow in (
        ("gfx942", "buffer_load_dwordx4", "buffer_load_ushort"),
        ("gfx1250", "buffer_load_b128", "buffer_load_u16"),
        ("sm_90", "ld.global.v4.b32", "ld.global.b16"),
    ):
        first, second = aligned[target], off[target]
        assert first is not None and second is not None
        assert list(first.loads) == [wide]
        assert list(second.loads) == [narrow]
        assert second.loads[narrow] == 8 * first.loads[wide]


def test_too_much_shared_memory_is_a_fault_where_it_does_not_fit(cache: Path) -> None:
    report = run("lds_hog", cache, "gfx942", "gfx950")
    (fault,) = report.faults
    assert "gfx942" in fault and "131072 bytes of shared memory, the limit of gfx942 is 65536" in fault
    assert [(row.target, row.ok, row.limit) for row in report.rows] == [
        ("gfx942", False, 65536),
        ("gfx950", True, 163840),
    ]
    waves = [row.resources.waves for row in report.rows if row.resources]
    assert waves == [0, 1], "not one workgroup fits on gfx942"


def test_the_wrong_fp8_flavour_is_a_fault(cache: Path) -> None:
    report = run("fnuz", cache, "sm_90", "gfx942", "gfx950")
    assert [row.target for row in report.rows if row.ok] == ["gfx942"]
    nvidia, amd = report.faults
    assert "on sm_90" in nvidia and "fp8e4b8 not supported" in nvidia
    # The compiler only warns: it would upcast.
    assert "on gfx950" in amd and "warning about fp8" in amd
    # From the cache it is the same fault.
    again = run("fnuz", cache, "sm_90", "gfx942", "gfx950")
    assert again.faults == report.faults and all(row.cached for row in again.rows)


def test_other_warnings_are_told_and_are_no_faults(cache: Path) -> None:
    report = run("warned", cache, "gfx950")
    assert report.faults == ()
    assert any("kpack is deprecated" in text for text in report.warnings)
    assert any("kpack is deprecated" in line for line in report.lines())


def test_spills_are_told_and_are_no_faults(cache: Path) -> None:
    report = run("spilling", cache, "gfx942", "sm_90")
    assert report.faults == ()
    assert {row.target for row in report.spilling} == {"gfx942", "sm_90"}
    assert all(row.resources and row.resources.scratch_bytes > 0 for row in report.rows)
    assert run("copy", cache).spilling == ()


def test_a_compile_error_names_kernel_function_target_and_configuration(cache: Path) -> None:
    (fault,) = run("broken", cache, "gfx950").faults
    for part in ("toy.broken", "(broken_kernel)", "gfx950", "tp 8", "chosen", "a planted error"):
        assert part in fault


def test_a_constant_1_is_met(cache: Path) -> None:
    """A step of one token makes its size a constant, which the kernel does not survive."""
    (fault,) = run("shifted", cache, "gfx942", "gfx950").faults
    assert "step of 1" in fault and "has no attribute 'to'" in fault


def test_host_code_that_fails_is_a_fault(cache: Path) -> None:
    (fault,) = run("failing", cache, "sm_90").faults
    assert "toy.failing on sm_90" in fault and "the host code failed" in fault


def test_a_kernel_without_a_triton_launch_is_named(cache: Path) -> None:
    report = run("plain", cache, "sm_90")
    assert (report.rows, report.silent) == ((), ("toy.plain on sm_90, tp 8",))
    assert "No Triton launch: toy.plain on sm_90, tp 8." in report.lines()


def test_a_kernel_that_launches_nothing_on_one_target_is_named_with_it(cache: Path) -> None:
    report = run("not_on_amd", cache, "sm_90", "gfx942", "gfx950")
    assert {row.target for row in report.rows} == {"sm_90"}
    assert report.silent == ("toy.not_on_amd on gfx942, tp 8", "toy.not_on_amd on gfx950, tp 8")


def test_every_tp_is_compiled(cache: Path) -> None:
    report = compile_kernel(
        KernelSpec("toy.sized", "situ_mul", "xcompile_kernels:sized", "planted"),
        targets=("sm_90",), tps=(1, 8), jobs=1, cache_dir=cache,
    )  # fmt: skip
    assert report.faults == ()
    assert {row.tp for row in report.rows} == {1, 8}
    # The rows are those of launches that differ, each with a result of its own.
    cases = [{row.case for row in report.rows if row.tp == tp} for tp in (1, 8)]
    assert cases[0] and cases[1] and not cases[0] & cases[1]


def test_calls_that_the_record_refuses_are_left_out(cache: Path) -> None:
    narrow = Requires(archs=("sm_90", "gfx950"), axes=(AxisRule("D", maximum=1024),))
    spec = toy("copy", requires=narrow)
    report = compile_kernel(spec, targets=("sm_90", "sm_120"), jobs=1, cache_dir=cache)
    assert [row.target for row in report.rows] == ["sm_90"]
    assert all("D 512" in row.case for row in report.rows)
    assert any("sm_120" in text for text in report.left_out) and any("at most 1024" in text for text in report.left_out)


def test_an_op_without_production_sizes_is_a_fault_that_says_what_to_do(cache: Path) -> None:
    spec = KernelSpec("toy.route", "moe_route", "xcompile_kernels:plain", "planted")
    (fault,) = compile_kernel(spec, targets=("sm_90",), jobs=1, cache_dir=cache).faults
    assert "argument router" in fault and "production.RECORDS" in fault


def test_every_configuration_is_compiled_when_asked(cache: Path) -> None:
    report = compile_kernel(toy("autotuned"), targets=("sm_90",), jobs=1, cache_dir=cache)
    assert [row.config for row in report.rows] == ["chosen"]
    report = compile_kernel(toy("autotuned"), targets=("sm_90",), all_configs=True, jobs=1, cache_dir=cache)
    assert len({row.config for row in report.rows}) == 2


def test_every_tuned_configuration_that_fits_is_compiled(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (
        Entry(("gfx950",), {"D": (4096, None)}, {"BLOCK": 512, "num_warps": 4}),
        Entry(("gfx942",), {}, {"BLOCK": 4096, "num_warps": 4}),
        Entry(("*",), {"D": (None, 100)}, {"BLOCK": 128, "num_warps": 4}),
        Entry(("gfx950",), {}, {"BLOCK": 256, "num_warps": 2}),
        # Behind the one for all sizes: gfx950 never gets it.
        Entry(("*",), {}, {"BLOCK": 1024, "num_warps": 2}),
    )
    for module in (launch, jobs):
        monkeypatch.setattr(module, "entries", lambda kernel: {"toy": found}[kernel])
    launch._tuned.cache_clear()
    report = compile_kernel(toy("configured"), targets=("gfx950",), all_configs=True, jobs=1, cache_dir=cache)
    launch._tuned.cache_clear()
    assert report.faults == ()
    wide, other = "toy: BLOCK=512 num_warps=4", "toy: BLOCK=256 num_warps=2"
    forced = {row.config: row.case for row in report.rows}
    assert set(forced) == {"chosen", wide, other}
    assert "D 512" not in forced[wide] and "D 7168" in forced[wide] and "D 512" in forced[other]


def test_processes_side_by_side_give_the_same(cache: Path, tmp_path: Path) -> None:
    alone = run("product", cache, "sm_90", "gfx950")
    report = compile_kernel(toy("product"), targets=("sm_90", "gfx950"), jobs=2, cache_dir=tmp_path)
    assert [row.resources for row in report.rows] == [row.resources for row in alone.rows]
    assert not any(row.cached for row in report.rows)


SOURCE = """
import torch, triton, triton.language as tl

@triton.jit
def helper(x):
    return x * {factor}

@triton.jit
def scaled_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, helper(tl.load(x_ptr + at)))

def scaled(x, weight, eps):
    y = torch.empty_like(x)
    scaled_kernel[(1,)](x, y, BLOCK=128)
    return y
"""


def test_a_result_is_kept_until_the_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    spec = KernelSpec("toy.scaled", "rms_norm", "scaled_toy:scaled", "planted")
    seen = []
    for factor in ("2", "2", "32"):
        (tmp_path / "scaled_toy.py").write_text(SOURCE.format(factor=factor))
        importlib.invalidate_caches()
        sys.modules.pop("scaled_toy", None)
        report = compile_kernel(spec, targets=("sm_90",), jobs=1, cache_dir=tmp_path / "cache")
        assert report.faults == ()
        seen.append([row.cached for row in report.rows])
    sys.modules.pop("scaled_toy", None)
    # The helper is a dependency of the kernel, not its own text.
    assert seen == [[False], [True], [False]]
    for file in (tmp_path / "cache").rglob("*.json"):
        file.write_text("{")
    report = compile_kernel(toy("copy"), targets=("sm_90",), jobs=1, cache_dir=tmp_path / "cache")
    assert report.faults == ()


def test_a_damaged_result_is_made_again(tmp_path: Path) -> None:
    for damage in ("{", '{"error": ""}', "[]"):
        run("copy", tmp_path, "sm_90")
        for file in tmp_path.rglob("*.json"):
            file.write_text(damage)
        report = run("copy", tmp_path, "sm_90")
        assert report.faults == () and not any(row.cached for row in report.rows)


CRASHING = """
import multiprocessing, os
from xcompile_kernels import copy_kernel
import torch, triton, triton.language as tl

if multiprocessing.parent_process() is not None:
    os._exit(7)

@triton.jit
def crashing_kernel(x_ptr):
    tl.store(x_ptr, 0.0)

def crashing(x, weight, eps):
    crashing_kernel[(1,)](x)
    copy_kernel[(1,)](x, x, BLOCK=512)
    return x
"""


def test_a_compiler_that_takes_its_process_down_is_named_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module ends every process but the first that imports it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "crashing_toy.py").write_text(CRASHING)
    spec = KernelSpec("toy.crashing", "rms_norm", "crashing_toy:crashing", "planted")
    report = compile_kernel(spec, targets=("sm_90",), jobs=2, cache_dir=tmp_path / "cache")
    (fault,) = report.faults
    assert "crashing_kernel" in fault and "the compiler crashed" in fault
    assert [row.ok for row in report.rows] == [False, True]
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


def test_where_results_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "k3port" / "xcompile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "k3port" / "xcompile"


def test_the_report_survives_json(cache: Path) -> None:
    report = compile_all(
        [toy("fnuz"), toy("failing"), toy("plain")], targets=("sm_90", "gfx950"), jobs=1, cache_dir=cache
    )
    assert CompileReport.from_json(report.to_json()) == report
    with pytest.raises(ValueError, match="compile report"):
        CompileReport.from_json("{}")
    table = "\n".join(report.lines())
    assert "| toy.fnuz | product_kernel | gfx950 | 8 | chosen |" in table


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        (toy("copy"), {"targets": ("gfx90a",)}, "no platform has the architecture 'gfx90a'"),
        (toy("copy"), {"jobs": 0}, "at least 1"),
        (KernelSpec("toy.declared", "rms_norm", "", ""), {}, "has no adapter"),
        (toy("copy", parts=("linear",)), {}, "composite"),
    ],
)
def test_bad_requests(cache: Path, spec: KernelSpec, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compile_kernel(spec, cache_dir=cache, **fields)


def test_command_line(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    asked = ["--kernel", "portable.rms_norm", "--target", "gfx950", "--jobs", "1"]
    assert main([*asked, "--cache", str(cache), "--json", str(file)]) == 0
    assert "| portable.rms_norm | rms_norm_kernel | gfx950 | 8 |" in capsys.readouterr().out
    assert json.loads(file.read_text())["faults"] == []
    with pytest.raises(SystemExit):
        main(["--kernel", "portable.linear"])
    assert "no built Triton kernel portable.linear" in capsys.readouterr().err


def test_only_built_kernels_that_ask_for_triton_are_taken() -> None:
    asks = Requires(packages=("triton>=3.3",))
    specs = [toy("copy", requires=asks), toy("plain"), KernelSpec("toy.d", "rms_norm", "", "", requires=asks)]
    assert [spec.name for spec in triton_kernels(specs)] == ["toy.copy"]
