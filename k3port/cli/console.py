"""Where output goes: results on stdout, everything else on stderr, one JSON document at most."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import unicodedata
from typing import Any, TextIO

from k3port.errors import K3Error


class OutputError(K3Error):
    """A result that could not be written, such as on a full disk."""


class Console:
    """The two output streams of one command.

    Args:
        json_mode: stdout gets one JSON document instead of text.
        quiet: stderr gets nothing but errors.
        verbose: stderr gets details too, and the traceback of an internal error.
        plain: no colour, even on a terminal.
    """

    def __init__(
        self, *, json_mode: bool = False, quiet: bool = False, verbose: bool = False, plain: bool = False
    ) -> None:
        self.json_mode, self.quiet, self.verbose, self.plain = json_mode, quiet, verbose, plain
        self.warnings: list[str] = []
        self._ends_with_newline = True
        self._closed = False

    def note(self, text: str) -> None:
        """A line of progress."""
        if not self.quiet:
            self._stderr(text, "2")

    def detail(self, text: str) -> None:
        """A line for those who asked for details."""
        if self.verbose:
            self._stderr(text, "2")

    def warn(self, text: str) -> None:
        """A line that starts with ``warning:``; kept for the JSON document too."""
        self.warnings.append(text)
        if not self.quiet:
            self._stderr(f"warning: {text}", "33")

    def error(self, error: K3Error) -> None:
        """The error as people read it, and in JSON mode as the document too."""
        self.failure(error)
        if self.json_mode:
            # This is the report of a failure already, and there is one report.
            with contextlib.suppress(OutputError, BrokenPipeError):
                self.document({"error": error_record(error)})

    def failure(self, error: K3Error) -> None:
        """The error as people read it, where the JSON document has said it already."""
        with contextlib.suppress(OutputError, BrokenPipeError):
            self.end_text()
        self._stderr(error.render(), "31")

    def text(self, chunk: str) -> None:
        """A piece of the result, shown at once. JSON mode shows none."""
        if chunk and not self.json_mode:
            # First, since an interrupt can come between writing and whatever follows it.
            self._ends_with_newline = chunk.endswith("\n")
            self._stdout(_printable(chunk) if sys.stdout is not None and sys.stdout.isatty() else chunk)

    def line(self, text: str) -> None:
        """A line of the result."""
        self.text(text + "\n")

    def end_text(self) -> None:
        """Ends the last line of the result, so that what follows starts on its own."""
        if not self._ends_with_newline:
            self.text("\n")

    def document(self, document: dict[str, Any]) -> None:
        """The JSON document, whole or not at all."""
        self._stdout(json.dumps(document, indent=1) + "\n")

    def text_document(self, text: str) -> None:
        """The JSON document where it is text already."""
        self._stdout(text + "\n")

    def page(self, text: str) -> None:
        """Help and the like: no result, and the same in JSON mode."""
        self._stdout(text + "\n")

    def close(self) -> None:
        """Nothing more for stdout, which does not take it. Python must not try again at exit with what is left over."""
        self._closed = True
        _redirect_to_nowhere(sys.stdout)

    def _stdout(self, text: str) -> None:
        if self._closed:
            return
        if sys.stdout is None:
            self._closed = True
            raise OutputError(
                "cannot write to stdout", reasons=["it is closed"], hint="give it a terminal, a pipe or a file"
            )
        try:
            try:
                _write(sys.stdout, text)
            except UnicodeEncodeError:
                encoding = sys.stdout.encoding
                _write(sys.stdout, text.encode(encoding, "replace").decode(encoding))
        except BrokenPipeError:
            self.close()
            raise
        except OSError as exc:
            self.close()
            raise OutputError(
                "cannot write to stdout",
                reasons=[exc.strerror or type(exc).__name__],
                hint="free space where it goes, or send it elsewhere",
            ) from None

    def _stderr(self, text: str, colour: str) -> None:
        # A closed stderr is no reason to stop: the result is what counts.
        if sys.stderr is None:
            return
        try:
            _write(sys.stderr, _coloured(_printable(text), colour, self.plain))
        except (OSError, ValueError):
            _redirect_to_nowhere(sys.stderr)


def _coloured(text: str, colour: str, plain: bool) -> str:
    if plain or not sys.stderr.isatty():
        return text + "\n"
    return f"\x1b[{colour}m{text}\x1b[0m\n"


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def _redirect_to_nowhere(stream: TextIO | None) -> None:
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _printable(text: str) -> str:
    """Control characters would let a model or a file name steer the terminal."""
    if text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text)


def error_record(error: K3Error) -> dict[str, Any]:
    """An error as JSON values, with every reason."""
    return {
        "kind": type(error).__name__,
        "message": error.message,
        "reasons": list(error.reasons),
        "hint": error.hint,
        "exit_code": int(error.exit_code),
    }
