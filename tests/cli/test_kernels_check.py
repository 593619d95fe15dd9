"""``k3port kernels check``: its arguments, its errors, its report and its exit codes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from k3port.cli import check as command
from k3port.cli.kernels import kernels
from k3port.errors import ExitCode
from k3port.oracle.spec import KernelSpec, Requires
from k3port.plugins import Registry, make_registry
from k3port.testing import subject

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def with_kernels(monkeypatch: pytest.MonkeyPatch, *specs: KernelSpec) -> Registry:
    """The command's registry, with these kernels more."""
    registry = make_registry(entry_points=False)
    registry = dataclasses.replace(registry, kernels=(*registry.kernels, *specs))
    monkeypatch.setattr(command, "default_registry", lambda: registry)
    return registry


def test_a_cpu_kernel_in_text(k3port: Any) -> None:
    result = k3port("kernels", "check", "cpu.rms_norm")
    assert result.code == ExitCode.OK
    assert result.out.startswith("## cpu.rms_norm: ok\n\nrms_norm: ")
    assert "### Contract: CPU, with the limits of cpu (" in result.out
    row = re.search(r"^\| float32 \| (\d+) \| 0 \| y \| ([\d.e-]+) \| 1\.0e-06 \|$", result.out, re.M)
    assert row is not None and int(row[1]) > 20 and 1e-9 < float(row[2]) < 1e-6
    assert re.search(r"^Refused by its record: \d+ x DTYPE: needs float32 activations", result.out, re.M)
    assert result.out.endswith("### Not run\n\n- nothing was left out\n")
    assert "contract of rms_norm: CPU ..." in result.err


def test_a_cpu_kernel_in_json(k3port: Any) -> None:
    result = k3port("kernels", "check", "cpu.rms_norm", "--json", "--quiet")
    assert (result.code, result.err) == (ExitCode.OK, "")
    document = json.loads(result.out)
    assert document["ok"] is True and document["exit_code"] == 0 and document["faults"] == []
    (run,) = document["contract"]
    assert run["platform"] == "cpu" and run["ran"] == sum(case["report"] is not None for case in run["cases"])
    assert run["worst"]["float32"]["relative_rms"] < run["worst"]["float32"]["tolerance"]
    assert document["emulation"] == [] and document["compilation"] is None


def test_verbose_shows_every_sample(k3port: Any) -> None:
    short, long = (k3port("kernels", "check", "cpu.rms_norm", *more).out for more in ((), ("--verbose",)))
    assert "| float32, 'strided rows', unaligned |" in long
    assert "'strided rows'" not in short


def test_one_dtype(k3port: Any) -> None:
    document = json.loads(k3port("kernels", "check", "reference.rms_norm", "--dtype", "bfloat16", "--json").out)
    assert {case["dtype"] for case in document["contract"][0]["cases"]} == {"bfloat16"}


@NEEDS_TRITON
def test_a_kernel_that_is_wrong(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import planted_kernels as planted

    with_kernels(monkeypatch, planted.on_cpu("wrong_on_cpu"))
    result = k3port("kernels", "check", "planted.wrong_on_cpu")
    assert result.code == ExitCode.NUMERICS
    assert re.match(r"## planted\.wrong_on_cpu: \d+ faults\n", result.out)
    assert "'rows': y: relative RMS error" in result.out
    assert "error: kernel planted.wrong_on_cpu does not keep its promises" in result.err
    document = json.loads(k3port("kernels", "check", "planted.wrong_on_cpu", "--json").out)
    assert document["ok"] is False and document["exit_code"] == ExitCode.NUMERICS
    assert len(document["faults"]) > 3


@NEEDS_TRITON
def test_what_only_the_emulator_sees_fails_the_check(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load without its mask: the numbers are right, and it compiles."""
    import planted_kernels as planted

    with_kernels(monkeypatch, planted.spec("no_load_mask"), planted.spec("right"))
    # Kernels of this process are not known to the interpreter's.
    monkeypatch.setattr("k3port.testing.check._places", lambda spec, registry: [])
    asked = ("--isa", "gfx950", "--target", "none", "--dtype", "float32")
    result = k3port("kernels", "check", "planted.no_load_mask", *asked)
    assert result.code == ExitCode.NUMERICS
    assert "- emulation: planted.no_load_mask" in result.out and "out of bounds" in result.out
    assert k3port("kernels", "check", "planted.right", *asked).code == ExitCode.OK


@NEEDS_TRITON
def test_a_dtype_that_triton_kernels_are_not_run_in(k3port: Any) -> None:
    for more in ((), ("--dtype", "float32")):
        result = k3port("kernels", "check", "portable.rms_norm", "--dtype", "float64", *more)
        assert (result.code, result.out) == (ExitCode.USAGE, "")
        assert "portable.rms_norm is written in Triton, and Triton kernels are not run in float64" in result.err
        assert re.search("^hint: .*float32, bfloat16, float16", result.err, re.M)


@pytest.mark.parametrize(
    ("vendors", "archs", "platform"),
    [
        (("nvidia", "amd"), (), "h200"),
        (("amd",), (), "mi355x"),
        (("nvidia",), ("sm_100",), "b200"),
        (("amd", "nvidia"), ("gfx942",), "mi300x"),
    ],
)
def test_the_limits_are_those_of_a_platform_that_the_record_admits(
    vendors: Any, archs: tuple[str, ...], platform: str
) -> None:
    from k3port.testing.check import platform_for

    spec = make_registry(entry_points=False).kernel("portable.rms_norm")
    only = dataclasses.replace(spec.requires, vendors=vendors, archs=archs)
    assert platform_for(dataclasses.replace(spec, requires=only)) == platform


def test_a_record_that_admits_nothing(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_registry(entry_points=False).kernel("cpu.rms_norm")
    nothing = dataclasses.replace(
        spec, name="planted.nothing", requires=dataclasses.replace(spec.requires, dtypes=("int8",))
    )
    with_kernels(monkeypatch, nothing)
    result = k3port("kernels", "check", "planted.nothing")
    assert result.code == ExitCode.FAILED
    assert "its record admits no sample of the contract here: nothing was run" in result.err


@pytest.mark.parametrize("name", ["portable.linear", "portable.vision_patch"])
def test_a_kernel_whose_gpu_is_elsewhere_is_neither_wrong_nor_ok(
    k3port: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = k3port("kernels", "check", name)
    assert result.code == ExitCode.UNSUPPORTED
    assert result.out.startswith(f"## {name}: not run here: needs a GPU of NVIDIA or AMD\n")
    assert "fault" not in result.out and "promises" not in result.err
    assert f"error: kernel {name} was not run: it needs a GPU of NVIDIA or AMD\nhint: " in result.err
    assert f"- the contract suite: {name} needs a GPU of NVIDIA or AMD" in result.out
    document = json.loads(k3port("kernels", "check", name, "--json").out)
    assert (document["ok"], document["faults"], document["exit_code"]) == (False, [], ExitCode.UNSUPPORTED)
    assert document["needs"] == "a GPU of NVIDIA or AMD"


def test_a_gpu_that_no_platform_describes(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Riva 128")
    monkeypatch.setattr("k3port.testing.check._profile_here", lambda: None)
    result = k3port("kernels", "check", "portable.linear")
    assert result.code == ExitCode.UNSUPPORTED
    assert "it needs a GPU of NVIDIA or AMD that some platform describes, and none describes Riva 128" in result.err


@NEEDS_TRITON
def test_a_contract_that_could_not_be_run_blames_no_machine(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("k3port.testing.check._interpret", broken)
    result = k3port("kernels", "check", "portable.rms_norm", "--isa", "none", "--target", "none", "--json")
    assert result.code == ExitCode.FAILED
    faults = json.loads(result.out)["faults"]
    assert faults == ["Triton's interpreter: could not be done: RuntimeError: no memory"]


def test_what_does_not_compile_fails_and_wrong_numbers_come_first() -> None:
    from k3port.testing.check import KernelCheck, check_kernel

    registry = make_registry(entry_points=False)
    good: KernelCheck = check_kernel(registry.kernel("cpu.rms_norm"), registry)
    assert good.exit_code == ExitCode.OK
    compilation: Any = SimpleNamespace(faults=("too much shared memory on sm_90",), silent=())
    unfit = dataclasses.replace(good, compilation=compilation)
    assert unfit.exit_code == ExitCode.FAILED
    assert unfit.faults == ("compilation: too much shared memory on sm_90",)
    (run,) = good.suites
    case = next(case for case in run.report.ran if case.report is not None)
    assert case.report is not None
    wrong = dataclasses.replace(case, report=dataclasses.replace(case.report, faults=("y: too far off",)))
    report = dataclasses.replace(run.report, cases=(wrong,))
    both = dataclasses.replace(unfit, suites=(dataclasses.replace(run, report=report),))
    assert both.exit_code == ExitCode.NUMERICS
    assert [fault.rpartition(": ")[2] for fault in both.faults] == ["too far off", "too much shared memory on sm_90"]
    nothing: Any = SimpleNamespace(faults=(), silent=("cpu.rms_norm on gfx942, tp 8",))
    silent = dataclasses.replace(good, compilation=nothing)
    assert silent.exit_code == ExitCode.FAILED
    assert silent.faults[0].endswith("no Triton kernel at production shapes: cpu.rms_norm on gfx942, tp 8")


@NEEDS_TRITON
def test_a_triton_kernel_in_the_interpreter(k3port: Any) -> None:
    asked = ("--isa", "none", "--target", "none", "--dtype", "float32", "--json")
    result = k3port("kernels", "check", "portable.rms_norm", *asked)
    assert result.code == ExitCode.OK, result.out
    document = json.loads(result.out)
    (run,) = document["contract"]
    assert (run["where"], run["platform"]) == ("Triton's interpreter", "h200")
    assert run["ran"] > 10 and document["versions"]["Triton"]
    assert "NVIDIA hardware" in document["not_run"] and "AMD hardware" in document["not_run"]
    assert "emulation of gfx942, gfx950" in document["not_run"]
    # There is one dtype, which got everything.
    assert not [sentence for sentence in document["not_run"] if sentence.startswith("in the interpreter, ")]
    rows = "in the interpreter: unaligned rows; adversarial samples in other memory orders"
    assert rows in document["not_run"]
    assert "unaligned" not in {case["variant"] for case in run["cases"]}


@NEEDS_TRITON
def test_what_the_interpreter_leaves_open_is_said(k3port: Any) -> None:
    """Only the first dtype that the record admits gets the memory orders."""
    asked = ("--isa", "none", "--target", "none", "--json")
    document = json.loads(k3port("kernels", "check", "portable.rms_norm", *asked).out)
    (run,) = document["contract"]
    orders: dict[str, set[str]] = {}
    for case in run["cases"]:
        if case["report"] is not None:
            orders.setdefault(case["dtype"], set()).add(case["variant"])
    assert {"strided", "permuted"} <= orders["float32"]
    assert orders["bfloat16"] == orders["float16"] == {"plain"}
    assert "in the interpreter, bfloat16/float16: other memory orders" in document["not_run"]


def interpreted(name: str, *dtypes: str, asked: tuple[str, ...] = ()) -> list[str]:
    """What is left open where the interpreter ran a kernel in some dtypes: the sentences about the interpreter."""
    from k3port.testing.check import SuiteRun
    from k3port.testing.left_open import INTERPRETER, not_run

    report: Any = SimpleNamespace(ran=[SimpleNamespace(dtype=dtype) for dtype in dtypes])
    spec = make_registry(entry_points=False).kernel(name)
    found, on_gpu = (
        not_run(spec, (SuiteRun(where, "h200", report, 0.0),), (), (), (), 0, asked)
        for where in (INTERPRETER, "GPU, a test")
    )
    assert "interpreter" not in " ".join(on_gpu)
    return [text for text in found if text.startswith("in the interpreter")]


@NEEDS_TRITON
def test_what_an_op_does_not_have_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    from k3port.testing import interpreter

    three = ("float32", "bfloat16", "float16")
    rows = "in the interpreter: unaligned rows; adversarial samples in other memory orders"
    both = "in the interpreter, bfloat16/float16: other memory orders, invariants"
    assert interpreted("portable.kda_core_step", *three) == [both, rows]
    assert interpreted("portable.kda_core_step", "bfloat16", asked=("bfloat16",)) == [rows]
    # All that ran is no first dtype: that one was refused.
    assert interpreted("portable.kda_core_step", "bfloat16", "float16") == [both, rows]
    assert interpreted("portable.sample", *three) == ["in the interpreter, bfloat16/float16: invariants"]
    monkeypatch.setattr(interpreter, "MAX_ELEMENTS", 3000)
    assert interpreted("portable.rms_norm", *three)[-1] == "in the interpreter, for their size: 'rows', 'wide'"


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (("portable.rms_nrm",), "no kernel 'portable.rms_nrm'", "did you mean portable.rms_norm?"),
        (("zzz",), "no kernel 'zzz'", "k3port kernels list shows all"),
        (
            ("cuda.flashinfer_rms_norm",),
            "kernel cuda.flashinfer_rms_norm is declared but not built",
            "built kernels of",
        ),
        ((), "missing argument 'NAME'", "k3port kernels check --help"),
        (("cpu.linear", "--isa", "gfx90a"), "--isa: 'gfx90a' is not one of", "k3port kernels check --help"),
        (("cpu.linear", "--target", "sm_75"), "--target: 'sm_75' is not one of", "k3port kernels check --help"),
        (("cpu.linear", "--dtype", "int8"), "--dtype: 'int8' is not one of", "k3port kernels check --help"),
        (
            ("cpu.linear", "--tp", "3"),
            "--tp: '3' is not one of '1', '2', '4', '8', '16'",
            "k3port kernels check --help",
        ),
        (("cpu.linear", "--timeout", "0"), "--timeout: 0 is not in the range", "k3port kernels check --help"),
        (("cpu.linear", "--tp", "0"), "--tp: '0' is not one of '1', '2', '4'", "k3port kernels check --help"),
        (("cpu.linear", "--isa", "none", "--isa", "gfx950"), "none together with others", "give none alone"),
        (("cpu.linear", "--isa", "none", "--mutate", "3"), "--mutate without an instruction set", "give --isa"),
        (("cpu.linear", "-v", "-q"), "both --verbose and --quiet", "give one"),
    ],
)
def test_usage(k3port: Any, args: tuple[str, ...], message: str, hint: str) -> None:
    result = k3port("kernels", "check", *args)
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert f"error: {message}" in result.err
    assert re.search(rf"^hint: .*{re.escape(hint)}", result.err, re.M)


def test_interpretation_in_the_environment_is_refused(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = k3port("kernels", "check", "cpu.rms_norm")
    assert (result.code, result.out) == (ExitCode.USAGE, "")
    assert "error: TRITON_INTERPRET is set" in result.err and "hint: unset it" in result.err
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert k3port("kernels", "check", "cpu.rms_norm", "--dtype", "float32").code == ExitCode.OK


@NEEDS_TRITON
def test_a_triton_that_cannot_be_imported(k3port: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('libcuda is\\nmissing')")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from k3port.cli.main import main; sys.exit(main(sys.argv[1:]))"
    asked = [sys.executable, "-c", code, str(tmp_path), "kernels", "check", "portable.rms_norm"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ExitCode.FAILED, "")
    assert done.stderr == (
        "error: kernel portable.rms_norm is written in Triton, which is not installed, or cannot be imported\n"
        "  - ImportError: libcuda is missing\nhint: pip install triton; it needs no GPU here\n"
    )


def loose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, **requires: Any) -> KernelSpec:
    """A kernel in a module of its own, which is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loose_kernel", raising=False)
    (tmp_path / "loose_kernel.py").write_text(source)
    fields = {"vendors": ("cpu",), **requires}
    return KernelSpec("loose.kernel", "rms_norm", "loose_kernel:f", "x", (), Requires(**fields))


def test_a_module_that_does_not_load_has_a_report(k3port: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_kernels(monkeypatch, loose(tmp_path, monkeypatch, "import no_such_module"))
    fault = "its module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    result = k3port("kernels", "check", "loose.kernel", "--json")
    assert result.code == ExitCode.FAILED
    document = json.loads(result.out)
    assert document["faults"] == [fault] and document["contract"] == [] and document["not_run"] == ["everything"]
    text = k3port("kernels", "check", "loose.kernel").out
    assert text.startswith("## loose.kernel: 1 fault\n") and f"- {fault}\n" in text


def test_a_kernel_that_prints_leaves_one_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (
        "import os, torch\nprint('imported')\n"
        "def f(x, weight, eps):\n    print('{noise'); os.write(1, b'more')\n    return x * 2\n"
    )
    with_kernels(monkeypatch, loose(tmp_path, monkeypatch, source))
    from k3port.cli.main import main

    assert main(["kernels", "check", "loose.kernel", "--dtype", "float32", "--json"]) == ExitCode.NUMERICS
    found = capfd.readouterr()
    assert json.loads(found.out)["kernel"] == "loose.kernel"
    assert "{noise" in found.err and "more" in found.err


def test_equal_faults_are_one_sentence(k3port: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_kernels(monkeypatch, loose(tmp_path, monkeypatch, "def f(x, weight, eps):\n    raise SystemExit('bye')"))
    result = k3port("kernels", "check", "loose.kernel", "--dtype", "float32")
    assert result.code == ExitCode.NUMERICS
    assert re.search(r"^- CPU: loose\.kernel, in \d+ cases, first float32, '.*': SystemExit: .* bye$", result.out, re.M)


TRITON = """
import torch, triton, triton.language as tl
@triton.jit
def kernel(x_ptr):
    tl.store(x_ptr, 0.0)
def f(x, weight, eps):
    kernel[(1,)](x)
    return x
"""


@NEEDS_TRITON
def test_triton_that_the_record_does_not_name(k3port: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with_kernels(monkeypatch, loose(tmp_path, monkeypatch, TRITON, vendors=("nvidia", "amd")))
    result = k3port("kernels", "check", "loose.kernel")
    assert result.code == ExitCode.FAILED
    assert "nothing was run; its module has Triton functions: packages must name triton" in result.err


@NEEDS_TRITON
def test_a_triton_kernel_for_any_vendor_is_interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from k3port.testing.check import _places

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    spec = loose(tmp_path, monkeypatch, TRITON, vendors=(), packages=("triton>=3.3",))
    (place,) = _places(spec, make_registry(entry_points=False))
    assert place.where == "Triton's interpreter"


@NEEDS_TRITON
def test_a_part_that_fails_takes_no_other_along(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("no disk\nleft")

    monkeypatch.setattr("k3port.testing.check._compile", broken)
    asked = ("--isa", "none", "--target", "sm_90", "--dtype", "float32", "--json")
    result = k3port("kernels", "check", "portable.rms_norm", *asked)
    document = json.loads(result.out)
    assert result.code == ExitCode.FAILED and document["contract"][0]["ran"] > 10
    assert document["faults"] == ["compilation: could not be done: RuntimeError: no disk left"]


def test_without_triton(k3port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    result = k3port("kernels", "check", "portable.rms_norm")
    assert (result.code, result.out) == (ExitCode.FAILED, "")
    assert "error: kernel portable.rms_norm is written in Triton, which is not installed" in result.err
    assert "hint: pip install triton" in result.err


def test_a_wrong_name_loads_no_torch() -> None:
    code = (
        "import sys; from k3port.cli.main import main; "
        "code = main(sys.argv[1:]); sys.exit(9 if {'torch', 'numpy', 'triton'} & set(sys.modules) else code)"
    )
    for name in ("portable.rms_nrm", "cuda.flashinfer_rms_norm"):
        done = subprocess.run([sys.executable, "-c", code, "kernels", "check", name], cwd=ROOT, capture_output=True)
        assert done.returncode == ExitCode.USAGE, done.stderr


def test_the_documented_options_are_the_real_ones() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8").split("## k3port kernels check\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows is not None
    cells = [row.split("|")[1] for row in rows[0].splitlines()[2:]]
    documented = {option for cell in cells for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", cell)}
    check = kernels.commands["check"]
    context = click.Context(check, help_option_names=["-h", "--help"])
    real = {name for param in check.get_params(context) if isinstance(param, click.Option) for name in param.opts}
    assert documented == real
