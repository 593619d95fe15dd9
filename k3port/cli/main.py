"""The entry of the command ``k3port``. It owns Ctrl-C before anything that takes time is imported."""

from __future__ import annotations

from collections.abc import Sequence

from k3port.cli.interrupts import Interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; prints every error the same way.

    Args:
        argv: the arguments of a program that goes on afterwards. None takes those of this process, which ends then.
    """
    with Interrupts(restore=argv is not None) as interrupts:
        try:
            with interrupts.held():
                from k3port.cli import app
        except KeyboardInterrupt:
            interrupts.off()
            from k3port.cli import app
        return app.execute(argv, interrupts)
