"""Production calls: shapes of the published model per rank, every form that the contract's samples show."""

from __future__ import annotations

import pytest
import torch

from k3port.oracle.spec import KernelSpec, Requires
from k3port.testing.production import Call, NoProductionCall, production_calls, production_queries
from k3port.testing.targets import TPS

OPS = ("rms_norm", "gated_norm", "attn_res", "situ_mul", "vision_patch", "sample")
PHASED = ("short_conv", "kda_core", "kda")


def calls(op: str, tp: int = 8, **fields: object) -> list[Call]:
    return list(production_calls(KernelSpec("toy.kernel", op, "m:f", "", **fields), tp))  # type: ignore[arg-type]


def main_call(op: str, tp: int = 8, **fields: object) -> Call:
    return next(call for call in calls(op, tp, **fields) if call.main)


@pytest.mark.parametrize("op", [*OPS, *PHASED])
def test_every_op_has_calls_at_every_tp(op: str) -> None:
    for tp in TPS:
        found = calls(op, tp)
        assert any(call.main for call in found)
        assert len({call.name for call in found}) > 1
        assert {call.query.phase for call in found} == ({"prefill", "decode"} if op in PHASED else {None})


def test_widths_are_those_of_one_rank() -> None:
    assert main_call("gated_norm", 8).args["x"].shape == (300, 12, 128)
    assert main_call("gated_norm", 1).args["x"].shape == (300, 96, 128)
    assert main_call("kda_core", 16, phases=("prefill",)).args["gate_raw"].shape == (326, 6 * 128)
    assert main_call("short_conv", 8, phases=("decode",)).args["x"].shape == (32, 3 * 12 * 128)
    assert {call.args["x"].shape[1] for call in calls("rms_norm")} == {7168, 1536, 512, 3584}
    assert {call.args["gate_up"].shape[1] for call in calls("situ_mul")} == {2 * 4224, 2 * 768, 2 * 384}
    patch = main_call("vision_patch").args
    assert patch["pixels"].shape == (300, 3, 14, 14) and patch["weight"].shape == (1024, 3, 14, 14)
    assert main_call("sample").args["logits"].shape[1] == 163840
    assert main_call("attn_res").args["partial"].shape == (300, 7168)


def test_numbers_are_bfloat16_beside_what_the_contract_keeps_in_float32() -> None:
    args = main_call("kda", 8, phases=("decode",)).args
    assert args["qkv"].dtype == torch.bfloat16
    assert args["params"].conv.dtype == args["params"].A_log.dtype == torch.float32
    assert args["params"].lower_bound == -5.0
    assert (args["state"].conv.dtype, args["state"].recurrent.dtype) == (torch.bfloat16, torch.float32)
    assert args["state"].recurrent.shape == (33, 12, 128, 128)


@pytest.mark.parametrize("op", ["kda_core", "kda"])
def test_a_kernel_gets_the_states_that_it_asks_for(op: str) -> None:
    for names in (("bfloat16",), ("float32", "bfloat16")):
        found = calls(op, phases=("decode",), requires=Requires(state_dtypes=names))
        states = [call.args["state"] if op == "kda_core" else call.args["state"].recurrent for call in found]
        assert {str(state.dtype) for state in states} == {f"torch.{name}" for name in names}


def test_steps_that_differ_in_how_triton_specialises_them() -> None:
    assert {call.args["x"].shape[0] for call in calls("rms_norm")} == {1, 32, 300}
    lengths = {call.args["segment"].lengths for call in calls("short_conv")}
    assert {(5, 257, 64), (300,), (1,), (1,) * 32} < lengths
    assert any(call.args["segment"].draft for call in calls("short_conv"))


def test_absent_arguments_and_switches_come_as_in_the_samples() -> None:
    forms = {(call.args["pending"] is None, call.args["write_block"]) for call in calls("attn_res")}
    assert forms == {(a, b) for a in (False, True) for b in (False, True)}
    assert {call.args["beta"] is None for call in calls("situ_mul")} == {False, True}
    main = main_call("attn_res").args
    assert main["pending"] is not None and main["norm_weight"] is not None
    assert main["num_blocks"] == main["blocks"].shape[0] - 1


def test_a_dtype_that_the_kernel_lacks_is_not_asked_for() -> None:
    assert main_call("rms_norm", requires=Requires(dtypes=("float16",))).args["x"].dtype == torch.float16


def test_what_has_no_size_is_named() -> None:
    with pytest.raises(NoProductionCall, match=r"moe_route: argument router is a RouterParams.*production\.RECORDS"):
        calls("moe_route")


def test_queries_are_the_planners() -> None:
    found = {query.slot: query for query in production_queries(8, "bfloat16")}
    assert found["kda_decode"].axes["H"] == 12
    assert found["kda_core_prefill"].state_dtype == "bfloat16"
    assert "vision_patch" in found
