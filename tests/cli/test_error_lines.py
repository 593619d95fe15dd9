"""An error is a few lines, each with one thing in it, whatever an exception of other people's code brought with it."""

from __future__ import annotations

import json

import pytest

from k3port.cli.console import Console, error_record
from k3port.errors import K3Error

FAULT = K3Error(
    "kernel failed:\n  see below",
    reasons=["RuntimeError: first line\nsecond\r\n\n   third\u2028fourth", "    indented", "a  b.json"],
    hint="do\nthis",
)


def test_a_message_a_reason_and_a_hint_are_one_line_each() -> None:
    assert FAULT.render().split("\n") == [
        "error: kernel failed: see below",
        "  - RuntimeError: first line second third fourth",
        "  - indented",
        "  - a  b.json",  # the name of a file keeps its spaces
        "hint: do this",
    ]
    assert str(FAULT) == FAULT.render()


def test_json_keeps_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    Console(json_mode=True).error(FAULT)
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 5
    assert json.loads(out)["error"] == error_record(FAULT)
    assert error_record(FAULT)["message"] == "kernel failed:\n  see below"
    assert error_record(FAULT)["reasons"] == list(FAULT.reasons)
