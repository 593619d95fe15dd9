"""Runs the command in this process or in its own, with a clean environment."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from doctor_runs import CPU_TORCH, Machine
from fake_machines import amd_probe, no_nvidia_probe
from tiny_text import write_tiny_text_checkpoint

from k3port import plugins, settings
from k3port.cli import doctor_facts
from k3port.cli.main import main
from k3port.oracle import detect
from k3port.oracle.detect import TorchBuild
from k3port.oracle.sources import Probe
from k3port.oracle.visibility import VARIABLES


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


class Terminal(io.TextIOWrapper):
    """An empty stdin that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K3PORT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "_current", None)


@pytest.fixture
def k3port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``k3port(*args, stdin=...)`` in this process; without ``stdin`` it is a terminal."""

    def run(*args: object, stdin: bytes | None = None) -> Result:
        stream = Terminal(io.BytesIO()) if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", stream)
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def spawn(*args: object, **options: object) -> subprocess.Popen[bytes]:
    """``python -m k3port`` as a process of its own with pipes on stdout and stderr."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "k3port", *map(str, args)], **pipes)  # type: ignore[call-overload]


@pytest.fixture(name="spawn")
def spawn_fixture() -> Callable[..., subprocess.Popen[bytes]]:
    return spawn


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete small checkpoint with a tokenizer. Tests must not change it."""
    return write_tiny_text_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Makes doctor look at a machine of these probes, PyTorch and packages."""

    def install(*probes: Probe, torch: TorchBuild = CPU_TORCH, packages: dict[str, str] | None = None) -> None:
        registry = plugins.make_registry(entry_points=False)
        registry = dataclasses.replace(registry, probes=probes or (no_nvidia_probe(), amd_probe()))
        monkeypatch.setattr(doctor_facts, "default_registry", lambda: registry)
        monkeypatch.setattr(
            doctor_facts,
            "detect_here",
            lambda reg: detect.detect(
                tmp_path, environ=settings.get_environment(VARIABLES), probes=reg.probes, torch=torch
            ),
        )
        monkeypatch.setattr(doctor_facts, "ROOT", tmp_path)
        every = {name: "9.9" for name in doctor_facts.REQUIRED} | (packages or {})
        monkeypatch.setattr(doctor_facts, "host_versions", lambda names: {n: every[n] for n in names if n in every})

    return install
