"""What is kept of a compilation: the compiler's own words, and only what another run would find again."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so nothing can be compiled")

import torch
import triton
import xcompile_kernels as toys

from k3port.oracle.spec import KernelSpec
from k3port.testing.launches import Launch, record
from k3port.testing.xcompile import cache, compile_kernel, compiler, compute_units, measure
from k3port.testing.xcompile.cache import cache_key, source_hash
from k3port.testing.xcompile.compiler import compile_launch

SPEC = KernelSpec("toy.copy", "rms_norm", "xcompile_kernels:copy", "planted")


@pytest.fixture
def launch() -> Launch:
    with record("sm_90") as recording:
        toys.copy(torch.empty(300, 7168, dtype=torch.bfloat16), torch.empty(7168), 1e-5)
    return recording.launches[0]


def fails_with(monkeypatch: pytest.MonkeyPatch, error: Exception, cause: Exception | None = None) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error from cause

    monkeypatch.setattr(triton, "compile", fail)


FULL = OSError(28, "No space left on device")
KILLED, REFUSED = (CalledProcessError(status, ["ptxas"]) for status in (-9, 255))


@pytest.mark.parametrize(
    ("error", "cause", "lasting"),
    [
        (FULL, None, False),
        (MemoryError("bad_alloc"), None, False),
        (RuntimeError("no code"), FULL, False),
        (RuntimeError("`ptxas` failed with error code -9"), KILLED, False),
        (RuntimeError("Internal Triton PTX codegen error"), REFUSED, True),
        (RuntimeError("PassManager::run failed"), None, True),
        (KeyError("maxnreg"), None, True),
    ],
)
def test_an_error_of_the_machine_is_a_fault_once_and_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, cause: Exception | None, lasting: bool
) -> None:
    with monkeypatch.context() as patched:
        fails_with(patched, error, cause)
        (fault,) = compile_kernel(SPEC, targets=("sm_90",), jobs=1, cache_dir=tmp_path).faults
    assert type(error).__name__ in fault
    assert bool(list(tmp_path.rglob("*.json"))) == lasting
    assert bool(compile_kernel(SPEC, targets=("sm_90",), jobs=1, cache_dir=tmp_path).faults) == lasting


def test_warnings_on_stderr_are_kept_and_other_lines_are_not(monkeypatch: pytest.MonkeyPatch, launch: Launch) -> None:
    compile_really = triton.compile

    def talkative(*args: Any, **options: Any) -> Any:
        os.write(2, b"kernel.py:3:7: warning: a planted one\nremark: nothing\n")
        return compile_really(*args, **options)

    monkeypatch.setattr(triton, "compile", talkative)
    assert compile_launch(launch).warnings == ("kernel.py:3:7: warning: a planted one",)


def test_the_key_depends_on_triton_on_what_is_kept_and_on_the_type_of_a_constant(
    monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    (path,) = (path for path, value in launch.constants.items() if value == 1024)
    one, true = (replace(launch, constants={**launch.constants, path: value}) for value in (1, True))
    keys = {cache_key(launch), cache_key(one), cache_key(true)}
    for owner, name in ((triton, "__version__"), (cache, "RECORD_VERSION")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, "another")
            keys.add(cache_key(launch))
    assert len(keys) == 5
    assert cache_key(launch) in keys


def test_what_is_kept_is_known_by_the_source_that_measures_it(tmp_path: Path) -> None:
    assert source_hash(compiler, measure, compute_units) == cache.RECORD_VERSION
    module = ModuleType("measuring")
    module.__file__ = str(tmp_path / "measuring.py")
    seen = set()
    for text in ("a = 1", "a = 2"):
        Path(module.__file__).write_text(text)
        seen.add(source_hash(sys.modules[__name__], module))
    assert len(seen) == 2
