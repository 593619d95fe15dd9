"""``k3port doctor``: what it says of machines that are whole, broken, or not here."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from doctor_runs import CUDA_TORCH, EIGHT, ROOT, Machine, gpu, results, texts
from fake_machines import amd_probe, nvidia_probe, write_kfd

from k3port import settings
from k3port.cli import doctor_facts
from k3port.cli.doctor import ALL_CHECKS, doctor
from k3port.oracle import builtin_checks, checks, detect
from k3port.oracle.checks import CATEGORIES, DoctorCheck, Facts, Result, run_checks
from k3port.oracle.detect import TorchBuild
from k3port.oracle.profile import load_profiles
from k3port.oracle.spec import GAP, Device, KernelSpec, MemoryItem, MemoryPlan, Plan, Selection
from k3port.oracle.visibility import VARIABLES


@pytest.fixture(autouse=True)
def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


# The command itself.


def test_b16_a_bare_machine_is_fine(k3port: Any, machine: Machine) -> None:
    machine()
    result = k3port("doctor")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert re.match(r"k3port \d\S* doctor$", lines[0])
    assert [line.split()[:2] for line in lines[1:-1]] == [["[ok]", name] for name in CATEGORIES if name != "model"]
    assert lines[-1] == "nothing is wrong"
    assert "no GPU, runs go to the CPU" in result.out
    verbose = k3port("doctor", "-v").out
    assert "no /dev/kfd" in verbose
    assert "libnvidia-ml.so.1 cannot be loaded" in verbose
    assert "profiles.platform: cpu (cpu), no GPU is visible" in verbose


def test_it_is_quick_and_loads_no_torch() -> None:
    code = (
        "import sys; from k3port.cli.main import main; code = main(['doctor'])\n"
        "bad = {'torch', 'numpy', 'triton', 'aiter', 'flashinfer', 'amdsmi'} & set(sys.modules); assert not bad, bad\n"
        "raise SystemExit(code)"
    )
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        times.append(time.perf_counter() - begin)
        assert done.returncode == 0, done.stdout + done.stderr
    assert min(times) < 3


def test_json_is_one_document(k3port: Any, machine: Machine, tmp_path: Path) -> None:
    write_kfd(tmp_path, 90402, memory=192 * 10**9)
    machine(amd_probe(), torch=TorchBuild("2.14.0", hip="7.1"))
    result = k3port("doctor", "--json", "--settings")
    document = json.loads(result.out)
    assert result.err == ""
    assert (document["platform"], document["here"]) == ("mi300x", True)
    assert {tuple(sorted(item)) for item in document["checks"]} == {("category", "id", "remedy", "status", "text")}
    (gpu,) = document["detection"]["gpus"]
    assert (gpu["arch"], gpu["uuid"], gpu["sources"]) == ("gfx942", "GPU-000000000000abc1", ["kfd"])
    assert document["detection"]["visible"] == {"amd": ["GPU-000000000000abc1"]}
    assert "K3PORT_THREADS" in [row["name"] for row in document["settings"]]
    bad = k3port("doctor", "--json", "--platform", "mi35x")
    assert (bad.code, json.loads(bad.out)["error"]["kind"]) == (2, "UsageError")


def test_warnings_fail_only_where_asked(k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHMLA")
    relaxed = k3port("doctor")
    assert (relaxed.code, relaxed.out.splitlines()[-1]) == (0, "1 warning")
    strict = k3port("doctor", "--strict")
    assert strict.code == 1
    assert strict.out == relaxed.out or strict.out.splitlines()[-1] == "1 warning"
    assert json.loads(k3port("doctor", "--strict", "--json").out)["ok"] is False


def test_usage(k3port: Any) -> None:
    for args in (["--tp", "0"], ["--no-such"], ["extra"], ["--platform", "nonsense"]):
        assert k3port("doctor", *args).code == 2


def test_a_remedy_stands_below_each_fault(k3port: Any, machine: Machine) -> None:
    machine(nvidia_probe(*EIGHT, code=802), torch=CUDA_TORCH, packages={"triton": "3.7"})
    out = k3port("doctor").out
    assert re.search(r"\[FAIL\] devices .*\n +x devices.usable: 8 NVIDIA .* 802.*\n +try: sudo systemctl restart", out)


# Check ids.


def test_check_ids_are_unique_and_documented() -> None:
    ids = [check.id for check in ALL_CHECKS]
    assert len(ids) == len(set(ids))
    assert all(check.id.startswith(f"{check.category}.") and check.category in CATEGORIES for check in ALL_CHECKS)
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `([a-z]+\.[a-z-]+)` \| (.*) \|$", text, re.MULTILINE)
    assert sorted(documented) == sorted((check.id, check.doc) for check in ALL_CHECKS)


def test_every_finding_of_detection_belongs_to_a_check() -> None:
    ids = {check.id for check in ALL_CHECKS}
    for file in (*(ROOT / "k3port/oracle").glob("*.py"), *(ROOT / "k3port/backends").glob("*/device.py")):
        named = set(re.findall(r'Finding\(\s*"([^"]+)"', file.read_text(encoding="utf-8")))
        assert named <= ids, file


def test_options_are_documented() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`-.*?) \|", text, re.MULTILINE)
    documented = {option for row in rows for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", row)}
    context = click.Context(doctor, help_option_names=["-h", "--help"])
    assert documented == {option for param in doctor.get_params(context) for option in param.opts}


def test_a_check_that_raises_is_a_warning() -> None:
    def broken(facts: Facts) -> list[Result]:
        raise ZeroDivisionError("oops")

    mine = [
        DoctorCheck("mine.broken", "mine", "", broken),
        DoctorCheck("mine.wrong", "mine", "", lambda facts: ["text"]),
        DoctorCheck("system.mine", "system", "", lambda facts: [Result("ok", "fine")]),
    ]
    found = run_checks(mine, Facts("1"))
    assert [(item.id, item.result.status) for item in found] == [
        ("system.mine", "ok"), ("mine.broken", "warning"), ("mine.wrong", "warning"),
    ]  # fmt: skip
    assert found[1].result.text == "the check mine.broken failed itself: ZeroDivisionError: oops"


# Settings.


def test_b04_names_that_only_look_like_settings(k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv("K3PORT_THREAD", "2")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "X")
    found = results(k3port)
    assert "K3PORT_THREAD=2 is ignored; did you mean K3PORT_THREADS?" in texts(found, "settings.names", "warning")
    assert "VLLM_ATTENTION_BACKEND=X not read by k3port" in texts(found, "settings.foreign", "warning")


def test_settings_that_cannot_be_read_are_a_failure_not_the_end(
    k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setenv("K3PORT_THREADS", "two")
    found = results(k3port, code=1)
    assert "K3PORT_THREADS = 'two'" in texts(found, "settings.values", "fail")
    assert texts(found, "devices.found", "ok")


def test_the_table_of_settings(k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setenv("K3PORT_THREADS", "2")
    out = k3port("doctor", "--settings").out
    assert re.search(r"^setting +value +source +effect$", out, re.MULTILINE)
    assert re.search(r"^K3PORT_THREADS +2 +environment +\S", out, re.MULTILINE)
    assert re.search(r"^K3PORT_PLATFORM +- +default +\S", out, re.MULTILINE)
    assert "K3PORT_PLATFORM" not in k3port("doctor").out


def test_a_platform_of_the_environment_that_does_not_exist(
    k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setenv("K3PORT_PLATFORM", "mi35x")
    found = results(k3port, code=1)
    assert "K3PORT_PLATFORM: unknown platform 'mi35x'; did you mean mi355x?" in texts(
        found, "profiles.platform", "fail"
    )
    assert texts(found, "profiles.file", "ok")


def test_platform_files_that_cannot_be_read(
    k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine()
    file = tmp_path / "mine.yaml"
    file.write_text("schema: [")
    given = k3port("doctor", "--profiles", file)
    assert (given.code, given.out) == (2, "")
    monkeypatch.setenv("K3PORT_PROFILES", str(file))
    monkeypatch.setattr(settings, "_current", None)
    found = results(k3port, code=1)
    assert f"{file} is not valid YAML" in texts(found, "profiles.file", "fail")
    assert texts(found, "devices.found", "ok")


# The system.


def test_b106_which_transport_would_be_used(k3port: Any, machine: Machine, tmp_path: Path) -> None:
    machine()
    assert "TCP sockets" in texts(results(k3port), "system.rdma", "ok")
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "1 RDMA device(s), and /dev/infiniband cannot be opened" in texts(results(k3port), "system.rdma", "warning")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    assert "collectives between machines use them" in texts(results(k3port), "system.rdma", "ok")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("0.0.0.0", "no address that another machine can reach"),
        ("::", "no address"),
        ("169.254.3.4", "link-local"),
        ("fe80::1", "link-local"),
        ("10.0.0.4", ""),
        ("", ""),
    ],
)
def test_b106_addresses_that_nobody_reaches(
    k3port: Any, machine: Machine, monkeypatch: pytest.MonkeyPatch, address: str, said: str
) -> None:
    machine()
    monkeypatch.setenv("MASTER_ADDR", address)
    found = results(k3port, code=1 if said else 0)
    assert said in texts(found, "system.address", "fail")
    assert bool(said) == ("system.address" in found)


def test_small_shared_memory_matters_with_gpus() -> None:
    system = checks.SystemFacts(shared_memory_bytes=64 << 20)
    assert list(builtin_checks._shared_memory(Facts("1", system=system))) == []
    with_gpu = Facts("1", system=system, detection=detect.Detection(gpus=(gpu("x", "gfx942"),)))
    assert [result.status for result in builtin_checks._shared_memory(with_gpu)] == ["warning"]


# Kernels and models.


def test_a_model_is_described_without_reading_weights(k3port: Any, machine: Machine, tiny_checkpoint: Path) -> None:
    machine()
    found = results(k3port, "--model", tiny_checkpoint)
    assert re.match(
        r"kimi-k3, \d+ layers: \d+ KDA, \d+ MLA; \d+ of them with \d+ experts", texts(found, "model.layers")
    )
    assert "weight file(s) complete" in texts(found, "model.checkpoint", "ok")
    assert re.match(r"text ends at \[\d.*\(.*(tokenizer|config.json) \[", texts(found, "model.stop-ids", "ok"))
    assert "runs now on cpu, TP1: " in texts(found, "kernels.plan", "ok")
    out = k3port("doctor", "--model", tiny_checkpoint).out
    assert "- model.layers: kimi-k3" in out
    assert "- kernels.plan: would run on cpu, TP1" in out


def test_a_model_for_a_platform_that_is_not_here(k3port: Any, machine: Machine, tiny_checkpoint: Path) -> None:
    machine()
    found = results(k3port, "--model", tiny_checkpoint / "config.json", "--platform", "b300")
    assert "would run on b300" in texts(found, "kernels.plan", "ok")
    assert texts(found, "model.checkpoint") == "config.json alone: no weight files to check"
    assert "devices.group" not in found


def test_a_damaged_checkpoint(k3port: Any, machine: Machine, tiny_checkpoint: Path, tmp_path: Path) -> None:
    machine()
    copy = Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))
    next(copy.glob("*.safetensors")).write_bytes(b"")
    assert "cannot be used" in texts(results(k3port, "--model", copy, code=1), "model.checkpoint", "fail")
    (copy / "config.json").write_text("{")
    assert "is not valid JSON" in texts(results(k3port, "--model", copy, code=1), "model.checkpoint", "fail")
    assert k3port("doctor", "--model", tmp_path / "none").code == 1


def test_a_broken_generation_config_is_a_fault_once(
    k3port: Any, machine: Machine, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    machine()
    for folder, files in ((tmp_path / "whole", "*"), (tmp_path / "bare", "config.json")):
        folder.mkdir()
        for file in tiny_checkpoint.glob(files):
            shutil.copy(file, folder)
        (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
        found = results(k3port, "--model", folder if files == "*" else folder / "config.json", code=1)
        assert texts(found, "model.checkpoint", "fail").count("generation_config.json") == 1


def test_a_model_without_stop_ids(k3port: Any, machine: Machine, tiny_checkpoint: Path, tmp_path: Path) -> None:
    machine()
    values = json.loads((tiny_checkpoint / "config.json").read_text())
    for part in (values, values["text_config"]):
        part.pop("eos_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = results(k3port, "--model", tmp_path / "config.json")
    assert "text ends only at its limit" in texts(found, "model.stop-ids", "warning")


def plan_of(kernel: str, would: str) -> Plan:
    now, later = (Selection("linear", None, name, "because") for name in (kernel, would))
    return Plan("mi300x", Device("amd", "gfx942", "x", "fake"), "bfloat16", 1, (now,), (later,))


def test_references_on_a_gpu_are_a_warning() -> None:
    profile = load_profiles()["mi300x"]
    facts = Facts("1", profile=profile, plan=plan_of("reference.linear", "rocm.linear"))
    (warning,) = [result for result in builtin_checks._plan(facts) if result.status == "warning"]
    assert warning.text == "1 of 1 slots run on reference kernels on mi300x, which are slow: linear"
    for other in (
        dataclasses.replace(facts, here=False),
        dataclasses.replace(facts, profile=load_profiles()["cpu"]),
        dataclasses.replace(facts, plan=plan_of("rocm.linear", "rocm.linear")),
    ):
        assert "warning" not in [result.status for result in builtin_checks._plan(other)]


@pytest.mark.parametrize(("here", "status"), [(True, "fail"), (False, "warning")])
def test_a_slot_without_kernel_fails_only_here(here: bool, status: str) -> None:
    plan = dataclasses.replace(plan_of("a.b", "a.b"), selections=(Selection("kda", "decode", "", GAP),))
    facts = Facts("1", profile=load_profiles()["mi300x"], plan=plan, here=here)
    (gap,) = [result for result in builtin_checks._plan(facts) if "nothing runs yet" in result.text]
    assert (gap.status, gap.remedy) == (status, "k3port kernels explain kda")


def test_a_model_that_does_not_fit() -> None:
    memory = MemoryPlan((MemoryItem("weights", 200 << 30, ""),), 100 << 30, False, 0, 0, "16 GPUs hold it")
    facts = Facts("1", plan=dataclasses.replace(plan_of("a", "a"), memory=memory), model=checks.ModelFacts("x"))
    (result,) = builtin_checks._model_memory(facts)
    assert result.status == "fail"
    assert result.text.endswith("one device offers 100.0 GiB: does not fit. 16 GPUs hold it")


def test_metadata_of_the_installed_packages_is_read() -> None:
    found = doctor_facts.host_versions(["click", "never-there"])
    assert found == {"click": importlib.metadata.version("click")}


def test_a_kernel_that_a_profile_names_and_nobody_has(k3port: Any, machine: Machine) -> None:
    machine()
    spec = KernelSpec(name="x.y", op="linear", load="", doc="")
    facts = Facts("1", kernels=(spec,), profile_faults=("platforms.yaml:3: kernels.linear: no kernel x.z",))
    assert [result.status for result in builtin_checks._profile_kernels(facts)] == ["warning"]
