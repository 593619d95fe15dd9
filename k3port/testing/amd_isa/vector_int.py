"""Vector integer arithmetic, bit fields and shifts of 16, 32 and 64 bits (CDNA3 ISA: VOP1, VOP2, VOP3)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from k3port.testing.amd_isa.build import Family
from k3port.testing.amd_isa.core import LANES, M32, WAVE_SIZE, Array, bc, f64, i8, i16, i32, i64, u8, u16, u32, u64
from k3port.testing.amd_isa.dpp_sdwa import DPP_MODIFIERS, SDWA_MODIFIERS
from k3port.testing.amd_isa.formats import pack16
from k3port.testing.amd_isa.valu import Table

table = Table()


def _s5(x: Array) -> Array:
    return x & u32(31)


def _u24(x: Array) -> Array:
    return x & u32(0xFFFFFF)


def _s24(x: Array) -> Array:
    return (x.view(i32) << i32(8)) >> i32(8)


def _mulhi(a: Array, b: Array, t: type) -> Array:
    return ((a.astype(t) * b.astype(t)) >> t(32)).astype(u32)


def median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _bfe_u(a: Array, b: Array, c: Array) -> Array:
    offset, width = _s5(b), _s5(c)
    return np.where(width == 0, u32(0), (a >> offset) & ((u32(1) << width) - u32(1)))


def _bfe_i(a: Array, b: Array, c: Array) -> Array:
    offset, width = _s5(b), _s5(c).astype(u64)
    x = (np.asarray(a) >> offset.astype(i32)).astype(i64).view(u64)
    s = u64(64) - np.where(width == 0, u64(1), width)
    r = ((x << s).view(i64) >> s.astype(i64)).astype(i32)
    return np.where(width == 0, i32(0), r)


@lru_cache(maxsize=256)
def _columns(selectors: int) -> np.ndarray | None:
    """Where the four bytes lie in {0xFF00, a, b}, from the lowest byte of b on; None if a sign is among them."""
    found = [selectors >> 8 * k & 0xFF for k in range(4)]
    return None if any(8 <= x < 12 for x in found) else np.array([x if x < 8 else 8 + (x > 12) for x in found])


def _perm(a: Array, b: Array, s: Array) -> Array:
    """v_perm_b32: selectors 0-7 take bytes of {a, b}, 8-11 the sign of a half word, 12 zero, above all ones."""
    if s.ndim == 0 and (columns := _columns(int(s))) is not None:
        data = np.empty((WAVE_SIZE, 3), u32)
        data[:, 0], data[:, 1], data[:, 2] = b, a, u32(0xFF00)
        return data.view(u8).take(columns, 1).view(u32)[:, 0]
    data = (np.asarray(a).astype(u64) << u64(32)) | np.asarray(b).astype(u64)
    out: Array = u32(0)
    for k in range(4):
        sel = (np.asarray(s) >> u32(8 * k)) & u32(0xFF)
        byte = ((data >> ((sel & u32(7)).astype(u64) * u64(8))) & u64(0xFF)).astype(u32)
        sign_bit = (sel & u32(3)).astype(u64) * u64(16) + u64(15)
        sign = ((data >> sign_bit) & u64(1)).astype(u32) * u32(0xFF)
        byte = np.where(sel <= 7, byte, np.where(sel <= 11, sign, np.where(sel == 12, u32(0), u32(0xFF))))
        out = out | (byte << u32(8 * k))
    return out


def _popcount(x: Array) -> Array:
    return np.bitwise_count(x).astype(u32)


def _ffbh(x: Array) -> Array:
    """Leading zeros; -1 for 0."""
    x = np.asarray(x)
    r = u32(31) - np.floor(np.log2(np.maximum(x, 1).astype(f64))).astype(u32)
    return np.where(x == 0, u32(M32), r)


def _ffbh_signed(x: Array) -> Array:
    """Leading bits that equal the sign bit; -1 if all do."""
    x = np.asarray(x)
    return _ffbh(np.where(x < 0, ~x, x).view(u32))


def _ffbl(x: Array) -> Array:
    """Trailing zeros; -1 for 0."""
    x = np.asarray(x)
    low = x & (~x + u32(1))
    return np.where(x == 0, u32(M32), np.floor(np.log2(np.maximum(low, 1).astype(f64))).astype(u32))


def _bfrev(x: Array) -> Array:
    x = bc(x).astype(u32)
    b = np.unpackbits(x.view(u8).reshape(-1, 4), axis=1, bitorder="little")[:, ::-1]
    return np.packbits(b, axis=1, bitorder="little").view(u32).reshape(-1)


def _pair(a: Array, b: Array) -> Array:
    return (a.astype(u64) << u64(32)) | b.astype(u64)


def _dot4(a: Array, b: Array, c: Array, signed: bool) -> Array:
    t = i8 if signed else u8
    x = np.ascontiguousarray(bc(a)).view(t).reshape(-1, 4).astype(i64)
    y = np.ascontiguousarray(bc(b)).view(t).reshape(-1, 4).astype(i64)
    return ((x * y).sum(1) + bc(c).astype(i64)).astype(i32 if signed else u32)


_BELOW_LOW = ((u64(1) << np.minimum(LANES, 32).astype(u64)) - u64(1)).astype(u32)
_BELOW_HIGH = ((u64(1) << np.maximum(LANES - 32, 0).astype(u64)) - u64(1)).astype(u32)

table("v_mov_b32 v_accvgpr_read_b32 v_accvgpr_write_b32 v_accvgpr_mov_b32", "u32", "u32", lambda a: a)
table("v_mov_b64", "u64", "u64", lambda a: a)
table("v_not_b32", "u32", "u32", lambda a: ~a)
table("v_bfrev_b32", "u32", "u32", _bfrev)
table("v_ffbh_u32", "u32", "u32", _ffbh)
table("v_ffbh_i32", "u32", "i32", _ffbh_signed)
table("v_ffbl_b32", "u32", "u32", _ffbl)
table("v_add_u32 v_add_nc_u32 v_add_i32", "u32", "u32 u32", lambda a, b: a + b)
table("v_sub_u32 v_sub_i32", "u32", "u32 u32", lambda a, b: a - b)
table("v_subrev_u32", "u32", "u32 u32", lambda a, b: b - a)
table("v_and_b32", "u32", "u32 u32", lambda a, b: a & b)
table("v_or_b32", "u32", "u32 u32", lambda a, b: a | b)
table("v_xor_b32", "u32", "u32 u32", lambda a, b: a ^ b)
table("v_xnor_b32", "u32", "u32 u32", lambda a, b: ~(a ^ b))
table("v_lshlrev_b32", "u32", "u32 u32", lambda a, b: b << _s5(a))
table("v_lshrrev_b32", "u32", "u32 u32", lambda a, b: b >> _s5(a))
table("v_ashrrev_i32", "i32", "u32 i32", lambda a, b: b >> _s5(a).astype(i32))
table("v_lshlrev_b64", "u64", "u32 u64", lambda a, b: b << (a & u32(63)).astype(u64))
table("v_lshrrev_b64", "u64", "u32 u64", lambda a, b: b >> (a & u32(63)).astype(u64))
table("v_ashrrev_i64", "i64", "u32 i64", lambda a, b: b >> (a & u32(63)).astype(i64))
table("v_lshl_add_u64", "u64", "u64 u32 u64", lambda a, b, c: (a << (b & u32(7)).astype(u64)) + c)
table("v_mul_lo_u32", "u32", "u32 u32", lambda a, b: a * b)
table("v_mul_hi_u32", "u32", "u32 u32", lambda a, b: _mulhi(a, b, u64))
table("v_mul_hi_i32", "u32", "i32 i32", lambda a, b: _mulhi(a, b, i64))
table("v_mul_u32_u24", "u32", "u32 u32", lambda a, b: _u24(a) * _u24(b))
table("v_mul_i32_i24", "i32", "u32 u32", lambda a, b: _s24(a) * _s24(b))
table("v_mul_hi_u32_u24", "u32", "u32 u32", lambda a, b: _mulhi(_u24(a), _u24(b), u64))
table("v_mul_hi_i32_i24", "u32", "u32 u32", lambda a, b: _mulhi(_s24(a), _s24(b), i64))
table("v_mad_u32_u24", "u32", "u32 u32 u32", lambda a, b, c: _u24(a) * _u24(b) + c)
table("v_mad_i32_i24", "u32", "u32 u32 u32", lambda a, b, c: (_s24(a) * _s24(b)).view(u32) + c)
table("v_and_or_b32", "u32", "u32 u32 u32", lambda a, b, c: (a & b) | c)
table("v_or3_b32", "u32", "u32 u32 u32", lambda a, b, c: a | b | c)
table("v_add3_u32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c)
table("v_xad_u32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c)
table("v_lshl_add_u32", "u32", "u32 u32 u32", lambda a, b, c: (a << _s5(b)) + c)
table("v_add_lshl_u32", "u32", "u32 u32 u32", lambda a, b, c: (a + b) << _s5(c))
table("v_lshl_or_b32", "u32", "u32 u32 u32", lambda a, b, c: (a << _s5(b)) | c)
table("v_bfi_b32", "u32", "u32 u32 u32", lambda a, b, c: (a & b) | (~a & c))
table("v_bfm_b32", "u32", "u32 u32", lambda a, b: ((u32(1) << _s5(a)) - u32(1)) << _s5(b))
table("v_bfe_u32", "u32", "u32 u32 u32", _bfe_u)
table("v_bfe_i32", "i32", "i32 u32 u32", _bfe_i)
table("v_perm_b32", "u32", "u32 u32 u32", _perm)
table("v_alignbit_b32", "u32", "u32 u32 u32", lambda a, b, c: (_pair(a, b) >> _s5(c).astype(u64)).astype(u32))
table(
    "v_alignbyte_b32", "u32", "u32 u32 u32",
    lambda a, b, c: (_pair(a, b) >> (u64(8) * (c & u32(3)).astype(u64))).astype(u32),
)  # fmt: skip
table("v_bcnt_u32_b32", "u32", "u32 u32", lambda a, b: _popcount(a) + b)
table("v_mbcnt_lo_u32_b32", "u32", "u32 u32", lambda a, b: _popcount(a & _BELOW_LOW) + b)
table("v_mbcnt_hi_u32_b32", "u32", "u32 u32", lambda a, b: _popcount(a & _BELOW_HIGH) + b)
table("v_sad_u32", "u32", "u32 u32 u32", lambda a, b, c: np.maximum(a, b) - np.minimum(a, b) + c)
table("v_prng_b32", "u32", "u32", lambda a: (a << u32(1)) ^ np.where(a >> u32(31), u32(197), u32(0)))
table("v_dot4_i32_i8", "i32", "u32 u32 i32", lambda a, b, c: _dot4(a, b, c, True))
table("v_dot4c_i32_i8", "i32", "u32 u32 D", lambda a, b, c: _dot4(a, b, c, True))
table("v_dot4_u32_u8", "u32", "u32 u32 u32", lambda a, b, c: _dot4(a, b, c, False))

for _t in ("u32", "i32", "u16", "i16"):
    table(f"v_min_{_t}", _t, f"{_t} {_t}", np.minimum)
    table(f"v_max_{_t}", _t, f"{_t} {_t}", np.maximum)
    table(f"v_min3_{_t}", _t, f"{_t} {_t} {_t}", lambda a, b, c: np.minimum(np.minimum(a, b), c))
    table(f"v_max3_{_t}", _t, f"{_t} {_t} {_t}", lambda a, b, c: np.maximum(np.maximum(a, b), c))
    table(f"v_med3_{_t}", _t, f"{_t} {_t} {_t}", median)

table("v_add_u16", "u16", "u16 u16", lambda a, b: a + b)
table("v_sub_u16", "u16", "u16 u16", lambda a, b: a - b)
table("v_subrev_u16", "u16", "u16 u16", lambda a, b: b - a)
table("v_mul_lo_u16", "u16", "u16 u16", lambda a, b: a * b)
table("v_mad_legacy_u16 v_mad_u16", "u16", "u16 u16 u16", lambda a, b, c: a * b + c)
table("v_lshlrev_b16", "u16", "u16 u16", lambda a, b: b << (a & u16(15)))
table("v_lshrrev_b16", "u16", "u16 u16", lambda a, b: b >> (a & u16(15)))
table("v_ashrrev_i16", "i16", "u16 i16", lambda a, b: b >> (a & u16(15)).astype(i16))
table("v_mad_u32_u16", "u32", "u16 u16 u32", lambda a, b, c: a.astype(u32) * b.astype(u32) + c)
table("v_pack_b32_f16", "u32", "f16 f16", lambda a, b: pack16(a.view(u16), b.view(u16)))

FAMILY = Family("vector integers", table.opcodes(), DPP_MODIFIERS | SDWA_MODIFIERS | {"clamp", "op_sel"})
