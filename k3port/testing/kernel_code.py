"""Code of kernels under check, as what it is: code that may print, raise, end the process, or never end.

Its output goes to stderr, its time is limited, and its failures are findings.
``python -m k3port.testing.kernel_code MODULE:FUNCTION`` imports one kernel in a process of its own: code that ends its
process while it is imported ends that one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

CASE_S = 60.0
"""Seconds for one call where every call is small: in the interpreter, and of host code whose launches are recorded."""
LONG_CASE_S = 600.0
"""Seconds for one call in emulation, on the CPU and on a GPU."""
PART_S = 1800.0
"""Seconds for one part of a check; mutation, which has a budget of its own, does not count."""
MAX_ENDLESS = 3
"""Calls of one part that may take too long before the rest is given up."""
AGAIN_S = 5.0


class TookTooLong(BaseException):
    """The time is over. No Exception, so that kernel code with a broad ``except`` does not catch it."""


FINDINGS = (Exception, SystemExit, TookTooLong)
"""What kernel code may raise without ending the check; an interrupt by the user is none of these."""


class Budget:
    """Time for the calls of one part: ``case_s`` seconds each, ``total_s`` together, from now on."""

    def __init__(self, case_s: float, total_s: float) -> None:
        self.case_s, self.total_s, self._end = case_s, total_s, time.monotonic() + total_s
        self._endless = 0

    @property
    def over(self) -> bool:
        """Whether nothing more may run: the time is used up, or :data:`MAX_ENDLESS` calls did not end."""
        return time.monotonic() >= self._end or self._endless >= MAX_ENDLESS

    @contextlib.contextmanager
    def case(self) -> Iterator[None]:
        """One call.

        Raises:
            TookTooLong: it did not end in time.
        """
        left = self._end - time.monotonic()
        total = left < self.case_s
        words = f"the whole part did not end within {self.total_s:g} s" if total else ""
        try:
            with time_limit(max(left, 0.001) if total else self.case_s, words):
                yield
        except TookTooLong:
            self._endless += 1
            raise


@contextlib.contextmanager
def time_limit(seconds: float, words: str = "") -> Iterator[None]:
    """Ends Python code of the main thread after some seconds; in other threads nothing is limited.

    Code in C is ended when it returns to Python.

    Args:
        words: what to say then; empty says the seconds.

    Raises:
        TookTooLong: the time is over.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ended(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(words or f"did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ended)
    # More than once: a first exception can be lost in a callback or a destructor.
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def prints_to_stderr() -> Iterator[None]:
    """What is printed inside, by Python, by C and by other processes, goes to stderr: stdout has the report alone."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # a process without stdout
        kept = -1
    try:
        if kept >= 0:
            os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept >= 0:
            os.dup2(kept, 1)
            os.close(kept)


_FAILURE = re.compile(r"(?!usage:)[A-Za-z_][\w.]*(: |$)|.*: error: ")
_POSITION = re.compile(r"at \d+:\d+:")


def said(exc: BaseException) -> str:
    """An exception in one line: type and message; of an error of Triton's compiler the last line, then its position."""
    text = str(exc).strip()
    if isinstance(exc, SystemExit):
        return f"SystemExit: it ended the process with {text or 'no status'}"
    if isinstance(exc, TookTooLong):
        return text
    position = _POSITION.match(text)
    if position is not None:
        lines = [line.strip() for line in text.splitlines()]
        # Below the caret there may be one line or several; where there is none, the caret is all that is known.
        caret = max((number for number, line in enumerate(lines) if line == "^"), default=len(lines))
        words = " ".join(filter(None, lines[caret + 1 :])) or " ".join(filter(None, lines[1:]))
        text = f"{words} ({position[0].rstrip(':')} in {_function(text)})"
    return f"{type(exc).__name__}: {' '.join(text.split())}"


def _function(text: str) -> str:
    found = re.search(r"def (\w+)", text)
    return found[1] if found else "the kernel"


def cause(errors: str) -> str:
    """The failure that a process wrote to stderr, in one line: the last exception, without frames and hints."""
    lines = [line for line in errors.strip().splitlines() if line.strip() and not line.startswith("hint:")]
    first = max((n for n, line in enumerate(lines) if _FAILURE.match(line)), default=len(lines) - 1)
    return " ".join(" ".join(lines[max(first, 0) :]).split())


def load_fault(load: str, *, timeout_s: float = CASE_S) -> str:
    """Why a kernel, ``module:function``, cannot be loaded, in one sentence; empty where it can.

    A module that is not imported yet, and not k3port's own, is imported in another process first.
    """
    module = load.partition(":")[0]
    if module not in sys.modules and not module.startswith("k3port."):
        path = os.pathsep.join(part or os.curdir for part in sys.path)
        command = ["env", f"PYTHONPATH={path}", sys.executable, "-m", __name__, load]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return f"its module cannot be imported: that did not end within {timeout_s:g} s"
        if (found := _answer(done.stdout)) is None:
            return f"its module cannot be imported: {ended(done.returncode)}"
        if found:
            return found
    return _load(load)


def _answer(output: str) -> str | None:
    lines = [line.removeprefix(_ANSWER) for line in output.splitlines() if line.startswith(_ANSWER)]
    return lines[-1].strip() if lines else None


_ANSWER = "load fault:"


def _load(load: str) -> str:
    module, _, name = load.partition(":")
    try:
        with time_limit(CASE_S):
            found = importlib.import_module(module)
    except FINDINGS as exc:
        return f"its module cannot be imported: {said(exc)}"
    if not hasattr(found, name):
        return f"its module {module} has no {name}"
    return "" if callable(getattr(found, name)) else f"{name} of its module {module} cannot be called"


def ended(status: int) -> str:
    """How a process ended that should not have, in words."""
    if status < 0:
        wild = -status in (signal.SIGSEGV, getattr(signal, "SIGBUS", 0))
        return f"the process ended with status {status} ({'a wild address?' if wild else _signal(-status)})"
    return f"the process ended with status {status}, as os._exit does"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(arguments: Sequence[str] | None = None) -> int:
    (load,) = sys.argv[1:] if arguments is None else arguments
    with prints_to_stderr():
        fault = _load(load)
    print(f"{_ANSWER} {fault}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
