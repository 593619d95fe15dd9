"""A kernel that is slow, wrong or broken as its configuration says. Not Triton: it only asks for a configuration."""

from __future__ import annotations

import time

import torch
from bench_parts import right

from k3port.backends.portable.launch import tuned
from k3port.backends.portable.tuning import Entry

SLEEP = {1: 3e-3, 2: 1e-3, 4: 2e-3}
CANDIDATES = {"num_warps": (1, 2, 4, 8, 16)}
ENTRIES = (Entry(("*",), {}, {"num_warps": 4}),)
FILE = """{
 "kernel": "bench_toy",
 "entries": [
  {"archs": ["*"], "when": {}, "config": {"num_warps": 4}, "measured": null}
 ]
}
"""
"""The same as a configuration file."""
calls: list[int] = []


def toy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm: 8 warps are wrong, 16 do not compile."""
    warps = tuned("bench_toy", D=x.shape[1])["num_warps"]
    calls.append(warps)
    if warps == 16:
        raise RuntimeError("out of resource: shared memory")
    time.sleep(SLEEP.get(warps, 0))
    return right(x, weight, eps) * (2 if warps == 8 else 1)


def wrong(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Twice the RMSNorm, whatever the configuration."""
    return toy(x, weight, eps) * 2
