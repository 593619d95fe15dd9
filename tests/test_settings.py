"""The environment: read once, typed, with faults that name the variable and what was expected."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from k3port import settings
from k3port.errors import ExitCode, UsageError
from k3port.settings import (
    VARIABLES,
    Activations,
    Settings,
    contradictions,
    export_owned,
    merge_pins,
    owned_environment,
    read_settings,
)
from k3port.testing import settings_doc


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"K3PORT_THREADS": " ", "PATH": "x"}) == Settings()


def test_every_variable_is_read() -> None:
    environ = {
        "K3PORT_KERNELS": "kda@decode=reference.kda, linear = cpu.linear,",
        "K3PORT_DISABLE": "rocm.aiter_*, cpu.sample_batched,rocm.aiter_*",
        "K3PORT_ACTIVATIONS": "MXFP8",
        "K3PORT_PLATFORM": "cpu",
        "K3PORT_PROFILES": f"/a.yaml{os.pathsep}b.yaml{os.pathsep}",
        "K3PORT_PACKAGES": "host",
        "K3PORT_THREADS": "3",
        "NO_COLOR": "1",
    }
    assert {name for name in environ if name.startswith("K3PORT_")} == {variable.name for variable in VARIABLES}
    assert read_settings(environ) == Settings(
        kernels={"kda@decode": "reference.kda", "linear": "cpu.linear"},
        disable=("rocm.aiter_*", "cpu.sample_batched"),
        activations="mxfp8",
        platform="cpu",
        profiles=(Path("/a.yaml"), Path("b.yaml")),
        packages="host",
        threads=3,
        plain=True,
    )


@pytest.mark.parametrize("value", ["two", "0", "-1", "1.5", "1025"])
def test_a_bad_number_names_variable_value_and_expectation(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({"K3PORT_THREADS": value})
    assert caught.value.message == f"cannot read the environment variable K3PORT_THREADS = {value!r}"
    assert caught.value.hint == "expected a whole number from 1 to 1024"


@pytest.mark.parametrize("value", ["kda", "=cpu.linear", "linear=", "a=b=c", "linear=cpu.linear;kda=reference.kda"])
def test_bad_pins(value: str) -> None:
    with pytest.raises(UsageError, match="K3PORT_KERNELS"):
        read_settings({"K3PORT_KERNELS": value})


def test_all_faults_are_named_together() -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({"K3PORT_THREADS": "x", "K3PORT_KERNELS": "y"})
    assert len(caught.value.reasons) == 2


def test_unknown_names_are_warnings() -> None:
    found = read_settings({"K3PORT_KERNEL": "a=b", "K3PORT_ZZZ": "1", "K3_PORT_THREADS": "1"}).warnings
    known = ", ".join(variable.name for variable in VARIABLES)
    assert found == (
        "unknown environment variable K3PORT_KERNEL is ignored; did you mean K3PORT_KERNELS?",
        f"unknown environment variable K3PORT_ZZZ is ignored; known: {known}",
    )


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("K3PORT_THREADS", "2")
    first = settings.get_settings()
    monkeypatch.setenv("K3PORT_THREADS", "4")
    assert settings.get_settings() is first
    assert (first.threads, settings.reload().threads) == (2, 4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.threads = 1  # type: ignore[misc]


def test_pins_of_one_op_are_replaced_together() -> None:
    lower = {"kda@decode": "a", "linear": "b"}
    assert merge_pins(lower, {"kda": "c"}) == {"kda": "c", "linear": "b"}
    assert merge_pins(lower, {"kda@prefill": "c"}) == {"kda@prefill": "c", "linear": "b"}


@pytest.mark.parametrize("value", ["linear=cpu.linear", "linear", ",*", "*"])
def test_bad_exclusions(value: str) -> None:
    with pytest.raises(UsageError, match="K3PORT_DISABLE"):
        read_settings({"K3PORT_DISABLE": value})


@pytest.mark.parametrize("value", ["a8w4", "fp8", "mxfp8,mxfp4"])
def test_bad_activations_name_the_modes(value: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({"K3PORT_ACTIVATIONS": value})
    assert "mxfp8 (a8w4)" in caught.value.hint


@pytest.mark.parametrize("value", ["auto", "Auto", ""])
def test_auto_leaves_activations_to_the_platform(value: str) -> None:
    assert read_settings({"K3PORT_ACTIVATIONS": value}).activations is None


def test_contradicting_pins_are_an_error() -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({"K3PORT_KERNELS": "kda=a.x,linear=a.y,kda=a.z"})
    assert caught.value.hint == "kda is pinned to both a.x and a.z"
    assert read_settings({"K3PORT_KERNELS": "kda=a.x,kda@decode=a.z,kda=a.x"}).kernels == {
        "kda": "a.x",
        "kda@decode": "a.z",
    }


def test_b05_a_kernel_both_pinned_and_excluded_names_both_variables() -> None:
    pinned = {"K3PORT_KERNELS": "mla_attend=rocm.aiter_mla_asm"}
    with pytest.raises(UsageError) as caught:
        read_settings({**pinned, "K3PORT_DISABLE": "rocm.aiter_mla_asm"})
    assert "K3PORT_KERNELS" in caught.value.message and "K3PORT_DISABLE" in caught.value.message
    assert caught.value.reasons == ("mla_attend=rocm.aiter_mla_asm",)
    assert read_settings({**pinned, "K3PORT_DISABLE": "rocm.aiter_*"}).disable == ("rocm.aiter_*",)


def test_b05_a_switch_of_another_program_does_not_touch_a_pin() -> None:
    found = read_settings({"K3PORT_USE_AITER": "0", "K3PORT_KERNELS": "mla_attend=rocm.aiter_mla_asm"})
    assert found.kernels == {"mla_attend": "rocm.aiter_mla_asm"}
    (warning,) = found.warnings
    assert "K3PORT_USE_AITER is ignored; did you mean K3PORT_KERNELS or K3PORT_DISABLE?" in warning


# --- names of others


def kinds(environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    rows = read_settings(environ).rows[len(VARIABLES) :]
    return {row.name: (row.kind, row.effect) for row in rows}


def test_b04_a_typo_is_answered_with_the_setting_that_is_meant() -> None:
    (warning,) = read_settings({"K3PORT_ATTENTION_BACKND": "triton"}).warnings
    assert warning == ("unknown environment variable K3PORT_ATTENTION_BACKND is ignored; did you mean K3PORT_KERNELS?")


def test_b04_a_retired_name_says_what_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "RETIRED", {"K3PORT_THREAD_COUNT": "K3PORT_THREADS"})
    found = read_settings({"K3PORT_THREAD_COUNT": "4"})
    assert found.threads is None
    assert found.warnings == ("environment variable K3PORT_THREAD_COUNT was retired; use K3PORT_THREADS",)
    assert kinds({"K3PORT_THREAD_COUNT": "4"})["K3PORT_THREAD_COUNT"][0] == "retired"
    assert "| `K3PORT_THREAD_COUNT` | K3PORT_THREADS |" not in settings_doc.settings_markdown()


def test_b04_retired_names_are_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_doc, "RETIRED", {"K3PORT_THREAD_COUNT": "K3PORT_THREADS"})
    assert "| `K3PORT_THREAD_COUNT` | K3PORT_THREADS |" in settings_doc.settings_markdown()


def test_retired_names_are_not_in_use() -> None:
    assert not set(settings.RETIRED) & {variable.name for variable in VARIABLES}


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("VLLM_ATTENTION_BACKEND", "mla_attend=KERNEL"),
        ("VLLM_ROCM_USE_AITER", "K3PORT_DISABLE"),
        ("VLLM_ROCM_USE_AITER_MLA", "K3PORT_KERNELS"),
        ("VLLM_ROCM_USE_AITER_MOE_SITUV2", "K3PORT_ACTIVATIONS"),
        ("VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", "K3PORT_ACTIVATIONS"),
        ("VLLM_ALLREDUCE_USE_FLASHINFER", "all_reduce=KERNEL"),
        ("SGLANG_USE_AITER", "K3PORT_KERNELS"),
        ("SGLANG_AITER_K3_OPT", "K3PORT_KERNELS"),
    ],
)
def test_b04_switches_of_other_programs_are_reported_as_not_read(name: str, instead: str) -> None:
    environ = {name: "1"}
    kind, effect = kinds(environ)[name]
    assert kind == "not read"
    assert effect.startswith("not read by k3port; use ") and instead in effect
    # They belong to other programs and may be right there, so a run does not warn.
    assert read_settings(environ) == Settings()


def test_names_that_choose_nothing_are_left_alone() -> None:
    assert kinds({"VLLM_CACHE_ROOT": "/x", "PATH": "/bin", "AITER_LOG": "1", "HIP_VISIBLE_DEVICES": "0"}) == {}


# --- variables that k3port owns


@pytest.mark.parametrize(("mode", "values"), [("bf16", "00"), ("mxfp8", "10"), ("mxfp4", "01")])
def test_b01_one_setting_drives_all_switches_of_the_library(mode: Activations, values: str) -> None:
    environ = {"PATH": "/bin"}
    export_owned(environ, mode)
    expected = {
        "AITER_SITUV2_A8W4": values[0],
        "AITER_SITUV2_A4W4": values[1],
        "AITER_BF16_FP8_MOE_BOUND": "0",
    }
    assert environ == {"PATH": "/bin", **expected} == {"PATH": "/bin", **owned_environment(mode)}
    assert contradictions(environ, mode) == []
    export_owned(environ, mode)


@pytest.mark.parametrize(
    ("mode", "name", "value"),
    [
        ("bf16", "AITER_SITUV2_A8W4", "1"),
        ("mxfp8", "AITER_SITUV2_A8W4", "0"),
        ("mxfp8", "AITER_SITUV2_A4W4", "1"),
        ("mxfp4", "AITER_BF16_FP8_MOE_BOUND", "256"),
        ("bf16", "AITER_SITUV2_A2W4", "1"),
    ],
)
def test_b01_a_contradicting_switch_names_both_settings(mode: Activations, name: str, value: str) -> None:
    environ = {name: value}
    with pytest.raises(UsageError) as exported:
        export_owned(environ, mode)
    assert environ == {name: value}
    with pytest.raises(UsageError) as read:
        read_settings({name: value, "K3PORT_ACTIVATIONS": mode})
    for error in (exported.value, read.value):
        assert f"K3PORT_ACTIVATIONS = {mode}" in error.message
        assert error.reasons[0].startswith(f"{name} = {value}: ")
        assert error.exit_code == ExitCode.USAGE


def test_b01_only_the_switch_of_the_library_is_reported_with_the_setting_to_use() -> None:
    found = read_settings({"AITER_SITUV2_A8W4": "1"})
    assert found.activations is None
    assert found.warnings == (
        "environment variable AITER_SITUV2_A8W4 belongs to k3port: unset it and use K3PORT_ACTIVATIONS=mxfp8",
    )
    assert kinds({"AITER_SITUV2_A8W4": "1"})["AITER_SITUV2_A8W4"][0] == "owned"


def test_agreeing_and_empty_switches_are_fine() -> None:
    environ = {"AITER_SITUV2_A8W4": " 1 ", "AITER_SITUV2_A4W4": "", "K3PORT_ACTIVATIONS": "mxfp8"}
    assert read_settings(environ).warnings == ()


def test_reading_changes_no_environment() -> None:
    environ = {"K3PORT_ACTIVATIONS": "mxfp4"}
    read_settings(environ)
    assert environ == {"K3PORT_ACTIVATIONS": "mxfp4"}


# --- report, digest, documentation


def test_the_report_has_a_row_per_variable_with_value_source_and_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("K3PORT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("K3PORT_THREADS", "2")
    rows = settings.settings_report()
    assert [row.name for row in rows[: len(VARIABLES)]] == [variable.name for variable in VARIABLES]
    threads, platform = (next(row for row in rows if row.name == f"K3PORT_{n}") for n in ("THREADS", "PLATFORM"))
    assert (threads.value, threads.source, threads.kind) == ("2", "environment", "set")
    assert (platform.value, platform.source, platform.kind) == ("", "default", "default")
    assert platform.effect.startswith("cpu; a run takes this machine's GPU where")
    assert all(row.effect for row in rows)


def test_the_digest_changes_with_what_changes_a_plan() -> None:
    base = read_settings({})
    assert re.fullmatch(r"[0-9a-f]{16}", base.digest())
    assert read_settings({"NO_COLOR": "1", "K3PORT_ODD": "1", "VLLM_USE_X": "1"}).digest() == base.digest()
    examples = {
        "K3PORT_KERNELS": "linear=cpu.linear",
        "K3PORT_DISABLE": "cpu.linear",
        "K3PORT_ACTIVATIONS": "mxfp8",
        "K3PORT_PLATFORM": "h200",
        "K3PORT_PROFILES": "x.yaml",
        "K3PORT_PACKAGES": "host",
        "K3PORT_THREADS": "3",
    }
    assert set(examples) == {variable.name for variable in VARIABLES}
    digests = {read_settings({name: value}).digest() for name, value in examples.items()}
    assert len(digests | {base.digest()}) == len(examples) + 1


def test_masks_are_read_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    assert settings.get_environment(["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]) == {"CUDA_VISIBLE_DEVICES": ""}


def test_every_variable_fills_a_field() -> None:
    fields = {field.name for field in dataclasses.fields(Settings)}
    assert {variable.field for variable in VARIABLES} <= fields
    assert len({variable.field for variable in VARIABLES}) == len(VARIABLES)


def test_the_documentation_is_current() -> None:
    """``python -m k3port.testing.settings_doc`` writes it."""
    text = settings_doc.FILE.read_text(encoding="utf-8")
    assert text == settings_doc.settings_markdown()
    for variable in VARIABLES:
        assert f"| `{variable.name}` |" in text and variable.doc in text


def test_one_command_writes_the_documentation(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from k3port.testing import settings_doc; "
        "settings_doc.FILE = pathlib.Path(sys.argv[1]) / 'docs' / 'settings.md'; settings_doc.main()"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docs" / "settings.md").read_text(encoding="utf-8") == settings_doc.settings_markdown()
