"""Pin one launch configuration per Triton kernel of flash-linear-attention.

Its default search compiles dozens of variants per kernel, which takes minutes; for a run of a quarter of an hour a
sensible fixed choice is better.
"""

from __future__ import annotations

import sys
from typing import Any

# The configuration closest to these settings is kept.
WANTED = {"num_warps": 4, "num_stages": 2, "BK": 64, "BV": 64}


def _distance(config: Any) -> float:
    settings = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
    return sum(abs(settings[k] - v) / v for k, v in WANTED.items() if settings.get(k) is not None)


def pin_configurations() -> dict[str, str]:
    """Reduce every autotuner in loaded ``fla`` modules to one configuration; returns the choices by kernel name."""
    import fla.ops.kda  # noqa: F401
    from triton.runtime.autotuner import Autotuner

    chosen: dict[str, str] = {}
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("fla.") and m is not None]:
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, Autotuner) and "fn" in getattr(value, "__dict__", {}):
                value = value.fn
            if not isinstance(value, Autotuner) or len(value.configs) == 1:
                continue
            value.configs = [min(value.configs, key=_distance)]
            value.early_config_prune = None
            chosen[value.base_fn.__name__] = str(value.configs[0])
    return chosen
