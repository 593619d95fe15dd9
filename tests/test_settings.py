"""The environment: read once, typed, with faults that name the variable and what was expected."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from k3port import settings
from k3port.errors import UsageError
from k3port.settings import VARIABLES, Settings, merge_pins, read_settings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_settings({}) == Settings()
    assert read_settings({"K3PORT_THREADS": " ", "PATH": "x"}) == Settings()


def test_every_variable_is_read() -> None:
    environ = {
        "K3PORT_KERNELS": "kda@decode=reference.kda, linear = cpu.linear,",
        "K3PORT_THREADS": "3",
        "K3PORT_PLATFORM": "cpu",
        "NO_COLOR": "1",
    }
    pins = {"kda@decode": "reference.kda", "linear": "cpu.linear"}
    assert read_settings(environ) == Settings(kernels=pins, threads=3, platform="cpu", plain=True)


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
    assert found == (
        "unknown environment variable K3PORT_KERNEL is ignored; did you mean K3PORT_KERNELS?",
        "unknown environment variable K3PORT_ZZZ is ignored; known: K3PORT_KERNELS, K3PORT_THREADS, K3PORT_PLATFORM",
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


def test_every_variable_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "cli.md").read_text(encoding="utf-8")
    for variable in VARIABLES:
        assert variable.field in {field.name for field in dataclasses.fields(Settings)}
        assert f"`{variable.name}`" in text
