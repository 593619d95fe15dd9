"""What is not modelled is an error with its text; endless loops end; families do not overlap."""

from __future__ import annotations

import pytest
from amd_asm import run_asm

from k3port.testing.amd_isa import EmuError, HangError
from k3port.testing.amd_isa.build import Family, Target
from k3port.testing.amd_isa.execute import execute
from k3port.testing.amd_isa.memory import GlobalMemory
from k3port.testing.amd_isa.program import Program
from k3port.testing.amd_isa.registry import FAMILIES, OPCODES, merged


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("v_frobnicate_b32 v0, v1", "opcode v_frobnicate_b32"),
        ("v_add_f32 v0, v1, v2 sparkle:3", "modifier sparkle"),
        ("v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], 0 abid:1", "abid"),
        ("v_add_u32 v0, -v1, v2", "sign modifier"),
        ("s_cbranch_scc1 NOWHERE", "no label"),
        ("v_add_f32 v0", "operands"),
        ("buffer_load_dword v0, v1, s[4:7], 0 idxen", "idxen"),
        ("v_add3_u32 v0, v1, v2, v3 clamp", "integer clamp"),
        ("s_getpc_b64 s[0:1]", "opcode s_getpc_b64"),
    ],
)
def test_not_modelled(text: str, reason: str) -> None:
    with pytest.raises(EmuError) as caught:
        run_asm(text, source="norm.py")
    assert text in str(caught.value)
    assert "norm.py:7" in str(caught.value)
    assert reason in str(caught.value)


def test_what_is_not_reached_does_not_matter_and_is_listed() -> None:
    ran = run_asm(["s_branch E", "v_frobnicate_b32 v0, v1", "E:", "s_nop 0"], source="norm.py")
    assert list(ran.program.unknown) == ["v_frobnicate_b32"]
    assert "v_frobnicate_b32 v0, v1 (norm.py:7)" in ran.program.unknown["v_frobnicate_b32"]


@pytest.mark.parametrize("loop", [["L:", "s_branch L"], ["L:", "s_barrier", "s_branch L"]])
def test_an_endless_loop_ends(loop: list[str]) -> None:
    with pytest.raises(HangError, match="more than 500 instructions"):
        run_asm(loop, max_instructions=500)


def test_running_off_the_end() -> None:
    program = Program("kernel:\ns_branch E\nE:\n.Lfunc_end0:", "gfx942", "kernel")
    with pytest.raises(EmuError, match="beyond the end of kernel"):
        execute(program, (1, 1, 1), 1, b"", GlobalMemory(), 0)


def test_an_empty_text() -> None:
    with pytest.raises(EmuError, match="no instructions"):
        Program("; nothing\n", "gfx942", "kernel")


def test_an_unknown_architecture() -> None:
    with pytest.raises(EmuError, match="gfx1250"):
        Target("gfx1250")


def test_opcodes_have_one_family() -> None:
    assert len(OPCODES) == sum(len(f.opcodes) for f in FAMILIES) > 800
    twice = Family("twice", {"s_nop": FAMILIES[0].opcodes["s_mov_b32"]})
    with pytest.raises(ValueError, match="s_nop is in two families"):
        merged([*FAMILIES, twice])
