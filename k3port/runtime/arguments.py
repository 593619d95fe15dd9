"""What callers of the library pass in: prompts, parameters and sizes, checked before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from k3port.errors import UsageError
from k3port.ops.table import SLOTS
from k3port.runtime.request import SamplingParams

Prompt = str | Sequence[int]

MAX_SIZE = 2**31 - 1


def check_size(name: str, value: Any, maximum: int = MAX_SIZE) -> int:
    """A whole number from 1 to ``maximum``.

    Raises:
        UsageError: anything else.
    """
    number = as_integer(value)
    if number is None or not 1 <= number <= maximum:
        shown = repr(value) if number is None or abs(number) < 10**20 else "a huge number"
        raise UsageError(f"{name} = {shown}", hint=f"{name} is a whole number from 1 to {maximum}")
    return number


def check_overrides(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Functions by slot.

    Raises:
        UsageError: a name that is no slot of the table.
    """
    unknown = [name for name in overrides or {} if name not in SLOTS]
    if unknown:
        raise UsageError(f"unknown slots in overrides: {', '.join(unknown)}", hint=f"slots: {', '.join(SLOTS)}")
    return dict(overrides or {})


def as_integer(value: Any) -> int | None:
    """A Python int for anything that is a whole number (NumPy's too), None for everything else."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_prompts(prompts: Any) -> list[Prompt]:
    """One list entry per prompt: texts, or lists of ids. One prompt may come without its list.

    Raises:
        UsageError: something that is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _items(prompts, "prompts")
    if items and all(as_integer(item) is not None for item in items):
        return [_ids(items, 0)]
    return [item if isinstance(item, str) else _ids(_items(item, f"prompt {i}"), i) for i, item in enumerate(items)]


def as_params(params: Any, count: int) -> list[SamplingParams]:
    """One record per prompt.

    Raises:
        UsageError: another type, or another number of them.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = _items(params, "sampling parameters")
    if not all(isinstance(one, SamplingParams) for one in each):
        raise UsageError("sampling parameters of another type", hint="give SamplingParams, or one per prompt in a list")
    if len(each) != count:
        raise UsageError(f"{count} prompts but {len(each)} sampling parameters", hint="give one, or one per prompt")
    return each


def _ids(items: Iterable[Any], prompt: int) -> list[int]:
    ids = []
    for position, item in enumerate(items):
        number = as_integer(item)
        if number is None:
            raise UsageError(
                f"prompt {prompt} is not a list of token ids: position {position} holds a {type(item).__name__}",
                hint="a prompt is a text or a list of whole numbers",
            )
        ids.append(number)
    return ids


def _items(value: Any, what: str) -> list[Any]:
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise UsageError(
            f"{what}: cannot use a {type(value).__name__}", hint="a prompt is a text or a list of whole numbers"
        )
    return list(value)
