"""Scalar instructions: results and SCC worked out by hand."""

from __future__ import annotations

import pytest
from amd_asm import run_asm

M32, M64 = (1 << 32) - 1, (1 << 64) - 1

# text, sources (s4, s6), result in s0 (32 bits), SCC afterwards (None: as before, which is 1)
SHORT = [
    ("s_add_u32 s0, s4, s6", (M32, 2), 1, 1),
    ("s_addc_u32 s0, s4, s6", (5, 6), 12, 0),
    ("s_sub_u32 s0, s4, s6", (3, 5), M32 - 1, 1),
    ("s_subb_u32 s0, s4, s6", (9, 5), 3, 0),
    ("s_add_i32 s0, s4, s6", (0x7FFFFFFF, 1), 0x80000000, 1),
    ("s_sub_i32 s0, s4, s6", (5, 7), M32 - 1, 0),
    ("s_and_b32 s0, s4, s6", (12, 3), 0, 0),
    ("s_andn2_b32 s0, s4, s6", (0b1111, 0b0101), 0b1010, 1),
    ("s_nand_b32 s0, s4, s6", (M32, M32), 0, 0),
    ("s_lshl_b32 s0, s4, s6", (1, 33), 2, 1),
    ("s_ashr_i32 s0, s4, s6", (0x80000000, 31), M32, 1),
    ("s_mul_i32 s0, s4, s6", (M32, 7), M32 - 6, None),
    ("s_mul_hi_u32 s0, s4, s6", (M32, M32), M32 - 1, None),
    ("s_mul_hi_i32 s0, s4, s6", (M32, 7), M32, None),
    ("s_bfe_u32 s0, s4, s6", (0xABCD1234, 8 | 12 << 16), 0xD12, 1),
    ("s_bfe_i32 s0, s4, s6", (0x00000F00, 8 | 4 << 16), M32, 1),
    ("s_bfe_i32 s0, s4, s6", (0x80000000, 28 | 8 << 16), M32 - 7, 1),  # past the top: copies of the sign
    ("s_bfm_b32 s0, s4, s6", (4, 8), 0xF00, None),
    ("s_pack_ll_b32_b16 s0, s4, s6", (0x11112222, 0x33334444), 0x44442222, None),
    ("s_pack_lh_b32_b16 s0, s4, s6", (0x11112222, 0x33334444), 0x33332222, None),
    ("s_pack_hh_b32_b16 s0, s4, s6", (0x11112222, 0x33334444), 0x33331111, None),
    ("s_lshl2_add_u32 s0, s4, s6", (0x40000001, 1), 5, 1),
    ("s_min_i32 s0, s4, s6", (M32, 1), M32, 1),
    ("s_min_u32 s0, s4, s6", (M32, 1), 1, 0),
    ("s_max_u32 s0, s4, s6", (M32, 1), M32, 1),
    ("s_absdiff_i32 s0, s4, s6", (2, M32), 3, 1),
    ("s_abs_i32 s0, s4", (M32 - 4, 0), 5, 1),
    ("s_not_b32 s0, s4", (M32, 0), 0, 0),
    ("s_brev_b32 s0, s4", (1, 0), 0x80000000, None),
    ("s_sext_i32_i8 s0, s4", (0x1FF, 0), M32, None),
    ("s_bcnt1_i32_b32 s0, s4", (0xF0F, 0), 8, 1),
    ("s_bcnt0_i32_b32 s0, s4", (M32, 0), 0, 0),
    ("s_ff1_i32_b32 s0, s4", (0x50, 0), 4, None),
    ("s_ff1_i32_b32 s0, s4", (0, 0), M32, None),
    ("s_flbit_i32_b32 s0, s4", (0x10, 0), 27, None),
    ("s_flbit_i32 s0, s4", (M32 - 0xF, 0), 28, None),
    ("s_wqm_b32 s0, s4", (0x00100200, 0), 0x00F00F00, 1),
    ("s_movk_i32 s0, 0xfffe", (0, 0), M32 - 1, None),
    ("s_cselect_b32 s0, s4, s6", (3, 4), 3, None),
    ("s_mov_b32 s0, 1.0", (0, 0), 0x3F800000, None),
    ("s_mov_b32 s0, -3", (0, 0), M32 - 2, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sources", "result", "scc"), SHORT, ids=[f"{t[0]} {t[1]}" for t in SHORT])
def test_32_bits(text: str, sources: tuple[int, int], result: int, scc: int | None) -> None:
    ran = run_asm(text, s={4: sources[0], 6: sources[1]}, scc=1)
    assert ran.s(0) == result
    assert ran.scc == (1 if scc is None else scc)


WIDE = [
    ("s_and_b64 s[0:1], s[4:5], s[6:7]", (M64, 5), 5, 1),
    ("s_lshl_b64 s[0:1], s[4:5], s6", (3, 62), 3 << 62, 1),
    ("s_ashr_i64 s[0:1], s[4:5], s6", (1 << 63, 63), M64, 1),
    ("s_bfe_u64 s[0:1], s[4:5], s6", (0xFF << 40, 40 | 4 << 16), 15, 1),
    ("s_cselect_b64 s[0:1], s[4:5], s[6:7]", (8, 9), 9, None),
    ("s_not_b64 s[0:1], s[4:5]", (M64, 0), 0, 0),
    ("s_bfm_b64 s[0:1], s4, s6", (40, 4), ((1 << 40) - 1) << 4, None),
    ("s_mov_b64 s[0:1], -1", (0, 0), M64, None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "sources", "result", "scc"), WIDE, ids=[t[0] for t in WIDE])
def test_64_bits(text: str, sources: tuple[int, int], result: int, scc: int | None) -> None:
    s = {4: sources[0] & M32, 5: sources[0] >> 32, 6: sources[1] & M32, 7: sources[1] >> 32}
    ran = run_asm(text, s=s)
    assert ran.s(0) | ran.s(1) << 32 == result
    assert ran.scc == (scc or 0)


@pytest.mark.parametrize(
    ("text", "value", "scc"),
    [
        ("s_cmp_lt_i32 s4, 0", M32, 1), ("s_cmp_lt_u32 s4, 5", M32, 0), ("s_cmp_eq_u32 s4, 7", 7, 1),
        ("s_cmp_ge_i32 s4, -3", M32 - 1, 1), ("s_bitcmp1_b32 s4, 3", 8, 1), ("s_bitcmp0_b32 s4, 3", 8, 0),
        # 16-bit constants: signed ones are extended
        ("s_cmpk_gt_i32 s4, 0xff80", 0, 1), ("s_cmpk_gt_u32 s4, 0xff80", 0, 0), ("s_cmpk_eq_i32 s4, 0xffff", M32, 1),
    ],
)  # fmt: skip
def test_comparison(text: str, value: int, scc: int) -> None:
    assert run_asm(text, s={4: value}, scc=1 - scc).scc == scc


def test_in_place_constants() -> None:
    ran = run_asm("s_addk_i32 s0, 0xfff0", s={0: 3})
    assert (ran.s(0), ran.scc) == ((3 - 16) & M32, 0)
    assert run_asm("s_mulk_i32 s0, 0xfffe", s={0: 3}).s(0) == M32 - 5
    assert run_asm("s_bitset1_b32 s0, 4", s={0: 1}).s(0) == 17
    ran = run_asm("s_bitset0_b64 s[0:1], 33", s={0: 1, 1: 2})
    assert (ran.s(0), ran.s(1)) == (1, 0)
    assert run_asm("s_cmov_b32 s0, s1", s={0: 1, 1: 2}, scc=0).s(0) == 1


def test_saveexec() -> None:
    ran = run_asm("s_and_saveexec_b64 s[0:1], s[4:5]", s={4: 0xF0, 5: 0}, exec_mask=0x3C)
    assert (ran.s(0), ran.waves[0].ex, ran.scc) == (0x3C, 0x30, 1)
    ran = run_asm("s_andn2_saveexec_b64 s[0:1], s[4:5]", s={4: 0xF0, 5: 0}, exec_mask=0xF0)
    assert (ran.waves[0].ex, ran.scc) == (0, 0)


def test_branches_and_loops() -> None:
    loop = ["s_mov_b32 s0, 0", "L:", "s_add_u32 s0, s0, 3", "s_cmp_lt_u32 s0, 10", "s_cbranch_scc1 L", "s_branch E",
            "s_mov_b32 s0, 99", "E:", "s_nop 0"]  # fmt: skip
    ran = run_asm(loop)
    assert ran.s(0) == 12
    assert ran.outcome.instructions == 1 + 1 + 4 * 3 + 1 + 1 + 1


@pytest.mark.parametrize(("branch", "taken"), [("vccz", False), ("vccnz", True), ("execz", False), ("execnz", True)])
def test_conditional_branches(branch: str, taken: bool) -> None:
    text = ["s_mov_b32 s0, 0", f"s_cbranch_{branch} E", "s_mov_b32 s0, 1", "E:", "s_nop 0"]
    assert run_asm(text, s={106: 4, 107: 0}).s(0) == (0 if taken else 1)
