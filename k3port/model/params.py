"""Reading named parameters while a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class ParamReader:
    """Names below one prefix, with the ones that were read counted, so that no loaded tensor stays unused."""

    def __init__(self, params: Mapping[str, Any], prefix: str = "", seen: set[str] | None = None) -> None:
        self._params, self._prefix = params, prefix
        self._seen: set[str] = set() if seen is None else seen

    def below(self, prefix: str) -> ParamReader:
        return ParamReader(self._params, self._prefix + prefix, self._seen)

    def tensor(self, name: str) -> torch.Tensor:
        """One parameter.

        Raises:
            KeyError: it was not loaded; the loader's manifest and the model disagree.
        """
        return self.any(name)

    def any(self, name: str) -> Any:
        full = self._prefix + name
        self._seen.add(full)
        return self._params[full]

    def unread(self) -> list[str]:
        return sorted(self._params.keys() - self._seen)
