"""The MODE register: FP16_OVFL makes conversions saturate, other settings are refused."""

from __future__ import annotations

import numpy as np
import pytest
from amd_asm import run_asm

from k3port.testing.amd_isa import EmuError

SET = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1"
CLEAR = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0"
F = np.float32
HUGE, INF, NAN = F(1e6), F(np.inf), F(np.nan)


def half(x: float) -> int:
    return int(np.float16(x).view(np.uint16))


@pytest.mark.parametrize(
    ("op", "arch", "largest", "beyond", "infinity"),
    [
        # codes of the largest number, of an overflow and of an infinity without FP16_OVFL
        ("fp8", "gfx942", 0x7F, 0x80, 0x80),
        ("bf8", "gfx942", 0x7F, 0x80, 0x80),
        ("fp8", "gfx950", 0x7E, 0x7F, 0x7F),
        ("bf8", "gfx950", 0x7B, 0x7C, 0x7C),
    ],
)
def test_fp8_saturates_only_when_told(op: str, arch: str, largest: int, beyond: int, infinity: int) -> None:
    text = f"v_cvt_pk_{op}_f32 v0, v1, v2"
    nan = 0x80 if arch == "gfx942" else 0x7F
    v = {0: 0, 1: HUGE, 2: -HUGE}
    assert run_asm([SET, text], arch, v=v).v(0)[0] == largest | (largest | 0x80) << 8
    assert run_asm([text], arch, v=v).v(0)[0] == beyond | (beyond | 0x80) << 8
    assert run_asm([SET, CLEAR, text], arch, v=v).v(0)[0] == beyond | (beyond | 0x80) << 8
    assert run_asm([SET, text], arch, v={0: 0, 1: INF, 2: NAN}).v(0)[0] == largest | nan << 8
    assert run_asm([text], arch, v={0: 0, 1: INF, 2: NAN}).v(0)[0] == infinity | nan << 8


MAX, MIN = half(65504), half(-65504)


@pytest.mark.parametrize(
    ("text", "v", "want"),
    [
        ("v_cvt_f16_f32 v0, v1", {1: HUGE}, MAX),
        ("v_cvt_f16_f32 v0, v1", {1: -HUGE}, MIN),
        ("v_cvt_f16_f32 v0, v1", {1: INF}, half(np.inf)),
        ("v_cvt_f16_f32 v0, v1", {1: F(1.5)}, half(1.5)),
        ("v_add_f16 v0, v1, v1", {1: half(-60000)}, MIN),
        ("v_add_f16 v0, v1, v2", {1: half(-np.inf), 2: half(1)}, half(-np.inf)),
        ("v_add_f16_e64 v0, v1, v1 op_sel:[1,1,1]", {0: 7, 1: half(60000) << 16}, MAX << 16 | 7),
        ("v_rcp_f16 v0, v1", {1: 0}, half(np.inf)),
        ("v_rcp_f16 v0, v1", {1: 1}, MAX),
        ("v_cvt_f16_u16 v0, v1", {1: 65535}, MAX),
        ("v_pk_mul_f16 v0, v1, v1", {1: half(300) << 16 | half(np.inf)}, MAX << 16 | half(np.inf)),
        ("v_fma_mixlo_f16 v0, v1, v1, v1", {0: 0, 1: F(300)}, MAX),
        ("v_cvt_pk_f16_f32 v0, v1, v2", {1: HUGE, 2: -INF}, half(-np.inf) << 16 | MAX),
    ],
)
def test_f16_overflow_is_clamped_and_infinity_stays(text: str, v: dict, want: int) -> None:
    assert run_asm([SET, text], "gfx950", v=v).v(0)[0] == want


def test_f16_overflow_without_the_flag() -> None:
    assert run_asm("v_cvt_f16_f32 v0, v1", v={1: HUGE}).v(0)[0] == half(np.inf)
    assert run_asm("v_fma_mixlo_f16 v0, v1, v1, v1", v={0: 0, 1: F(300)}).v(0)[0] == half(np.inf)


def test_mode_is_read_back() -> None:
    text = ["s_mov_b32 s4, 1", "s_setreg_b32 hwreg(HW_REG_MODE, 23, 1), s4"]
    ran = run_asm([*text, "s_getreg_b32 s5, hwreg(HW_REG_MODE, 23, 1)", "s_getreg_b32 s6, hwreg(HW_REG_MODE, 4, 4)"])
    assert (ran.s(5), ran.s(6)) == (1, 15)
    assert run_asm("s_getreg_b32 s5, hwreg(HW_REG_MODE)").s(5) == 0x3F0


@pytest.mark.parametrize("fields", ["0, 2), 3", "2, 2), 3", "4, 4), 0", "6, 2), 0", "8, 1), 0", "12, 7), 1"])
def test_other_modes_are_refused(fields: str) -> None:
    with pytest.raises(EmuError, match="rounding, denormals"):
        run_asm(f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, {fields}")


def test_what_does_not_change_a_result_is_accepted() -> None:
    run_asm(["s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2), 0", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 9, 1), 0"])


def test_other_registers_are_refused() -> None:
    with pytest.raises(EmuError, match="hardware register"):
        run_asm("s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 0, 2), 0")


def test_a_kernel_that_starts_in_another_mode_is_refused() -> None:
    with pytest.raises(EmuError, match="amdhsa_float_denorm_mode_32 0"):
        run_asm("s_nop 0", settings={"float_denorm_mode_32": 0})
    ran = run_asm("v_cvt_f16_f32 v0, v1", v={1: HUGE}, settings={"fp16_overflow": 1, "float_denorm_mode_32": 3})
    assert ran.v(0)[0] == MAX
