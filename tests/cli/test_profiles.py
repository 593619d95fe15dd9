"""``--profiles FILE`` and ``K3PORT_PROFILES``: own platforms in every command, and the refusal to run elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3port.oracle.detect import Detection
from k3port.runtime import prepare
from k3port.testing.published import published_k3_config

Run = Callable[..., Any]


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    file = tmp_path / "lab.yaml"
    file.write_text("schema: 2\nplatforms:\n  lab: {extends: mi355x, gpus_per_node: 4}\n  desk: {extends: cpu}\n")
    return file


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(published_k3_config()))
    return file


def test_an_option_adds_platforms(k3port: Run, lab: Path, config: Path, tiny_checkpoint: Path) -> None:
    planned = k3port("plan", "--model", config, "--platform", "lab", "--profiles", lab, "--tp", "4", "--json")
    assert json.loads(planned.out)["platform"] == "lab", planned.err
    listed = k3port("kernels", "list", "--platform", "LAB", "--profiles", lab, "--json")
    assert {k["name"].partition(".")[0] for k in json.loads(listed.out)["kernels"]} >= {"rocm", "portable"}
    explained = k3port("kernels", "explain", "kda", "--model", config, "--platform", "lab", "--profiles", lab, "--json")
    assert json.loads(explained.out)["platform"] == "lab"
    ran = k3port(
        "run", "Hello", "--model", tiny_checkpoint, "--platform", "desk", "--profiles", lab, "-n", "2", "--json"
    )
    assert json.loads(ran.out)["plan"]["platform"] == "desk", ran.err
    looked = k3port("doctor", "--platform", "lab", "--profiles", lab, "--json")
    assert '"lab"' in looked.out


def test_the_environment_adds_platforms(
    k3port: Run, lab: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3PORT_PROFILES", str(lab))
    monkeypatch.setenv("K3PORT_PLATFORM", "desk")
    done = k3port("run", "--model", tiny_checkpoint, "--dry-run", "--json", "Hello")
    assert json.loads(done.out)["plan"]["platform"] == "desk", done.err


@pytest.mark.parametrize("command", ["plan", "run", "doctor", "kernels"])
def test_a_broken_file_is_one_error_with_its_line(
    k3port: Run, tmp_path: Path, tiny_checkpoint: Path, command: str
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("schema: 2\nplatforms:\n  lab: {extend: mi355x}\n")
    more = {"kernels": ["list"], "run": ["Hello", "--model", tiny_checkpoint]}.get(command, [])
    done = k3port(command, *more, "--platform", "lab", "--profiles", file)
    assert done.code == 2
    assert f"{file}:3: lab: unknown key extend; did you mean extends?" in done.err
    assert done.err.count("error:") == 1 and done.out == ""


def test_b16_a_run_on_a_platform_that_is_not_here_is_refused(
    k3port: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "detect_here", lambda registry: Detection())
    for more in ((), ("--dry-run",)):
        done = k3port("run", "Hello", "--model", tiny_checkpoint, "--platform", "mi355", *more)
        assert done.code == 3, done.err
        assert "error: this machine is not mi355x" in done.err and "found: no GPU" in done.err
        assert "k3port plan --platform mi355x" in done.err


def test_an_excluded_kernel_is_left_out_and_a_pinned_one_is_an_error(
    k3port: Run, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("K3PORT_DISABLE", "cpu.linear")
    dry_run = ("run", "Hello", "--model", tiny_checkpoint, "--dry-run", "--json")
    plan = json.loads(k3port(*dry_run).out)["plan"]
    linear = next(s for s in plan["selections"] if s["op"] == "linear")
    assert linear["kernel"] != "cpu.linear"
    reasons = {r["kernel"]: (r["code"], r["detail"]) for r in linear["rejected"]}
    assert reasons["cpu.linear"] == ("DISABLED", "K3PORT_DISABLE=cpu.linear")
    done = k3port(*dry_run[:-1], "--kernel", "linear=cpu.linear")
    assert done.code == 2 and "--kernel" in done.err and "K3PORT_DISABLE" in done.err
