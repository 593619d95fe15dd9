"""Collectives: message sizes as token windows with exact edges, world sizes, nodes, capture."""

from __future__ import annotations

import pytest
from targets import codes, detail, k3_plan, k3_queries, kernels, target, would

from k3port.backends.limits import KIB, MIB, message_window
from k3port.oracle.predicates import reject
from k3port.oracle.spec import OpQuery, Plan

ROW = 7168 * 2
"""Bytes of one token in bfloat16."""
FUSED = "cuda.flashinfer_all_reduce"
TORCH = "cuda.torch_symmetric_all_reduce"
SYMMETRIC = "cuda.nccl_symmetric_all_reduce"


def windows(plan: Plan) -> list[tuple[int, int | None, str]]:
    """Kernels of ``all_reduce`` by token range, neighbours with the same kernel joined."""
    joined: list[tuple[int, int | None, str]] = []
    for s in plan.would_run:
        if s.op != "all_reduce":
            continue
        if joined and joined[-1][2] == s.kernel:
            joined[-1] = (joined[-1][0], s.tokens[1], s.kernel)
        else:
            joined.append((*s.tokens, s.kernel))
    return joined


@pytest.mark.parametrize(
    ("platform", "tp", "expected"),
    [
        ("h200", 2, [(1, 4681, FUSED), (4682, None, "cuda.nccl_all_reduce")]),
        ("h200", 4, [(1, 146, FUSED), (147, 2340, TORCH), (2341, None, SYMMETRIC)]),
        ("h200", 8, [(1, 36, FUSED), (37, 4681, TORCH), (4682, None, SYMMETRIC)]),
        ("b200", 8, [(1, 73, FUSED), (74, 9362, TORCH), (9363, None, SYMMETRIC)]),
        ("b300", 8, [(1, 292, FUSED), (293, 4681, TORCH), (4682, None, SYMMETRIC)]),
        ("gb200", 8, [(1, 9362, "cuda.flashinfer_mnnvl_all_reduce"), (9363, None, SYMMETRIC)]),
        ("rtx-pro-6000", 8, [(1, None, "cuda.nccl_all_reduce")]),
        ("mi355x", 8, [(1, 4681, "rocm.aiter_all_reduce"), (4682, None, "rocm.rccl_all_reduce")]),
        ("mi300x", 2, [(1, 4681, "rocm.aiter_all_reduce"), (4682, None, "rocm.rccl_all_reduce")]),
    ],
)
def test_windows(platform: str, tp: int, expected: list[tuple[int, int | None, str]]) -> None:
    assert windows(k3_plan(target(platform), tp)) == expected


def test_the_edges_are_the_limits_in_bytes() -> None:
    """The last token of a window still fits its limit, the next one does not."""
    for last, limit in ((36, MIB // 2), (4681, 64 * MIB), (9362, 128 * MIB), (292, 4 * MIB), (146, 2 * MIB)):
        assert last * ROW <= limit < (last + 1) * ROW


def test_symmetric_memory_serves_small_and_large_messages() -> None:
    """16 KiB is one token, 128 KiB begins at the tenth: between them it is not offered."""
    plan = k3_plan(target("h200"))
    for tokens, small, large in ((1, True, False), (2, False, False), (9, False, False), (10, False, True)):
        accepted = would(plan, "all_reduce", tokens=tokens).accepted
        assert (f"{SYMMETRIC}_small" in accepted, SYMMETRIC in accepted) == (small, large), tokens
    refused = codes(would(plan, "all_reduce", tokens=5))
    assert refused[SYMMETRIC] == refused[f"{SYMMETRIC}_small"] == "TOKENS"
    at_four = k3_plan(target("h200"), tp=4)
    assert SYMMETRIC not in would(at_four, "all_reduce", tokens=36).accepted
    assert SYMMETRIC in would(at_four, "all_reduce", tokens=37).accepted


def test_message_windows() -> None:
    query = OpQuery("all_reduce", None, {"D": 1024}, "float32", tp=8)
    assert message_window(query) == (1, None)
    assert message_window(query, 0, 16 * KIB) == (1, 4)
    assert message_window(query, 4096, 8192) == (1, 2)
    assert message_window(query, 4097, 8192) == (2, 2)
    assert message_window(query, 0, 4095) == (1, 0)
    assert message_window(query, 4097, 8191) == (1, 0)
    # Logits are gathered in float32 whatever the activations are.
    assert message_window(OpQuery("all_gather", None, {"V": 256}, "bfloat16"), 0, 4 * KIB) == (1, 4)


def test_a_limit_below_one_token_serves_nothing_and_splits_nothing() -> None:
    query = OpQuery("all_reduce", None, {"D": 1 << 20}, "float32", tp=8)
    spec = next(k for k in kernels() if k.name == FUSED)
    where = target("h200")
    assert spec.window(query, where) == (1, 0)
    wide = OpQuery(**{**query.__dict__, "dtype": "bfloat16"})
    rejection = reject(spec, wide, where, built_only=False)
    assert rejection is not None and rejection.code == "TOKENS"


def test_world_sizes() -> None:
    plan = k3_plan(target("h200"), tp=16, nodes=2)
    choice = would(plan, "all_reduce")
    assert choice.kernel == "cuda.nccl_all_reduce"
    assert codes(choice)[TORCH] == "AXIS"
    assert codes(choice)[FUSED] == "FEATURE"
    assert "serves 2, 4, 8 ranks on sm_90" in detail(would(k3_plan(target("h200"), tp=16), "all_reduce"), FUSED)
    assert "one NVLink domain" in detail(choice, SYMMETRIC)
    quick = codes(would(k3_plan(target("mi355x"), tp=16), "all_reduce"))
    assert quick["rocm.aiter_all_reduce"] == quick["rocm.aiter_quick_all_reduce_int8"] == "AXIS"


def test_an_nvlink_domain_reaches_over_nodes() -> None:
    mnnvl = "cuda.flashinfer_mnnvl_all_reduce"
    choice = would(k3_plan(target("gb300"), tp=16, nodes=4), "all_reduce")
    assert choice.kernel == mnnvl
    # 8 MiB.
    assert would(k3_plan(target("gb300"), tp=16, nodes=4), "all_reduce", tokens=586).kernel == SYMMETRIC
    assert would(k3_plan(target("gb200"), tp=16, nodes=4), "all_reduce", tokens=4681).kernel == mnnvl
    assert would(k3_plan(target("gb200"), tp=16, nodes=4), "all_reduce", tokens=4682).kernel == SYMMETRIC
    odd = would(k3_plan(target("gb300"), tp=16, nodes=2), "all_reduce")
    assert "16 on 4; asked for 16 on 2" in detail(odd, mnnvl)
    assert codes(would(k3_plan(target("b200")), "all_reduce"))[mnnvl] == "FEATURE"


def test_lossy_messages_are_never_taken_unasked() -> None:
    assert codes(would(k3_plan(target("mi355x")), "all_reduce"))["rocm.aiter_quick_all_reduce_int8"] == "NUMERICS"


def test_gloo_cannot_be_captured() -> None:
    for graph, code in ((True, "GRAPH"), (False, "OUTRANKED")):
        choice = would(k3_plan(target("h200"), graph=graph), "all_reduce")
        assert codes(choice)["portable.gloo_all_reduce"] == code


def test_one_rank_sends_nothing() -> None:
    for platform in ("h200", "mi355x", "cpu"):
        plan = k3_plan(target(platform), tp=1)
        for op in ("all_reduce", "all_gather"):
            assert would(plan, op).kernel == f"reference.{op}"


def test_missing_axes_do_not_break_a_window() -> None:
    bare = OpQuery("all_reduce", None, {}, "bfloat16")
    for spec in kernels():
        for platform in ("cpu", "h200", "gb300", "mi355x"):
            first, last = spec.window(bare, target(platform))
            assert first >= 1 and (last is None or last >= 0)


def test_queries_of_collectives_carry_what_windows_need() -> None:
    for query in k3_queries(8):
        if query.op == "all_reduce":
            assert query.axes["D"] * 2 == ROW
        if query.op == "all_gather":
            assert query.axes["V"] == 163840 // 8
