"""JSON files of a checkpoint, whatever a broken download left of them. No torch import."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, TypeGuard

LFS_MARKER = b"version https://git-lfs"

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_SHORT.maxlist = 8


class BrokenJsonError(Exception):
    """A file that is there but is no JSON; the text ends a sentence that starts with the file's name."""


def read_json(path: Path) -> Any:
    """The value in a file.

    Raises:
        FileNotFoundError: it is not there.
        BrokenJsonError: it cannot be read, is a git-LFS pointer, or is not JSON.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise BrokenJsonError(f"cannot be read: {exc.strerror or exc}") from None
    if data.startswith(LFS_MARKER):
        raise BrokenJsonError("is a git-LFS pointer, not the file itself: run `git lfs pull`")
    if not data.strip():
        raise BrokenJsonError("is not valid JSON: it is empty")
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as exc:
        raise BrokenJsonError(f"is not valid JSON: byte {exc.start} is not UTF-8") from None
    except json.JSONDecodeError as exc:
        raise BrokenJsonError(f"is not valid JSON: {exc}") from None
    except RecursionError:
        raise BrokenJsonError("is not valid JSON that can be read: it is nested too deeply") from None
    except ValueError:
        raise BrokenJsonError("is not valid JSON that can be read: a number in it is too long") from None


def shown(value: object) -> str:
    """A JSON value for a message: short, on one line, and safe for values of any size and depth."""
    return _SHORT.repr(value)


def is_id(value: object, vocab_size: int | None) -> TypeGuard[int]:
    """Whether a JSON value is a token id of a vocabulary (of any, where its size is not known)."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return value >= 0 and (vocab_size is None or value < vocab_size)
