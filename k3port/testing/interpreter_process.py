"""The process in which Triton interprets, seen from outside: its lines are read as they come, and silence counts."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from k3port.testing.kernel_code import cause, ended

if TYPE_CHECKING:
    from k3port.testing.suite import CaseReport

Case = tuple[str, str, str]
"""Dtype, sample and variant."""
START_S = 180.0
"""Seconds until the first case begins: imports of torch, Triton and plugins on a machine that has more to do."""
GRACE_S = 10.0
"""How much longer than a case the process may be silent: it ends Python code that takes too long by itself."""


@dataclass
class Child:
    """What one process told.

    Attributes:
        cases: those that it finished.
        case: the one that it was in at its end; None where it was in none.
        over: whether it did everything.
        timed_out: whether it was ended from here.
        how: how it ended, in words.
    """

    cases: list[CaseReport] = field(default_factory=list)
    op: str = ""
    case: Case | None = None
    over: bool = False
    timed_out: bool = False
    how: str = ""


def run_child(name: str, options: Sequence[str], done: Sequence[Case], end: float, case_s: float) -> Child:
    """Starts one process for one kernel and reads what it tells, until it ends, or is silent for too long.

    Args:
        done: cases to leave out.
        end: when it has to be over, by ``time.monotonic``.
        case_s: seconds that a case may take.
    """
    command = [
        *("env", "TRITON_INTERPRET=1", f"PYTHONPATH={os.pathsep.join(path or os.curdir for path in sys.path)}"),
        *(sys.executable, "-m", "k3port.testing.interpreter", name, *options),
        *("--case-seconds", str(case_s), "--done", json.dumps(list(done))),
    ]
    found = Child()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        try:
            limit = _listen(process, found, end, case_s)
        finally:
            # It is over, too long, or the user interrupts.
            process.kill()
            process.wait()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if found.timed_out:
        found.how = f"did not end within {limit:.3g} s"
    elif process.returncode in (1, 2) and text.strip():
        found.how = f"failed: {cause(text)}"
    else:
        found.how = ended(process.returncode).removeprefix("the process ")
        if process.returncode < 0 and (last := cause(text)):
            found.how += f" {last}"
    return found


def _listen(process: subprocess.Popen[str], found: Child, end: float, case_s: float) -> float:
    """Reads lines into ``found`` until there are no more; returns the limit that was kept last, in seconds."""
    lines: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    while True:
        limit = START_S if found.case is None else case_s
        grace = 0.0 if found.case is None else GRACE_S
        left = end - time.monotonic()
        try:
            line = lines.get(timeout=max(0.0, min(limit + grace, left)))
        except queue.Empty:
            found.timed_out = True
            return min(limit, max(left, 0.0)) if left < limit else limit
        if line is None:
            # It has closed its stdout, so it is about to end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return limit
        _take(line, found)


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _take(line: str, found: Child) -> None:
    """A line that is none of the protocol says nothing, nor does one that the end of the process cut off."""
    from k3port.testing.suite import case_from

    try:
        item: Any = json.loads(line)
    except ValueError:
        return
    if not isinstance(item, dict):
        return
    if "started" in item:
        dtype, sample, variant = item["started"]
        found.case, found.op = (dtype, sample, variant), item["op"]
    elif "case" in item:
        found.cases.append(case_from(item["case"]))
        found.case = None
    elif "over" in item:
        found.over = True
