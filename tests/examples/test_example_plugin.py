"""The example plugin: installed from its folder, listed, chosen by a pin, explained, checked, removed without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from plugin_environment import copy_example, new_environment

NAME = "example.rms_norm"
INSTALL = "pip install --quiet --no-deps --no-build-isolation ./k3port-example-kernel"
PLAN = "k3port plan --platform h200 --json --quiet"
PIN = f"--kernel rms_norm={NAME}"


def kernel_of(plan: str, op: str) -> dict[str, Any]:
    (found,) = (s for s in json.loads(plan)["selections"] if s["op"] == op)
    return found


def test_the_whole_walk(tmp_path: Path) -> None:
    here = new_environment(tmp_path)
    copy_example(here)
    files, listed, planned = here.files(), here.ok("k3port kernels list --json"), here.ok(PLAN)
    unknown = here.run(f"k3port kernels check {NAME}")
    assert unknown.returncode == 2 and f"no kernel '{NAME}'" in unknown.stderr
    refused = here.run(f"{PLAN} {PIN}")
    assert refused.returncode != 0 and NAME in refused.stderr

    here.ok(INSTALL)
    records = {record["name"]: record for record in json.loads(here.ok("k3port kernels list --json"))["kernels"]}
    assert records[NAME]["built"] and records[NAME]["op"] == "rms_norm"
    # Installing it changes no choice: it stands below the built-in kernel of its op, and says so.
    unpinned = kernel_of(here.ok(PLAN), "rms_norm")
    assert unpinned["kernel"] == kernel_of(planned, "rms_norm")["kernel"]
    pinned = kernel_of(here.ok(f"{PLAN} {PIN}"), "rms_norm")
    assert (pinned["kernel"], pinned["reason"]) == (NAME, "pinned")
    explained = here.ok("k3port kernels explain rms_norm --platform h200 --quiet")
    assert f"  {NAME}: " in explained and "source: k3port's example plugin" in explained
    refused_cpu = here.run(f"k3port plan --platform cpu {PIN}")
    assert refused_cpu.returncode == 3 and "VENDOR" in refused_cpu.stderr

    report = json.loads(here.ok(f"k3port kernels check {NAME} --isa gfx950 --target none --dtype float32 --json"))
    (emulation,) = report["emulation"]
    assert emulation["arch"] == "gfx950" and emulation["instructions"] > 0
    assert report["ok"] and not emulation["faults"]

    here.ok("pip uninstall --quiet --yes k3port-example-kernel")
    assert here.ok("k3port kernels list --json") == listed
    assert here.ok(PLAN) == planned
    assert here.files() == files
