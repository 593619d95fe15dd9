"""The register of operator goldens: numbers that are published or worked out by hand.

``CHECKS`` maps a name to the op, its phase and the check, which any kernel of the op can take; it raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3port.ops.catalog import Phase

Op = Callable[..., Any]
Check = Callable[[Op, torch.dtype], None]
CHECKS: dict[str, tuple[str, Phase | None, Check]] = {}

# Published numbers have nine digits; float32 kernels get a few units in the last place.
CLOSE = {torch.float64: 3e-8, torch.float32: 1e-6}


def golden(name: str, op: str, phase: Phase | None = None) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[name] = (op, phase, check)
        return check

    return register


def close(actual: torch.Tensor, expected: Any, dtype: torch.dtype, scale: float = 1.0, what: str = "") -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape)
    bound = CLOSE[dtype] * scale
    wrong = (actual.double() - wanted).abs() > bound * wanted.abs().clamp(min=1e-6) + bound * 1e-3
    wrong |= ~torch.isfinite(actual)
    assert not wrong.any(), f"{what} {actual.tolist()} instead of {wanted.tolist()}"
