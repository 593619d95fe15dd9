"""Ctrl-C: always one message and exit code 130, whatever code it comes into."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """Owns SIGINT while a command runs. Where another thread runs the command, it owns nothing.

    Args:
        restore: give the signal its former handler back at the end. A process that is about to end ignores the signal
            instead: there is nothing left to stop, and an interrupt in Python's own shutdown prints a traceback.
    """

    def __init__(self, *, restore: bool) -> None:
        self.seen = False
        """Whether there was one: what an interrupted library makes of it can look like any failure."""
        self._restore, self._held, self._owns = restore, 0, False

    def __enter__(self) -> Interrupts:
        global _current
        self._outer, _current = _current, self
        try:
            self._before = signal.getsignal(signal.SIGINT)
            # A process that was started to ignore it, such as in the background of a shell, stays so.
            if self._before is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._on_signal)
                self._owns = True
        except ValueError:
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self._outer
        if self._owns:
            signal.signal(signal.SIGINT, self._before if self._restore else signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if not self._held:
            raise KeyboardInterrupt

    @contextmanager
    def held(self) -> Iterator[None]:
        """An interrupt waits until the block is over: a library that it stops half way through its import reports a
        broken installation, or ends the process."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.seen and not self._held:
            raise KeyboardInterrupt

    def off(self) -> None:
        """No more interrupts: the command is over, and says so."""
        self._held += 1


_current: Interrupts | None = None


@contextmanager
def held() -> Iterator[None]:
    """:meth:`Interrupts.held` of the command that runs."""
    if _current is None:
        yield
        return
    with _current.held():
        yield
