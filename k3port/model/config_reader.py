"""Typed access to one JSON object of ``config.json``. No torch import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from k3port.model.json_file import is_id, shown

MAX_SIZE = 2**31 - 1
"""Every dimension, count and token id stays below it; what is larger is damage, not a model."""
MAX_NUMBER = 3.0e38
"""Inside float32."""


class Reader:
    """Typed access to one JSON object that collects every fault instead of stopping at the first."""

    def __init__(self, values: Mapping[str, Any], where: str, faults: list[str]) -> None:
        self.values, self.where, self.faults = values, where, faults
        self.bad: set[str] = set()
        """Keys whose value could not be used: what depends on them is not checked."""

    def require(self, keys: Iterable[str]) -> None:
        """Notes the keys that are not there."""
        for key in keys:
            if key not in self.values:
                self.faults.append(f"{self.where}.{key} is missing")
                self.bad.add(key)

    def fault(self, text: str) -> None:
        self.faults.append(f"{self.where}.{text}")

    def _bad(self, key: str, expected: str) -> None:
        self.fault(f"{key} = {shown(self.values.get(key))}: expected {expected}")
        self.bad.add(key)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """A whole number. A key that is absent takes the default; ``require`` reports it where there is none."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            if key in self.values:
                too_large = isinstance(value, int) and value > maximum
                limit = f"at most {maximum}" if too_large else f"at least {minimum}"
                self._bad(key, f"a whole number of {limit}")
            return minimum if default is None else default
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.integer(key)

    def positive(self, key: str, default: float, maximum: float = MAX_NUMBER) -> float:
        """A number above 0. NaN is above nothing, and Infinity is above the maximum."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum:
            self._bad(key, f"a number above 0 and at most {maximum:g}")
            return default
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self._bad(key, "true or false")
            return default
        return value

    def choice(self, key: str, legal: tuple[str, ...], default: str) -> str:
        value = self.values.get(key, default)
        if value not in legal:
            self.fault(f"{key} = {shown(value)} is not supported: k3port knows {', '.join(legal)}")
            return default
        return value

    def mapping(self, key: str) -> Mapping[str, Any] | None:
        """An object; None where the key is absent, null or at fault."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self._bad(key, "an object or null")
            return None
        return value

    def token_ids(self, key: str, value: object, vocab_size: int | None, *, many: bool = False) -> tuple[int, ...]:
        """Ids of the vocabulary: none for null, one, or (``many``) a list. The value may come from another object."""
        ids = value if many and isinstance(value, list) else [] if value is None else [value]
        good = tuple(i for i in ids if is_id(i, vocab_size))
        if len(good) < len(ids):
            inside = "" if vocab_size is None else f" in 0..{vocab_size - 1}"
            expected = f"a token id{inside}{' or a list of them' if many else ''}"
            self.fault(f"{key} = {shown(value)}: expected {expected}")
        return good
