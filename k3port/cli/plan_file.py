"""Plans as files: written whole or not at all, read with every doubt named."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from k3port.cli.shape import misfit
from k3port.errors import K3Error, UsageError
from k3port.oracle.spec import Plan

_MAX_PLAN_BYTES = 64 * 2**20


def write_plan(path: Path, answer: Plan) -> None:
    """Writes a plan, whole or not at all.

    Raises:
        K3Error: the file cannot be written.
    """
    text = answer.to_json() + "\n"
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            # Renaming onto a pipe, a device or a link would replace it by a file.
            path.write_text(text, encoding="utf-8")
            return
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
    except OSError as exc:
        reasons = [exc.strerror or type(exc).__name__]
        hint = "give a file that can be written"
        raise K3Error(f"cannot write the plan to {path}", reasons=reasons, hint=hint) from None


def read_plan(path: Path) -> Plan:
    """A plan that ``--save`` wrote.

    Raises:
        UsageError: the file is absent, is no plan, or is one of another plan version.
    """
    hint = "k3port plan --save FILE writes one"
    try:
        with path.open("rb") as stream:
            data = stream.read(_MAX_PLAN_BYTES + 1)
        if len(data) > _MAX_PLAN_BYTES:
            raise ValueError(f"it is larger than {_MAX_PLAN_BYTES >> 20} MiB")
        found = Plan.from_json(data.decode("utf-8"))
        if fault := misfit(found):
            raise ValueError(f"{fault} has a value of another type")
        for slot in sorted({s.slot for s in found.selections} ^ {s.slot for s in found.would_run}):
            raise ValueError(f"{slot} is answered once instead of twice")
        return found
    except FileNotFoundError:
        raise UsageError(f"the plan {path} does not exist", hint=hint) from None
    except OSError as exc:
        raise UsageError(
            f"cannot read the plan {path}", reasons=[exc.strerror or type(exc).__name__], hint=hint
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        # JSON of another form fails in whatever way its first odd value does.
        reason = str(exc) if isinstance(exc, ValueError) else f"{type(exc).__name__}: {exc}"
        raise UsageError(f"{path} is not a plan that this version reads", reasons=[reason], hint=hint) from None
