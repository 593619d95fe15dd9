"""Prints, as JSON, the largest relative error of the interpreted KDA decode under configurations that no shape of the
contract's samples asks for: one program per head, several, tiles of all sizes, and separate kernels."""

from __future__ import annotations

import json

import torch

from k3port.backends.portable.kernels.kda_fused import kda_decode
from k3port.backends.portable.launch import force_config
from k3port.ops.contract import cloned, relative_rms
from k3port.ops.kda import kda
from k3port.ops.kda_samples import block_inputs

STEPS = [
    # Rows of a tile and tiles of a program; a head has 64 rows.
    {"launches": 1, "block_v": block_v, "passes": passes, "num_warps": 4}
    for block_v, passes in ((8, 1), (8, 2), (8, 8), (16, 4), (32, 1), (64, 1), (128, 16))
]
DRAFTS = [{"launches": 1, "block_v": block_v, "num_warps": 4} for block_v in (8, 32)]
SEPARATE = [{"launches": 3, "block_v": 8, "passes": 1, "num_warps": 4}]


def error(name: str, config: dict[str, int], draft: bool) -> float:
    gen = torch.Generator().manual_seed(3)
    lengths = [2, 3, 8, 1] if draft else [1, 1, 1]
    slots = [2, 3, 1, 0] if draft else [2, 0, 1]
    args = block_inputs(torch.float32, gen, lengths, slots, phase="decode", draft=draft)
    wanted = cloned(args)
    expected = kda(**wanted)
    with force_config(name, config):
        actual = kda_decode(**args)
    pairs = [(actual, expected), (args["state"].recurrent, wanted["state"].recurrent)]
    pairs.append((args["state"].conv, wanted["state"].conv))
    if draft:
        pairs += [(getattr(args["state"].drafts, x), getattr(wanted["state"].drafts, x)) for x in ("x", "k", "g", "u")]
    assert args["state"].arrivals is None or not args["state"].arrivals.any()
    return max(relative_rms(a, b) for a, b in pairs)


def main() -> None:
    found = {f"step {config}": error("kda_fused", config, draft=False) for config in STEPS + SEPARATE}
    found |= {f"drafts {config}": error("kda_verify", config, draft=True) for config in DRAFTS + SEPARATE}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
