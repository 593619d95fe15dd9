"""AttnRes in place, as AMD machine code in emulation: configurations that are not the chosen ones, and bad banks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed, so there is no machine code to execute")

import torch

from k3port.backends.portable.kernels.attn_res import attn_res
from k3port.backends.portable.launch import force_config, pretend_arch
from k3port.backends.portable.tuning import Config, entries
from k3port.ops.residual import ATTN_RES
from k3port.testing.amd_isa import emulate

# More lanes than numbers: several warps hold the same ones. A warp that stored the sum before another had read it would
# make that one add the pending output twice, and no check of LDS sees it.
REPLICATED = {"num_warps": 2, "GROUP": 2, "STAGES": 1}
CONFIGS = [REPLICATED, {"num_warps": 4, "GROUP": 4, "STAGES": 2}, {"num_warps": 1, "GROUP": 1, "STAGES": 3}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_invariants(arch: str, config: Config, dtype: torch.dtype) -> None:
    launches = 0

    def function(**args: Any) -> torch.Tensor:
        nonlocal launches
        with pretend_arch(arch), force_config("attn_res", config), emulate(arch) as reports:
            y = attn_res(**args)
        launches += len(reports)
        return y

    for invariant in ATTN_RES.invariants:
        invariant.check(function, dtype, torch.Generator().manual_seed(3))
    assert launches == 4, "one launch per call"


def test_a_bank_without_a_slot_is_refused() -> None:
    x, bank = torch.ones(2, 8), torch.ones(3, 2, 8)
    for blocks, num_blocks, write in ((bank, 3, True), (bank, 4, False), (bank.transpose(1, 2), 1, False)):
        with pytest.raises(ValueError, match="needs a slot each and rows without gaps"):
            attn_res(x, None, blocks, num_blocks, write, x[0], x[0], x[0], 1e-5)


def test_no_chosen_configuration_has_more_lanes_than_numbers() -> None:
    """On AMD, where a warp has 64: idle lanes repeat the work of others."""
    for entry in entries("attn_res"):
        low, _ = entry.when.get("D", (None, None))
        if low is not None:
            assert entry.config["num_warps"] * 64 <= low
