"""Reading assembly text: operands, modifiers, labels, source lines, metadata."""

from __future__ import annotations

import amd_needs  # noqa: F401
import pytest

from k3port.testing.amd_isa.text import Instruction, parse_kernel, parse_operand


@pytest.mark.parametrize(
    ("text", "kind", "index", "count"),
    [
        ("v7", "v", 7, 1), ("a3", "v", 259, 1), ("v[4:7]", "v", 4, 4), ("a[0:15]", "v", 256, 16), ("s[2:3]", "s", 2, 2),
        ("vcc", "s", 106, 2), ("exec_hi", "s", 127, 1), ("m0", "s", 124, 1), ("off", "off", 0, 1), ("src_scc", "scc", 0, 1),
    ],
)  # fmt: skip
def test_registers(text: str, kind: str, index: int, count: int) -> None:
    o = parse_operand(text)
    assert (o.kind, o.index, o.count) == (kind, index, count)


@pytest.mark.parametrize(
    ("text", "value"),
    [("-5", -5), ("0x3f800000", 0x3F800000), ("1.0", 1.0), ("-0.5", -0.5), ("0.15915494", 0.15915494309189532)],
)
def test_immediates(text: str, value: float) -> None:
    o = parse_operand(text)
    assert o.kind == "imm"
    assert o.value == value
    assert type(o.value) is type(value)


def test_signs() -> None:
    o = parse_operand("-|v3|")
    assert (o.neg, o.abs, o.index) == (True, True, 3)
    assert parse_operand("sext(v1)").sext
    assert parse_operand("neg(s4)").neg


def test_absolute_value_of_a_pair() -> None:
    inst = Instruction("v_add_f64 v[0:1], -|v[6:7]|, |s[2:3]| clamp")
    assert [(o.kind, o.index, o.count, o.neg, o.abs) for o in inst.ops[1:]] == [
        ("v", 6, 2, True, True),
        ("s", 2, 2, False, True),
    ]
    assert list(inst.mods) == ["clamp"]


def test_code_without_a_line_stays_with_the_line_before() -> None:
    text = TEXT.replace(".loc\t2 99 1", ".loc\t2 0 0")
    assert [i.source for i in parse_kernel(text).instructions] == ["norm.py:12", "norm.py:12"]


def test_modifiers() -> None:
    inst = Instruction("v_pk_fma_f16 v0, v1, v2, v3 op_sel:[0,1] op_sel_hi:[1,0,1] clamp")
    assert inst.bits("op_sel", 3, 0) == [0, 1, 0]
    assert inst.bits("op_sel_hi", 3, 1) == [1, 0, 1]
    assert inst.bits("neg_lo", 3, 0) == [0, 0, 0]
    assert "clamp" in inst.mods
    assert [o.index for o in inst.ops] == [0, 1, 2, 3]
    assert Instruction("ds_read_b32 v1, v2 offset:0x10").num("offset") == 16


@pytest.mark.parametrize(
    ("op", "base", "enc"),
    [("v_add_f32_e32", "v_add_f32", "e32"), ("v_add_u32_sdwa", "v_add_u32", "sdwa"), ("v_mov_b32_e64_dpp", "v_mov_b32", "e64_dpp")],
)  # fmt: skip
def test_encodings(op: str, base: str, enc: str) -> None:
    inst = Instruction(f"{op} v0, v1, v2")
    assert (inst.base, inst.enc) == (base, enc)


TEXT = """
\t.file\t1 "/some/folder" "norm.py"
\t.file\t2 "/elsewhere/standard.py"
other:
\ts_nop 9
kern:
\t.loc\t1 12 4
\ts_nop 0 ; comment
.LBB0_1:
\t.loc\t2 99 1
\ts_branch .LBB0_1
.Lfunc_end0:
\ts_nop 1
\t.amdhsa_kernel kern
\t\t.amdhsa_user_sgpr_count 8
\t\t.amdhsa_next_free_vgpr .amdgcn.next_free_vgpr
\t.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
    .group_segment_fixed_size: 0
\t.end_amdgpu_metadata
"""


def test_a_kernel_text() -> None:
    kernel = parse_kernel(TEXT)
    assert kernel.name == "kern"
    assert [str(i) for i in kernel.instructions] == ["s_nop 0 (norm.py:12)", "s_branch .LBB0_1 (standard.py:99)"]
    assert kernel.labels == {".LBB0_1": 1}
    assert kernel.settings == {"user_sgpr_count": 8}
    assert kernel.args == [(0, 8, "global_buffer"), (8, 4, "by_value")]


def test_the_kernel_asked_for() -> None:
    assert [i.text for i in parse_kernel(TEXT, "other").instructions][:1] == ["s_nop 9"]
