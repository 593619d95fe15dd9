"""The errors that the library raises on purpose, and the exit codes of commands.

The command line adds three subclasses of its own; helpers have private exceptions that do not leave their module.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status says. The table in docs/cli.md is checked against this class."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNSUPPORTED = 3
    NUMERICS = 4
    INTERNAL = 5
    INTERRUPTED = 130


class K3Error(Exception):
    """A failure with a subject, its reasons, and one thing to do about it.

    Args:
        message: what failed, naming the subject (file, tensor, option).
        reasons: the facts behind it. All of them are kept; the command line prints the first few and the count.
        hint: one sentence or command that helps.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, reasons: Iterable[str] = (), hint: str = "") -> None:
        self.message = message
        self.reasons = tuple(reasons)
        self.hint = hint
        super().__init__(message)

    def render(self, max_reasons: int | None = 5) -> str:
        """The text a person reads: ``error:``, reasons, ``hint:``. ``max_reasons=None`` prints every reason.

        Each is one line, whatever an exception of other people's code brought with it; the attributes stay as they are.
        """
        shown = self.reasons if max_reasons is None else self.reasons[:max_reasons]
        lines = [f"error: {_one_line(self.message)}", *(f"  - {_one_line(reason)}" for reason in shown)]
        hidden = len(self.reasons) - len(shown)
        if hidden > 0:
            lines.append(f"  - and {hidden} more")
        if self.hint:
            lines.append(f"hint: {_one_line(self.hint)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render(max_reasons=20)


def _one_line(text: str) -> str:
    """The text without line breaks. Other spaces stay: they can be part of a file's name."""
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


class UsageError(K3Error):
    """The caller asked for something that does not exist or cannot be read."""

    exit_code = ExitCode.USAGE


class ConfigError(K3Error):
    """A model configuration that is broken, incomplete, or describes another model."""

    exit_code = ExitCode.UNSUPPORTED


class CheckpointError(K3Error):
    """Weight files that are missing, damaged, or do not match the configuration."""

    exit_code = ExitCode.FAILED


class TokenizerError(K3Error):
    """Tokenizer files that are missing or damaged."""

    exit_code = ExitCode.FAILED


class PlanError(K3Error):
    """No consistent choice of kernels exists for what was asked."""

    exit_code = ExitCode.UNSUPPORTED


class CapacityError(K3Error):
    """The request or the model does not fit in the memory that there is."""

    exit_code = ExitCode.UNSUPPORTED


class NumericsError(K3Error):
    """A kernel produced values that are not finite or differ from its reference."""

    exit_code = ExitCode.NUMERICS
