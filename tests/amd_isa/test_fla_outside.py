"""Kernels of others as an outside check: KDA of fla-core, executed in emulation, against its own plain PyTorch version."""

from __future__ import annotations

import sys
from typing import Any

import pytest

if sys.platform != "linux":
    # The extra dev brings it on Linux: there it is imported like everything else, and its absence is a failure.
    pytest.skip("fla-core needs Triton, which exists for Linux only", allow_module_level=True)

import torch
from amd_checks import relative
from fla.ops.kda.chunk_fwd import chunk_kda_fwd
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from fla.ops.kda.naive import naive_recurrent_kda

from k3port.testing.amd_isa import emulate

BOUND = 5e-3
TOKENS, HEADS, SIZE = 130, 1, 128


ARCHS = pytest.mark.parametrize("arch", ["gfx942", "gfx950"])


@pytest.fixture
def inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    shape = (1, TOKENS, HEADS, SIZE)
    q, k = (torch.nn.functional.normalize(torch.randn(shape), dim=-1).to(torch.bfloat16) for _ in range(2))
    return {
        "q": q,
        "k": k,
        "v": torch.randn(shape).to(torch.bfloat16),
        "g": torch.nn.functional.logsigmoid(torch.randn(shape)) / 4,
        "beta": torch.rand(shape[:3]).to(torch.bfloat16),
        "initial_state": torch.randn(1, HEADS, SIZE, SIZE) * 0.1,
    }


def expected(inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    wide = {name: x.float() for name, x in inputs.items()}
    o, state = naive_recurrent_kda(**wide, output_final_state=True)
    assert state is not None
    return o, state


@ARCHS
def test_chunked_prefill(arch: str, inputs: dict[str, Any]) -> None:
    o, state = expected(inputs)
    with emulate(arch) as reports:
        found = chunk_kda_fwd(**inputs, scale=SIZE**-0.5, output_final_state=True)
    assert relative(found[0], o) <= BOUND
    assert relative(found[1], state) <= BOUND
    assert len(reports) >= 4
    assert all(r.races == () for r in reports)


@ARCHS
def test_recurrent_decode(arch: str, inputs: dict[str, Any]) -> None:
    o, state = expected(inputs)
    with emulate(arch) as reports:
        found = fused_recurrent_kda_fwd(**inputs, scale=SIZE**-0.5, output_final_state=True, inplace_final_state=False)
    assert relative(found[0], o) <= BOUND
    assert relative(found[1], state) <= BOUND
    assert [r.races for r in reports] == [()]
