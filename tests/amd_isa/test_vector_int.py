"""Vector integer instructions: every lane against Python integers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from amd_asm import LANES, run_asm

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
_rnd = random.Random(3)
EDGES = [0, 1, 2, 31, 32, 63, 0xFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, M32]
A, B, C = ([*EDGES, *(_rnd.getrandbits(32) for _ in range(64 - len(EDGES)))] for _ in range(3))
B = B[32:] + B[:32]
C = [x % 40 if k % 2 else x for k, x in enumerate(C[48:] + C[:48])]


def s32(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def perm(a: int, b: int, s: int) -> int:
    data = [(b >> 8 * k) & 255 for k in range(4)] + [(a >> 8 * k) & 255 for k in range(4)]
    out = 0
    for k in range(4):
        sel = (s >> 8 * k) & 255
        if sel <= 7:
            byte = data[sel]
        elif sel <= 11:
            byte = 255 if data[2 * (sel - 8) + 1] >= 128 else 0
        else:
            byte = 0 if sel == 12 else 255
        out |= byte << 8 * k
    return out


def bfe_i(a: int, b: int, c: int) -> int:
    width = c & 31
    return 0 if width == 0 else s32((s32(a) >> (b & 31)), width)


Function = Callable[[int, int, int], int]
THREE: dict[str, Function] = {
    "v_add_u32_e32": lambda a, b, c: a + b,
    "v_sub_u32_e32": lambda a, b, c: a - b,
    "v_subrev_u32_e32": lambda a, b, c: b - a,
    "v_and_b32": lambda a, b, c: a & b,
    "v_xnor_b32": lambda a, b, c: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b, c: b << (a & 31),
    "v_lshrrev_b32": lambda a, b, c: b >> (a & 31),
    "v_ashrrev_i32": lambda a, b, c: s32(b) >> (a & 31),
    "v_mul_lo_u32": lambda a, b, c: a * b,
    "v_mul_hi_u32": lambda a, b, c: (a * b) >> 32,
    "v_mul_hi_i32": lambda a, b, c: (s32(a) * s32(b)) >> 32,
    "v_mul_u32_u24": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF),
    "v_mul_i32_i24": lambda a, b, c: s32(a, 24) * s32(b, 24),
    "v_mul_hi_i32_i24": lambda a, b, c: (s32(a, 24) * s32(b, 24)) >> 32,
    "v_bfm_b32": lambda a, b, c: ((1 << (a & 31)) - 1) << (b & 31),
    "v_bcnt_u32_b32": lambda a, b, c: a.bit_count() + b,
    "v_min_i32": lambda a, b, c: min(s32(a), s32(b)),
    "v_max_u32": lambda a, b, c: max(a, b),
    "v_add_u16": lambda a, b, c: (a + b) & 0xFFFF,
    "v_ashrrev_i16": lambda a, b, c: (s32(b, 16) >> (a & 15)) & 0xFFFF,
    "v_pack_b32_f16": lambda a, b, c: (a & 0xFFFF) | (b & 0xFFFF) << 16,
    "v_mad_u32_u24 c": lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c,
    "v_mad_i32_i24 c": lambda a, b, c: s32(a, 24) * s32(b, 24) + c,
    "v_mad_u32_u16 c": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "v_and_or_b32 c": lambda a, b, c: (a & b) | c,
    "v_or3_b32 c": lambda a, b, c: a | b | c,
    "v_add3_u32 c": lambda a, b, c: a + b + c,
    "v_xad_u32 c": lambda a, b, c: (a ^ b) + c,
    "v_lshl_add_u32 c": lambda a, b, c: (a << (b & 31)) + c,
    "v_add_lshl_u32 c": lambda a, b, c: (a + b) << (c & 31),
    "v_lshl_or_b32 c": lambda a, b, c: (a << (b & 31)) | c,
    "v_bfi_b32 c": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32 c": lambda a, b, c: (a >> (b & 31)) & ((1 << (c & 31)) - 1),
    "v_bfe_i32 c": bfe_i,
    "v_perm_b32 c": perm,
    "v_alignbit_b32 c": lambda a, b, c: ((a << 32 | b) >> (c & 31)),
    "v_alignbyte_b32 c": lambda a, b, c: ((a << 32 | b) >> 8 * (c & 3)),
    "v_sad_u32 c": lambda a, b, c: abs(a - b) + c,
    "v_med3_u32 c": lambda a, b, c: sorted((a, b, c))[1],
    "v_med3_i32 c": lambda a, b, c: sorted(map(s32, (a, b, c)))[1],
    "v_min3_u32 c": lambda a, b, c: min(a, b, c),
    "v_max3_i32 c": lambda a, b, c: max(map(s32, (a, b, c))),
    "v_dot4_i32_i8 c": lambda a, b, c: c + sum(s32(a >> 8 * k, 8) * s32(b >> 8 * k, 8) for k in range(4)),
}  # fmt: skip
ONE: dict[str, Callable[[int], int]] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "v_ffbh_u32": lambda a: 32 - a.bit_length() if a else M32,
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1 if a else M32,
    "v_ffbh_i32": lambda a: next((k for k in range(1, 32) if (a >> (31 - k) & 1) != a >> 31), M32),
}


@pytest.mark.parametrize("name", THREE)
def test_two_or_three_sources(name: str) -> None:
    op, _, third = name.partition(" ")
    ran = run_asm(f"{op} v0, v1, v2{', v3' if third else ''}", v={1: A, 2: B, 3: C})
    assert ran.v(0).tolist() == [THREE[name](a, b, c) & M32 for a, b, c in zip(A, B, C, strict=True)]


@pytest.mark.parametrize("selectors", [0x07060302, 0x05040100, 0x0C0C0107, 0x000D0CFF, 0x0B030800])
def test_a_permutation_that_is_the_same_in_all_lanes(selectors: int) -> None:
    """From a scalar register, as the compiler has it; the last one takes the signs of halves."""
    wanted = [perm(a, b, selectors) for a, b in zip(A, B, strict=True)]
    assert run_asm("v_perm_b32 v0, v1, v2, s4", v={1: A, 2: B}, s={4: selectors}).v(0).tolist() == wanted
    one = run_asm("v_perm_b32 v0, s5, v2, s4", v={2: B}, s={4: selectors, 5: A[20]})
    assert one.v(0).tolist() == [perm(A[20], b, selectors) for b in B]


@pytest.mark.parametrize("name", ONE)
def test_one_source(name: str) -> None:
    assert run_asm(f"{name} v0, v1", v={1: A}).v(0).tolist() == [ONE[name](a) & M32 for a in A]


def _wide(ran_low: np.ndarray, ran_high: np.ndarray) -> list[int]:
    return [int(a) | int(b) << 32 for a, b in zip(ran_low, ran_high, strict=True)]


@pytest.mark.parametrize(
    ("text", "fn"),
    [
        ("v_lshlrev_b64 v[0:1], v3, v[1:2]", lambda x, c: x << (c & 63)),
        ("v_lshrrev_b64 v[0:1], v3, v[1:2]", lambda x, c: x >> (c & 63)),
        ("v_ashrrev_i64 v[0:1], v3, v[1:2]", lambda x, c: s32(x, 64) >> (c & 63)),
        ("v_lshl_add_u64 v[0:1], v[1:2], 3, v[1:2]", lambda x, c: (x << 3) + x),
        ("v_mad_u64_u32 v[0:1], s[8:9], v3, v3, v[1:2]", lambda x, c: c * c + x),
        ("v_mad_i64_i32 v[0:1], s[8:9], v3, v3, v[1:2]", lambda x, c: s32(c) * s32(c) + x),
    ],
)
def test_64_bits(text: str, fn: Callable[[int, int], int]) -> None:
    text = text.replace("v[0:1]", "v[4:5]")
    ran = run_asm(text, v={1: A, 2: B, 3: C})
    assert _wide(ran.v(4), ran.v(5)) == [fn(a | b << 32, c) & M64 for a, b, c in zip(A, B, C, strict=True)]


def test_carries() -> None:
    ran = run_asm(["v_add_co_u32_e32 v0, vcc, v1, v2", "v_addc_co_u32_e32 v3, vcc, v1, v2, vcc"], v={1: A, 2: B})
    both = [(a | a << 32) + (b | b << 32) for a, b in zip(A, B, strict=True)]
    assert _wide(ran.v(0), ran.v(3)) == [x & M64 for x in both]
    assert ran.waves[0].r64(106) == sum((x >> 64) << k for k, x in enumerate(both))
    ran = run_asm(["v_sub_co_u32_e32 v0, vcc, v1, v2", "v_subbrev_co_u32_e32 v3, vcc, v2, v1, vcc"], v={1: A, 2: B})
    assert _wide(ran.v(0), ran.v(3)) == [((a | a << 32) - (b | b << 32)) & M64 for a, b in zip(A, B, strict=True)]


@pytest.mark.parametrize("arch", ["gfx950"])
@pytest.mark.parametrize("table", [0x00, 0xFF, 0x96, 0xCA, 0x2B])
def test_bitop3(arch: str, table: int) -> None:
    ran = run_asm(f"v_bitop3_b32 v0, v1, v2, v3 bitop3:{table:#x}", arch, v={1: A, 2: B, 3: C})
    expected = [
        sum((table >> ((a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)) & 1) << k for k in range(32))
        for a, b, c in zip(A, B, C, strict=True)
    ]
    assert ran.v(0).tolist() == expected


def test_inactive_lanes_keep_their_value() -> None:
    ran = run_asm("v_add_u32 v0, v1, v2", v={0: 7, 1: A, 2: B}, exec_mask=0xFF)
    assert ran.v(0)[8:].tolist() == [7] * 56
    assert ran.v(0)[:8].tolist() == [(a + b) & M32 for a, b in zip(A[:8], B[:8], strict=True)]


def test_lane_numbers() -> None:
    ran = run_asm(["v_mbcnt_lo_u32_b32 v0, -1, 0", "v_mbcnt_hi_u32_b32 v0, -1, v0"])
    assert ran.v(0).tolist() == LANES.tolist()


def test_saturation() -> None:
    assert run_asm("v_add_u32_e64 v0, v1, v2 clamp", v={1: M32 - 1, 2: 5}).v(0)[0] == M32
    assert run_asm("v_sub_u32_e64 v0, v1, v2 clamp", v={1: 3, 2: 5}).v(0)[0] == 0
    assert run_asm("v_add_i32 v0, v1, v2 clamp", v={1: 0x7FFFFFFF, 2: 5}).v(0)[0] == 0x7FFFFFFF


def test_comparisons_write_masks() -> None:
    ran = run_asm("v_cmp_lt_i32_e64 s[0:1], v1, v2", v={1: A, 2: B}, exec_mask=M64 ^ 1)
    assert (
        ran.s(0) | ran.s(1) << 32 == sum((s32(a) < s32(b)) << k for k, (a, b) in enumerate(zip(A, B, strict=True))) & ~1
    )
    ran = run_asm(
        ["v_cmpx_eq_u32_e32 vcc, v1, v1", "v_cndmask_b32_e32 v0, v1, v2, vcc"], v={0: 0, 1: 4, 2: 6}, exec_mask=6
    )
    assert ran.waves[0].ex == 6
    assert ran.v(0)[:4].tolist() == [0, 6, 6, 0]


@pytest.mark.parametrize(
    ("op", "a", "b", "c"),
    [
        ("u64_u32", 0xFFFFFFFF, 0xFFFFFFFF, (1 << 64) - 1),
        ("u64_u32", 0xFFFFFFFF, 0xFFFFFFFF, 5),
        ("u64_u32", 1, 1, (1 << 64) - 1),
        ("i64_i32", -3, 5, 4),
        ("i64_i32", -3, 5, 15),
        ("i64_i32", -(2**31), -(2**31), 2**63 - 1),
        ("i64_i32", -(2**31), 2**31 - 1, -(2**63)),
        ("i64_i32", 7, 7, -50),
    ],
)
def test_carry_of_the_wide_multiply_add(op: str, a: int, b: int, c: int) -> None:
    """Bit 64 of the sum, for active lanes."""
    v = {2: a, 3: b, 4: c & 0xFFFFFFFF, 5: c >> 32 & 0xFFFFFFFF}
    ran = run_asm(f"v_mad_{op} v[0:1], s[4:5], v2, v3, v[4:5]", v=v, exec_mask=0xF0)
    total = a * b + c
    assert int(ran.v(0)[4]) | int(ran.v(1)[4]) << 32 == total & (1 << 64) - 1
    assert (ran.s(4), ran.s(5)) == (0xF0 if total >> 64 & 1 else 0, 0)
