"""Which tuned configurations a call asks for."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3port.backends.portable.launch import Lookup


def observed_configs() -> AbstractContextManager[list[Lookup]]:
    """The look-ups of Triton kernels inside, each once, in order; none where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return nullcontext([])
    from k3port.backends.portable.launch import watch_tuned

    return watch_tuned()
