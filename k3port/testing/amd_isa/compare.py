"""Vector comparisons (VOPC): one bit per active lane into VCC or a scalar pair; ``v_cmpx`` also sets EXEC."""

from __future__ import annotations

from functools import partial

import numpy as np

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import Array, Step, bc, mask2int, u32
from k3port.testing.amd_isa.dpp_sdwa import SDWA_MODIFIERS, source
from k3port.testing.amd_isa.text import Instruction
from k3port.testing.amd_isa.valu import Function
from k3port.testing.amd_isa.wave import Wave

_ALWAYS: dict[str, Function] = {
    "f": lambda a, b: np.zeros(64, bool),
    "t": lambda a, b: np.ones(64, bool),
    "tru": lambda a, b: np.ones(64, bool),
}
_ORDERED: dict[str, Function] = {
    "lt": np.less, "eq": np.equal, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_INTEGER = {**_ORDERED, "ne": np.not_equal, **_ALWAYS}
_FLOAT: dict[str, Function] = {
    **_ORDERED,
    **_ALWAYS,
    "lg": lambda a, b: (a < b) | (a > b),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}


def _in_class(a: Array, m: Array) -> Array:
    """Whether a number is in one of the classes of a bit mask.

    The classes: 0 and 1 NaN, 2 and 9 infinities, 3 and 8 normal, 4 and 7 denormal, 5 and 6 zero; the first of each pair
    is the negative one (all NaNs count as quiet ones).
    """
    a, m = bc(a), bc(m)
    s, zero, inf, nan = np.signbit(a), a == 0, np.isinf(a), np.isnan(a)
    denormal = (np.abs(a) < np.finfo(a.dtype).tiny) & ~zero
    normal = ~(zero | inf | nan | denormal)
    kinds = (nan, nan, inf & s, normal & s, denormal & s, zero & s, zero & ~s, denormal & ~s, normal & ~s, inf & ~s)
    r = np.zeros(64, bool)
    for k, v in enumerate(kinds):
        r |= v & ((m >> u32(k)) & u32(1)).astype(bool)
    return r


def _compare(fn: Function, types: tuple[str, str], sets_exec: bool, target: Target, inst: Instruction) -> Step:
    o = inst.ops
    dst = o[0].index
    a, b = source(inst, 0, o[1], types[0]), source(inst, 1, o[2], types[1])

    def step(w: Wave) -> None:
        m = mask2int(bc(fn(a(w), b(w))) & w.exm)
        w.w64(dst, m)
        if sets_exec:
            w.set_exec(m)

    return step


def _all_opcodes() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    tables = {
        **dict.fromkeys(("u16", "i16", "u32", "i32", "u64", "i64"), _INTEGER),
        **dict.fromkeys(("f16", "f32", "f64"), _FLOAT),
    }
    for prefix, sets_exec in (("v_cmp_", False), ("v_cmpx_", True)):
        for t, conditions in tables.items():
            for name, fn in conditions.items():
                found[f"{prefix}{name}_{t}"] = partial(_compare, fn, (t, t), sets_exec)
        for t in ("f16", "f32", "f64"):
            found[f"{prefix}class_{t}"] = partial(_compare, _in_class, (t, "u32"), sets_exec)
    return found


FAMILY = Family("vector comparisons", _all_opcodes(), SDWA_MODIFIERS)
