"""Host code that never ends, disks that are full, interrupts, and scripts without a main guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be compiled")

import triton
from packaging.version import Version

from k3port.oracle.spec import KernelSpec
from k3port.testing.xcompile import cache, compile_kernel, jobs
from k3port.testing.xcompile.__main__ import main
from k3port.testing.xcompile.measure import widened

ROOT = Path(__file__).parents[2]


def toy(name: str, module: str = "xcompile_kernels") -> KernelSpec:
    return KernelSpec(f"toy.{name}", "rms_norm", f"{module}:{name}", "planted")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_toys", raising=False)
    (tmp_path / "odd_toys.py").write_text(
        "import sys, torch, triton.language as tl\nfrom xcompile_kernels import product_kernel\n"
        "def endless(x, weight, eps):\n    while True:\n        pass\n"
        "def leaves(x, weight, eps):\n    sys.exit('bye')\n"
        "def ocp(x, weight, eps):\n    y = torch.empty_like(x)\n"
        "    product_kernel[(1,)](x, y, M=64, K=64, DTYPE=tl.float8e4nv)\n    return y\n"
    )
    return tmp_path


def test_host_code_that_does_not_end_is_a_fault(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CASE_S", 0.2)
    report = compile_kernel(toy("endless", "odd_toys"), targets=("sm_90", "gfx950"), jobs=1, cache_dir=odd / "cache")
    assert report.faults and all("its host code: did not end within 0.2 s" in fault for fault in report.faults)


def test_host_code_that_ends_the_process_is_a_fault(odd: Path) -> None:
    report = compile_kernel(toy("leaves", "odd_toys"), targets=("sm_90",), jobs=1, cache_dir=odd / "cache")
    assert report.faults and all("SystemExit: it ended the process with bye" in fault for fault in report.faults)


def test_a_flavour_of_fp8_without_a_matrix_instruction_is_a_fault(odd: Path) -> None:
    found = compile_kernel(toy("ocp", "odd_toys"), targets=("gfx942", "gfx950"), jobs=1, cache_dir=odd / "cache")
    rows = {row.target: row for row in found.rows}
    assert rows["gfx950"].ok
    (fault,) = rows["gfx942"].problems
    assert "fp8" in fault or fault == (
        "tl.dot of f8E4M3FN: gfx942 has no matrix instruction for this flavour here; it is widened"
    )
    if Version(triton.__version__) >= Version("3.9"):
        assert rows["gfx942"].warnings == (), "the compiler does not say it"
    again = compile_kernel(toy("ocp", "odd_toys"), targets=("gfx942",), jobs=1, cache_dir=odd / "cache")
    assert [row.problems for row in again.rows] == [(fault,)] and all(row.cached for row in again.rows)


def test_products_that_are_widened() -> None:
    line = "%4 = tt.dot %1, %2, %3 : tensor<32x64x{}> * tensor<64x32x{}> -> tensor<32x32xf32> loc(#loc)"
    ocp, mixed = line.format("f8E4M3FN", "f8E4M3FN"), line.format("f8E5M2", "f8E4M3FN")
    assert widened(ocp, ["v_mfma_f32_32x32x8_f16"]) == ("f8E4M3FN",)
    assert widened(ocp + "\n" + mixed, []) == ("f8E4M3FN", "f8E5M2 x f8E4M3FN")
    for kind in ("v_mfma_f32_32x32x64_f8f6f4", "v_wmma_f32_16x16x16_fp8_bf8", "wgmma m64n8k32 f32.e4m3.e4m3"):
        assert widened(ocp, [kind]) == ()
    assert widened(line.format("f16", "f16"), []) == ()


def test_results_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    report = compile_kernel(toy("copy"), targets=("sm_90", "gfx950"), jobs=1, cache_dir=tmp_path / "file" / "cache")
    assert report.faults == () and len(report.rows) > 1
    assert capsys.readouterr().err.count("note: compiled code is not kept") == 1


def test_a_full_disk_leaves_no_half_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "os", SimpleNamespace(replace=full))
    assert compile_kernel(toy("copy"), targets=("sm_90",), jobs=1, cache_dir=tmp_path).faults == ()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--kernel", "portable.rms_norm", "--target", "gfx950", "--jobs", "1", "--cache", str(tmp_path)]
    assert main([*asked, "--json", "/dev/full"]) == 1
    assert capsys.readouterr().err.endswith("error: cannot write /dev/full: No space left on device\n")


def test_an_unknown_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kernel", "portable.rms_nrm"])
    assert "no built Triton kernel portable.rms_nrm; did you mean portable.rms_norm" in capsys.readouterr().err


SCRIPT = """
import sys
from pathlib import Path
from k3port.oracle.spec import KernelSpec
from k3port.testing.xcompile import compile_kernel
print("started", flush=True)
spec = KernelSpec("toy.product", "rms_norm", "xcompile_kernels:product", "planted")
report = compile_kernel(spec, targets=("sm_90", "gfx950"), jobs=2, cache_dir=Path(sys.argv[1]))
print("faults", report.faults, len(report.rows))
"""


def script(tmp_path: Path) -> subprocess.Popen[str]:
    """A script that compiles at its top, in a session of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))
    command = ["env", f"PYTHONPATH={path}", sys.executable, str(tmp_path / "script.py"), str(tmp_path / "cache")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    process = script(tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("started") == 1 and "faults () " in out and err == ""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_an_interrupt_ends_all_processes_at_once(tmp_path: Path) -> None:
    process = script(tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    deadline, workers = time.monotonic() + 60, []
    while not workers and time.monotonic() < deadline:
        time.sleep(0.1)
        workers = _workers(process.pid)
    assert workers, "no worker has started"
    time.sleep(1.5)
    workers = _workers(process.pid)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - begin < 3
    assert process.returncode not in (0, None)
    time.sleep(0.2)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]


def _workers(parent: int) -> list[int]:
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
