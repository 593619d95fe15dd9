"""Types of option values: texts that are not empty, and whole numbers with limits that nothing behind them exceeds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from k3port.errors import UsageError
from k3port.settings import parse_pin

MAX_CONTEXT = 2**31 - 1
MAX_COUNT = 10**6
"""Of devices, requests and the like."""
MAX_DRAFTS = 1024
MAX_TOKENS = 10**9
MAX_SEED = 2**63 - 1


class Text(click.ParamType):
    """A text of at least one character."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            name = max(param.opts, key=len) if param is not None else "the value"
            raise UsageError(f"{name} is empty", hint="give a value, or leave the option out")
        return value


class ReadableText(Text):
    """A text that can name a file to read, and no device: reading one can go on for ever."""

    def __init__(self, *, empty: bool = False) -> None:
        self.empty = empty
        """Whether an empty value is left to the command, which knows more to say about it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.empty and value == "":
            return value
        text = super().convert(value, param, ctx)
        if text not in (None, os.devnull) and (Path(text).is_char_device() or Path(text).is_block_device()):
            name = max(param.opts, key=len) if param is not None else "the value"
            raise UsageError(f"{name} {text} is a device", hint="give a file or a folder")
        return text


class ReadablePath(ReadableText):
    """The same as a path."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(super().convert(value, param, ctx))


class FilePath(Text):
    """A path of at least one character."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return Path(super().convert(value, param, ctx))


TEXT = Text()
INPUT = ReadableText()
MODEL = ReadableText(empty=True)
INPUT_FILE = ReadablePath()
OUTPUT_FILE = FilePath()
CONTEXT = click.IntRange(1, MAX_CONTEXT)
COUNT = click.IntRange(1, MAX_COUNT)
ALLOW_REFERENCE = click.option(
    "--allow-reference", is_flag=True, help="On a GPU, run slow references where no kernel is built."
)


def parse_pins(options: tuple[str, ...]) -> dict[str, str]:
    """The values of ``--kernel``.

    Raises:
        UsageError: one that is no pin, or two that contradict each other.
    """
    pins: dict[str, str] = {}
    for text in options:
        try:
            target, kernel = parse_pin(text)
        except ValueError:
            raise UsageError(f"--kernel {text}: expected op[@phase]=kernel", hint="such as linear=cpu.linear") from None
        if pins.setdefault(target, kernel) != kernel:
            both = f"{pins[target]} and {kernel}"
            raise UsageError(f"--kernel: {target} is pinned to both {both}", hint="give one of them")
    return pins
