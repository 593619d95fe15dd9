"""Vector arithmetic of f32, f64 and f16 (CDNA3 ISA: VOP1, VOP2, VOP3).

Fused operations of f32 and f16 go through f64 and are rounded from there; those of f64 are in ``fused64.py``. exp2,
log2, reciprocal and roots of f32 flush denormal inputs, exp2 and reciprocal denormal results too (LLVM scales around
them). All of these, sin and cos are correctly rounded, or with ``ulp_noise`` off by up to one ulp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from k3port.testing.amd_isa.build import Family
from k3port.testing.amd_isa.core import Array, f16, f32, f64, i32
from k3port.testing.amd_isa.dpp_sdwa import DPP_MODIFIERS, SDWA_MODIFIERS
from k3port.testing.amd_isa.fused64 import fma64
from k3port.testing.amd_isa.valu import Function, Table, nearest, one_ulp
from k3port.testing.amd_isa.vector_int import median

table = Table()
_SMALLEST_NORMAL = f32(1.1754944e-38)


def fma(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(f64) * b.astype(f64) + c.astype(f64)).astype(f32)


def fma16(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(f64) * b.astype(f64) + c.astype(f64)).astype(f16)


def _zeros(r: Array, a: Array, b: Array, positive: bool) -> Array:
    """A minimum or maximum in which -0 is less than +0, which numpy leaves open."""
    r = np.asarray(r)
    if r.all():
        return r
    signs = np.signbit(a), np.signbit(b)
    negative = signs[0] & signs[1] if positive else signs[0] | signs[1]
    return np.where((a == 0) & (b == 0), np.where(negative, r.dtype.type(-0.0), r.dtype.type(0)), r)


def fmax(a: Array, b: Array) -> Array:
    """The larger number; a NaN loses."""
    return _zeros(np.fmax(a, b), a, b, True)


def fmin(a: Array, b: Array) -> Array:
    """The smaller number; a NaN loses."""
    return _zeros(np.fmin(a, b), a, b, False)


def min3(a: Array, b: Array, c: Array) -> Array:
    return fmin(fmin(a, b), c)


def max3(a: Array, b: Array, c: Array) -> Array:
    return fmax(fmax(a, b), c)


def _ldexp(a: Array, b: Array) -> Array:
    return np.ldexp(a.astype(f64), np.maximum(np.minimum(b, 400), -400)).astype(f32)


def med3(a: Array, b: Array, c: Array) -> Array:
    """The median; the smallest number if there is a NaN."""
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, min3(a, b, c), median(a, b, c)) if nan.any() else median(a, b, c)


def minimum3(a: Array, b: Array, c: Array) -> Array:
    """With NaN if any is one."""
    x = _zeros(np.minimum(a, b), a, b, False)
    return _zeros(np.minimum(x, c), x, c, False)


def maximum3(a: Array, b: Array, c: Array) -> Array:
    """With NaN if any is one."""
    x = _zeros(np.maximum(a, b), a, b, True)
    return _zeros(np.maximum(x, c), x, c, True)


def _flush(x: Array) -> Array:
    small = np.abs(x) < _SMALLEST_NORMAL
    return np.where(small, np.copysign(f32(0), x), x) if small.any() else x


def _approximate(name: str, exact: Callable[[Array], Array], flush_in: bool = False, flush_out: bool = False) -> None:
    """An f32 function that hardware approximates; ``exact`` takes and gives f64."""

    def rounded(round_to_f32: Function) -> Function:
        def fn(a: Array) -> Array:
            r = round_to_f32(exact((_flush(a) if flush_in else a).astype(f64)))
            return _flush(r) if flush_out else r

        return fn

    table(name, "f32", "f32", rounded(nearest), rounded(one_ulp))


_approximate("v_exp_f32", np.exp2, flush_in=True, flush_out=True)
_approximate("v_log_f32", np.log2, flush_in=True)
_approximate("v_rcp_f32 v_rcp_iflag_f32", lambda a: 1.0 / a, flush_in=True, flush_out=True)
_approximate("v_rsq_f32", lambda a: 1.0 / np.sqrt(a), flush_in=True)
_approximate("v_sqrt_f32", np.sqrt, flush_in=True)
_approximate("v_sin_f32", lambda a: np.sin(a * 2 * np.pi))
_approximate("v_cos_f32", lambda a: np.cos(a * 2 * np.pi))

table("v_add_f32", "f32", "f32 f32", lambda a, b: a + b)
table("v_sub_f32", "f32", "f32 f32", lambda a, b: a - b)
table("v_subrev_f32", "f32", "f32 f32", lambda a, b: b - a)
table("v_mul_f32", "f32", "f32 f32", lambda a, b: a * b)
table("v_mul_legacy_f32", "f32", "f32 f32", lambda a, b: np.where((a == 0) | (b == 0), f32(0), a * b))
table("v_max_f32", "f32", "f32 f32", fmax)
table("v_min_f32", "f32", "f32 f32", fmin)
table("v_max3_f32", "f32", "f32 f32 f32", max3)
table("v_min3_f32", "f32", "f32 f32 f32", min3)
table("v_maximum3_f32", "f32", "f32 f32 f32", maximum3)
table("v_minimum3_f32", "f32", "f32 f32 f32", minimum3)
table("v_med3_f32", "f32", "f32 f32 f32", med3)
table("v_fma_f32 v_fmamk_f32 v_fmaak_f32", "f32", "f32 f32 f32", fma)
table("v_fmac_f32", "f32", "f32 f32 D", fma)
table("v_mad_f32", "f32", "f32 f32 f32", lambda a, b, c: a * b + c)
table("v_floor_f32", "f32", "f32", np.floor)
table("v_ceil_f32", "f32", "f32", np.ceil)
table("v_trunc_f32", "f32", "f32", np.trunc)
table("v_rndne_f32", "f32", "f32", np.rint)
# The fraction of a tiny negative number rounds to 1, which the ISA rules out: the largest number below 1 instead.
table("v_fract_f32", "f32", "f32", lambda a: np.minimum(a - np.floor(a), f32(1 - 2**-24)))
table("v_ldexp_f32", "f32", "f32 i32", _ldexp)
table("v_frexp_mant_f32", "f32", "f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a))
table("v_frexp_exp_i32_f32", "i32", "f32", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32))

table("v_add_f64", "f64", "f64 f64", lambda a, b: a + b)
table("v_mul_f64", "f64", "f64 f64", lambda a, b: a * b)
table("v_fma_f64", "f64", "f64 f64 f64", fma64)
table("v_fmac_f64", "f64", "f64 f64 D", fma64)
table("v_max_f64", "f64", "f64 f64", fmax)
table("v_min_f64", "f64", "f64 f64", fmin)
table("v_rcp_f64", "f64", "f64", lambda a: 1.0 / a)
table("v_rsq_f64", "f64", "f64", lambda a: 1.0 / np.sqrt(a))
table("v_sqrt_f64", "f64", "f64", np.sqrt)
table("v_floor_f64", "f64", "f64", np.floor)
table("v_ceil_f64", "f64", "f64", np.ceil)
table("v_rndne_f64", "f64", "f64", np.rint)
table("v_trunc_f64", "f64", "f64", np.trunc)
table("v_ldexp_f64", "f64", "f64 i32", np.ldexp)
table("v_fract_f64", "f64", "f64", lambda a: np.minimum(a - np.floor(a), 1 - 2.0**-53))
table("v_frexp_mant_f64", "f64", "f64", lambda a: np.where(np.isfinite(a), np.frexp(a)[0], a))
table("v_frexp_exp_i32_f64", "i32", "f64", lambda a: np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(i32))

table("v_add_f16", "f16", "f16 f16", lambda a, b: a + b)
table("v_sub_f16", "f16", "f16 f16", lambda a, b: a - b)
table("v_subrev_f16", "f16", "f16 f16", lambda a, b: b - a)
table("v_mul_f16", "f16", "f16 f16", lambda a, b: a * b)
table("v_max_f16", "f16", "f16 f16", fmax)
table("v_min_f16", "f16", "f16 f16", fmin)
table("v_fma_f16", "f16", "f16 f16 f16", fma16)
table("v_fmac_f16", "f16", "f16 f16 D", fma16)
table("v_max3_f16", "f16", "f16 f16 f16", max3)
table("v_min3_f16", "f16", "f16 f16 f16", min3)
table("v_med3_f16", "f16", "f16 f16 f16", med3)
table("v_ldexp_f16", "f16", "f16 i16", lambda a, b: np.ldexp(a.astype(f64), b.astype(i32)).astype(f16))


def _half(exact: Callable[[Array], Array]) -> Function:
    return lambda a: exact(a.astype(f64)).astype(f16)


for _name, _exact in {
    "rcp": lambda a: 1.0 / a, "rsq": lambda a: 1.0 / np.sqrt(a), "sqrt": np.sqrt, "exp": np.exp2, "log": np.log2,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rndne": np.rint,
}.items():  # fmt: skip
    table(f"v_{_name}_f16", "f16", "f16", _half(_exact))

FAMILY = Family("vector floats", table.opcodes(), DPP_MODIFIERS | SDWA_MODIFIERS | {"clamp", "mul", "div", "op_sel"})
