"""k3port runs Kimi K3 from one model definition on NVIDIA, AMD and CPU.

The public names are imported when they are first used: ``import k3port`` itself loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from k3port.errors import ExitCode, K3Error
    from k3port.runtime.request import GREEDY, Generation, SamplingParams, TokenEvent
    from k3port.runtime.runtime import Runtime, load

_PUBLIC = {
    "ExitCode": "k3port.errors",
    "GREEDY": "k3port.runtime.request",
    "Generation": "k3port.runtime.request",
    "K3Error": "k3port.errors",
    "Runtime": "k3port.runtime.runtime",
    "SamplingParams": "k3port.runtime.request",
    "TokenEvent": "k3port.runtime.request",
    "load": "k3port.runtime.runtime",
}

__all__ = [
    "GREEDY",
    "ExitCode",
    "Generation",
    "K3Error",
    "Runtime",
    "SamplingParams",
    "TokenEvent",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'k3port' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
