"""DPP, SDWA, lane movement, packed instructions, small-float conversions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from amd_asm import LANES, run_asm

from k3port.testing.amd_isa import EmuError

F = np.float32
N = (LANES + 100).tolist()


def lanes_of(text: str) -> list[int]:
    """Source lane of each lane, -1 where the destination (0) was left alone."""
    return [x - 100 if x else -1 for x in run_asm(text, v={0: 0, 1: N}).v(0).tolist()]


ROW = (LANES & ~15).tolist()
DPP = {
    "quad_perm:[3,2,1,0]": [(k & ~3) + 3 - (k & 3) for k in range(64)],
    "row_shr:1": [k - 1 if k % 16 else -1 for k in range(64)],
    "row_shl:2": [k + 2 if k % 16 < 14 else -1 for k in range(64)],
    "row_ror:3": [(k & ~15) + (k - 3) % 16 for k in range(64)],
    "row_mirror": [(k & ~15) + 15 - k % 16 for k in range(64)],
    "row_half_mirror": [(k & ~7) + 7 - k % 8 for k in range(64)],
    "row_newbcast:5": [r + 5 for r in ROW],
    "row_bcast:15": [r - 1 if r else -1 for r in ROW],
    "row_bcast:31": [31 if k > 31 else -1 for k in range(64)],
    "wave_ror:1": [(k - 1) % 64 for k in range(64)],
}  # fmt: skip


@pytest.mark.parametrize("control", DPP)
def test_dpp_patterns(control: str) -> None:
    assert lanes_of(f"v_mov_b32_dpp v0, v1 {control} row_mask:0xf bank_mask:0xf") == DPP[control]


def test_dpp_masks_and_bound_control() -> None:
    text = "v_add_u32_dpp v0, v1, v1 row_shr:1 row_mask:0xa bank_mask:0xf"
    got = run_asm(text, v={0: 1, 1: N}).v(0).tolist()
    assert got == [2 * k + 199 if k // 16 in (1, 3) and k % 16 else 1 for k in range(64)]
    got = (
        run_asm("v_mov_b32_dpp v0, v1 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:0", v={0: 1, 1: N}).v(0).tolist()
    )
    assert got == [k + 99 if k % 16 else 0 for k in range(64)]


def test_sdwa() -> None:
    v = {0: 0xAABBCCDD, 1: 0x11F23344, 2: 0x01020304}
    text = "v_add_u32_sdwa v0, v1, v2 dst_sel:{} dst_unused:{} src0_sel:BYTE_2 src1_sel:WORD_1"
    total = 0xF2 + 0x0102
    assert run_asm(text.format("DWORD", "UNUSED_PAD"), v=v).v(0)[0] == total
    assert run_asm(text.format("WORD_1", "UNUSED_PRESERVE"), v=v).v(0)[0] == total << 16 | 0xCCDD
    assert run_asm(text.format("BYTE_1", "UNUSED_PAD"), v=v).v(0)[0] == (total & 0xFF) << 8
    assert run_asm(text.format("BYTE_0", "UNUSED_SEXT"), v=v).v(0)[0] == 0xFFFFFFF4
    signed = "v_mov_b32_sdwa v0, sext(v1) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_2"
    assert run_asm(signed, v=v).v(0, np.int32)[0] == 0xF2 - 256


def test_reading_single_lanes() -> None:
    assert run_asm("v_readlane_b32 s0, v1, 17", v={1: N}).s(0) == 117
    assert run_asm("v_readfirstlane_b32 s0, v1", v={1: N}, exec_mask=0b1100).s(0) == 102
    ran = run_asm("v_writelane_b32 v1, 7, s3", s={3: 9}, v={1: N})
    assert ran.v(1).tolist() == [7 if k == 9 else k + 100 for k in range(64)]


@pytest.mark.parametrize("n", [16, 32])
def test_permlane_swaps(n: int) -> None:
    ran = run_asm(f"v_permlane{n}_swap_b32 v0, v1", "gfx950", v={0: LANES.tolist(), 1: N})
    odd = [(k // n) % 2 == 1 for k in range(64)]
    assert ran.v(0).tolist() == [k - n + 100 if odd[k] else k for k in range(64)]
    assert ran.v(1).tolist() == [k + 100 if odd[k] else k + n for k in range(64)]


def test_permutes_and_swizzles() -> None:
    back = run_asm(
        "ds_bpermute_b32 v0, v2, v1", v={0: 0, 1: N, 2: [4 * (63 - k) for k in range(64)]}, exec_mask=(1 << 64) - 2
    )
    assert back.v(0).tolist() == [0 if k == 0 else 163 - k if k != 63 else 0 for k in range(64)]
    push = run_asm("ds_permute_b32 v0, v2, v1", v={1: N, 2: [4 * ((k + 5) % 64) for k in range(64)]})
    assert push.v(0).tolist() == [(k - 5) % 64 + 100 for k in range(64)]
    assert lanes_of("ds_swizzle_b32 v0, v1 offset:swizzle(SWAP,16)") == [k ^ 16 for k in range(64)]
    assert lanes_of("ds_swizzle_b32 v0, v1 offset:swizzle(REVERSE,8)") == [k ^ 7 for k in range(64)]
    assert lanes_of('ds_swizzle_b32 v0, v1 offset:swizzle(BITMASK_PERM,"00p1i")') == [
        (k & 32) | (k & 4) | 2 | (~k & 1) for k in range(64)
    ]
    assert lanes_of("ds_swizzle_b32 v0, v1 offset:0x801b") == DPP["quad_perm:[3,2,1,0]"]


def halves(lo: float, hi: float) -> int:
    pair = np.array([lo, hi], np.float16).view(np.uint16)
    return int(pair[0]) | int(pair[1]) << 16


def test_packed_f16() -> None:
    v = {1: halves(1.5, -2), 2: halves(4, 8), 3: halves(0.5, 0.25)}
    assert run_asm("v_pk_add_f16 v0, v1, v2", v=v).v(0)[0] == halves(5.5, 6)
    assert run_asm("v_pk_mul_f16 v0, v1, v2 op_sel:[1,0] op_sel_hi:[0,1]", v=v).v(0)[0] == halves(-8, 12)
    assert run_asm("v_pk_fma_f16 v0, v1, v2, v3 neg_lo:[1,0,0] neg_hi:[0,0,1]", v=v).v(0)[0] == halves(-5.5, -16.25)
    assert run_asm("v_pk_add_u16 v0, v1, v2", v={1: 0xFFFF0001, 2: 0x00020003}).v(0)[0] == 0x00010004
    assert run_asm("v_pk_lshlrev_b16 v0, v1, v2", v={1: 0x00040001, 2: 0x00030003}).v(0)[0] == 0x00300006
    assert run_asm("v_pk_max_i16 v0, v1, v2", v={1: 0xFFFF0001, 2: 0x0002FFF0}).v(0)[0] == 0x00020001


def test_packed_f32() -> None:
    v = {2: F(1.5), 3: F(-2), 4: F(4), 5: F(8), 6: F(0.5), 7: F(0.25)}
    ran = run_asm("v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]", v=v)
    assert (ran.v(0, F)[0], ran.v(1, F)[0]) == (6.5, -15.75)
    ran = run_asm("v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1] neg_hi:[1,0]", v=v)
    assert (ran.v(0, F)[0], ran.v(1, F)[0]) == (-8, -12)
    ran = run_asm("v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]", v=v)
    assert (ran.v(0, F)[0], ran.v(1, F)[0]) == (-2, 4)


def test_upper_half_of_a_constant_as_f32_is_refused() -> None:
    v = {2: F(1.5), 3: F(-2)}
    ran = run_asm("v_pk_add_f32 v[0:1], v[2:3], 1.0 op_sel_hi:[1,0]", v=v)
    assert (ran.v(0, F)[0], ran.v(1, F)[0]) == (2.5, -1)
    assert run_asm("v_pk_add_f32 v[0:1], v[2:3], 0", v=v).v(1, F)[0] == -2
    with pytest.raises(EmuError, match=r"upper half of the constant 1\.0"):
        run_asm("v_pk_add_f32 v[0:1], v[2:3], 1.0", v=v)


def test_clamp_turns_nan_into_zero() -> None:
    nan = F(np.nan)
    assert run_asm("v_fma_mix_f32 v0, v1, v2, v2 clamp", v={1: nan, 2: F(1)}).v(0)[0] == 0
    assert run_asm("v_fma_mix_f32 v0, v1, v2, v2 clamp", v={1: F(0.25), 2: F(0.5)}).v(0, F)[0] == 0.625
    assert run_asm("v_pk_add_f16 v0, v1, v2 clamp", v={1: halves(np.nan, 3), 2: halves(1, -9)}).v(0)[0] == 0
    assert run_asm("v_pk_add_f16 v0, v1, v2 clamp", v={1: halves(0.5, 3), 2: 0}).v(0)[0] == halves(0.5, 1)


def test_packing_with_signs() -> None:
    v = {1: halves(1.5, 7), 2: halves(-2, 3)}
    assert run_asm("v_pack_b32_f16 v0, -v1, |v2|", v=v).v(0)[0] == halves(-1.5, 2)
    assert run_asm("v_pack_b32_f16 v0, v1, v2 op_sel:[1,0,0]", v=v).v(0)[0] == halves(7, -2)


def test_mixed_precision() -> None:
    v = {0: 0x12345678, 1: halves(1.5, -2), 2: F(3), 3: halves(0.5, 8)}
    ran = run_asm("v_fma_mix_f32 v0, v1, v2, v3 op_sel:[1,0,1] op_sel_hi:[1,0,1]", v=v)
    assert ran.v(0, F)[0] == -2 * 3 + 8
    ran = run_asm("v_fma_mixhi_f16 v0, v1, v2, v3 op_sel_hi:[1,0,1]", v=v)
    assert ran.v(0)[0] == int(np.float16(5).view(np.uint16)) << 16 | 0x5678
    ran = run_asm("v_dot2_f32_f16 v0, v1, v3, v2", v=v)
    assert ran.v(0, F)[0] == 1.5 * 0.5 - 2 * 8 + 3


@pytest.mark.parametrize(("arch", "dtype"), [("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)])
def test_fp8_flavours(arch: str, dtype: torch.dtype) -> None:
    x = torch.linspace(-20, 20, 128)
    codes = x.to(dtype).view(torch.uint8).numpy().astype(int)
    v = {1: x[:64].numpy(), 2: x[64:].numpy(), 0: 0x12345678}
    low = run_asm("v_cvt_pk_fp8_f32 v0, v1, v2", arch, v=v).v(0)
    assert low.tolist() == [0x12340000 | a | b << 8 for a, b in zip(codes[:64], codes[64:], strict=True)]
    high = run_asm("v_cvt_pk_fp8_f32 v0, v1, v2 op_sel:[0,0,1]", arch, v=v).v(0)
    assert high.tolist() == [0x5678 | (a | b << 8) << 16 for a, b in zip(codes[:64], codes[64:], strict=True)]
    back = run_asm("v_cvt_pk_f32_fp8_e64 v[4:5], v1 op_sel:[1,0]", arch, v={1: high.tolist()})
    np.testing.assert_array_equal(back.v(4, F), x.to(dtype).float()[:64].numpy())
    np.testing.assert_array_equal(back.v(5, F), x.to(dtype).float()[64:].numpy())
    byte = run_asm("v_cvt_f32_fp8_sdwa v0, v1 src0_sel:BYTE_3", arch, v={1: high.tolist()})
    np.testing.assert_array_equal(byte.v(0, F), x.to(dtype).float()[64:].numpy())


def test_scaled_conversions() -> None:
    scale = {3: F(4)}
    packed = {1: 0x0000A27B}  # fp4 codes 0xB, 0x7, 0x2, 0xA: -1.5, 6, 1, -1
    ran = run_asm("v_cvt_scalef32_pk_f32_fp4 v[4:5], v1, v3 op_sel:[1,0,0]", "gfx950", v={**packed, **scale})
    assert (ran.v(4, F)[0], ran.v(5, F)[0]) == (4, -4)
    ran = run_asm("v_cvt_scalef32_pk_fp4_f32 v0, v1, v2, v3 op_sel:[0,0,1,0]", "gfx950",
                  v={0: 0x11111111, 1: F(-6), 2: F(100), **scale})  # fmt: skip
    assert ran.v(0)[0] == 0x11117B11
    ran = run_asm("v_cvt_scalef32_pk_bf16_fp8 v0, v1, v3", "gfx950", v={1: 0x38 | 0xC0 << 8, **scale})
    assert ran.v(0)[0] == 0x4080 | 0xC100 << 16  # 1 * 4 and -2 * 4
