"""What a command gets from outside: the prompt, and the checkpoint that comes with the package."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path
from typing import BinaryIO

from k3port.errors import CheckpointError, UsageError

EMBEDDED_NAME = "k3-nano"
BUILTIN_PROMPT = "If you want to install the package, you"
_STDIN = "-"
MAX_PROMPT_BYTES = 64 * 2**20
_READABLE = 'give a UTF-8 text file, or put the prompt in quotes: k3port run "…"'
_UTF8 = "convert it, such as with iconv -f LATIN1 -t UTF-8"


def embedded_checkpoint() -> Path:
    """The folder of the checkpoint inside the package.

    Raises:
        CheckpointError: this installation has none.
    """
    folder = Path(str(resources.files("k3port"))) / "assets" / EMBEDDED_NAME
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"the embedded checkpoint {EMBEDDED_NAME} is not in this installation",
            reasons=[f"{folder} has no config.json"],
            hint="give the folder of a checkpoint: k3port run --model PATH",
        )
    return folder


def read_prompt(words: tuple[str, ...], file: str | None, *, builtin: bool) -> str | None:
    """The prompt from the command line, a file or stdin, without one final line end if it was read.

    Args:
        words: what stood in the place of PROMPT.
        file: the value of ``--file``.
        builtin: whether there is a prompt to fall back to.

    Returns:
        None: nothing was given and there is one to fall back to.

    Raises:
        UsageError: none, several, an empty one, or one that is no UTF-8 text. Never quotes a prompt.
    """
    if len(words) > 1:
        raise UsageError("more than one PROMPT", hint='put the prompt in quotes: k3port run "..."')
    if words and file is not None:
        raise UsageError("both PROMPT and --file", hint="give one of them")
    if file is not None and file != _STDIN:
        return _checked(_read_file(Path(file)), f"the prompt file {file}")
    if words and words[0] != _STDIN:
        return _checked(words[0], "the prompt")
    asked = bool(words) or file is not None
    prompt = ""
    if sys.stdin is not None and (asked or not sys.stdin.isatty()):
        prompt = _read_stdin()
    if not prompt and not asked:
        if builtin:
            return None
        raise UsageError("no prompt", hint='k3port run --model PATH "...", --file FILE, or text on stdin')
    return _checked(prompt, "the prompt on stdin")


def _read_stdin() -> str:
    try:
        return _text(sys.stdin.buffer, "stdin")
    except OSError as exc:
        raise UsageError("cannot read stdin", reasons=[exc.strerror or str(exc)], hint=_READABLE) from None


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return _text(stream, f"the prompt file {path}")
    except FileNotFoundError:
        raise UsageError(f"the prompt file {path} does not exist", hint=_READABLE) from None
    except OSError as exc:
        reasons = [exc.strerror or str(exc)]
        raise UsageError(f"cannot read the prompt file {path}", reasons=reasons, hint=_READABLE) from None


def _text(stream: BinaryIO, what: str) -> str:
    data = stream.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise UsageError(f"{what} is larger than {MAX_PROMPT_BYTES >> 20} MiB", hint="give a shorter prompt")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        reasons = [f"the first bad byte is number {exc.start}"]
        raise UsageError(f"{what} is not UTF-8 text", reasons=reasons, hint=_UTF8) from None
    return text.removesuffix("\n").removesuffix("\r")


def _checked(text: str, what: str) -> str:
    if not text:
        raise UsageError(f"{what} is empty", hint="give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise UsageError(f"{what} is not UTF-8 text", reasons=[f"at character {exc.start}"], hint=_UTF8) from None
    return text
