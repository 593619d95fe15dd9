"""Scalar arithmetic, logic, shifts, bit fields, comparisons (SOP1, SOP2, SOPC, SOPK of the CDNA3 ISA document).

Scalars are Python integers: 32 or 64 bits, unsigned; SCC is 0 or 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from k3port.testing.amd_isa.build import Builder, Family, Target
from k3port.testing.amd_isa.core import EXEC, M32, M64, EmuError, Reader, Step, sx
from k3port.testing.amd_isa.operands import scalar32, scalar64
from k3port.testing.amd_isa.text import Instruction, Operand
from k3port.testing.amd_isa.wave import Wave

Unary = Callable[[int], int]
Binary = Callable[[int, int], int]
_READ: dict[int, Callable[[Operand], Reader]] = {32: scalar32, 64: scalar64}
_MASK = {32: M32, 64: M64}


def _writer(bits: int, dst: int) -> Callable[[Wave, int], None]:
    if bits == 64:
        return lambda w, x: w.w64(dst, x)
    return lambda w, x: w.w32(dst, x)


def _unary(bits: int, fn: Unary, sets_scc: bool, source_bits: int, target: Target, inst: Instruction) -> Step:
    a, put, mask = _READ[source_bits](inst.ops[1]), _writer(bits, inst.ops[0].index), _MASK[bits]

    def step(w: Wave) -> None:
        r = fn(a(w)) & mask
        put(w, r)
        if sets_scc:
            w.scc = int(r != 0)

    return step


def _binary(
    bits: int, fn: Binary, sets_scc: bool, target: Target, inst: Instruction, first: int = 0, second: int = 0
) -> Step:
    """``first`` and ``second`` are the widths of the sources where they differ from the result's."""
    a, b = _READ[first or bits](inst.ops[1]), _READ[second or bits](inst.ops[2])
    put, mask, dst = _writer(bits, inst.ops[0].index), _MASK[bits], inst.ops[0].index
    if bits == 32 and dst < EXEC:

        def short(w: Wave) -> None:
            w.S[dst] = r = fn(a(w), b(w)) & M32
            if sets_scc:
                w.scc = int(r != 0)

        return short

    def step(w: Wave) -> None:
        r = fn(a(w), b(w)) & mask
        put(w, r)
        if sets_scc:
            w.scc = int(r != 0)

    return step


# ---- one source


def _reversed(bits: int) -> Unary:
    return lambda x: int(f"{x:0{bits}b}"[::-1], 2)


def _zeros(bits: int) -> Unary:
    return lambda x: bits - x.bit_count()


def _first_one(x: int) -> int:
    return (x & -x).bit_length() - 1 if x else -1


def _first_zero(bits: int) -> Unary:
    return lambda x: _first_one(~x & _MASK[bits])


def _leading(bits: int) -> Unary:
    return lambda x: bits - x.bit_length() if x else -1


def _leading_signed(bits: int) -> Unary:
    """How many leading bits equal the sign, -1 if all."""
    return lambda x: _leading(bits)(x ^ _MASK[bits] if x >> (bits - 1) else x)


def _whole_quads(bits: int) -> Unary:
    return lambda x: sum(15 << k for k in range(0, bits, 4) if x >> k & 15)


def _one_source() -> dict[str, Builder]:
    found: dict[str, Builder] = {
        "s_abs_i32": partial(_unary, 32, lambda x: abs(sx(x, 32)), True, 32),
        "s_sext_i32_i8": partial(_unary, 32, lambda x: sx(x, 8), False, 32),
        "s_sext_i32_i16": partial(_unary, 32, lambda x: sx(x, 16), False, 32),
        "s_movk_i32": partial(_unary, 32, lambda x: sx(x, 16), False, 32),
        "s_flbit_i32": partial(_unary, 32, _leading_signed(32), False, 32),
        "s_flbit_i32_i64": partial(_unary, 32, _leading_signed(64), False, 64),
    }
    for bits in (32, 64):
        mask = _MASK[bits]
        found[f"s_mov_b{bits}"] = partial(_unary, bits, lambda x: x, False, bits)
        found[f"s_not_b{bits}"] = partial(_unary, bits, partial(operator.xor, mask), True, bits)
        found[f"s_brev_b{bits}"] = partial(_unary, bits, _reversed(bits), False, bits)
        found[f"s_wqm_b{bits}"] = partial(_unary, bits, _whole_quads(bits), True, bits)
        found[f"s_bcnt1_i32_b{bits}"] = partial(_unary, 32, int.bit_count, True, bits)
        found[f"s_bcnt0_i32_b{bits}"] = partial(_unary, 32, _zeros(bits), True, bits)
        found[f"s_ff1_i32_b{bits}"] = partial(_unary, 32, _first_one, False, bits)
        found[f"s_ff0_i32_b{bits}"] = partial(_unary, 32, _first_zero(bits), False, bits)
        found[f"s_flbit_i32_b{bits}"] = partial(_unary, 32, _leading(bits), False, bits)
    return found


# ---- two sources


def _bfe(bits: int, signed: bool) -> Binary:
    def fn(x: int, y: int) -> int:
        offset, width = y & (bits - 1), (y >> 16) & 0x7F
        r = ((sx(x, bits) if signed else x) >> offset) & ((1 << width) - 1)
        return sx(r, width) if signed and 0 < width <= bits else r

    return fn


def _bfm(bits: int) -> Binary:
    return lambda x, y: ((1 << (x & (bits - 1))) - 1) << (y & (bits - 1))


def _pack(upper_a: bool, upper_b: bool) -> Binary:
    return lambda x, y: ((x >> 16 * upper_a) & 0xFFFF) | (((y >> 16 * upper_b) & 0xFFFF) << 16)


_LOGIC: dict[str, Binary] = {
    "and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y, "andn2": lambda x, y: x & ~y,
    "orn2": lambda x, y: x | ~y, "nand": lambda x, y: ~(x & y), "nor": lambda x, y: ~(x | y),
    "xnor": lambda x, y: ~(x ^ y),
}  # fmt: skip
_SAVEEXEC: dict[str, Binary] = {**_LOGIC, "andn1": lambda x, y: ~x & y, "orn1": lambda x, y: ~x | y}


def _shifts(bits: int) -> dict[str, Binary]:
    m = bits - 1
    return {
        f"s_lshl_b{bits}": lambda x, y: x << (y & m),
        f"s_lshr_b{bits}": lambda x, y: x >> (y & m),
        f"s_ashr_i{bits}": lambda x, y: sx(x, bits) >> (y & m),
    }


def _two_sources() -> dict[str, Builder]:
    found: dict[str, Builder] = {
        "s_mul_i32": partial(_binary, 32, lambda x, y: x * y, False),
        "s_mul_hi_u32": partial(_binary, 32, lambda x, y: (x * y) >> 32, False),
        "s_mul_hi_i32": partial(_binary, 32, lambda x, y: (sx(x, 32) * sx(y, 32)) >> 32, False),
        "s_absdiff_i32": partial(_binary, 32, lambda x, y: abs(sx(x, 32) - sx(y, 32)), True),
        "s_pack_ll_b32_b16": partial(_binary, 32, _pack(False, False), False),
        "s_pack_lh_b32_b16": partial(_binary, 32, _pack(False, True), False),
        "s_pack_hh_b32_b16": partial(_binary, 32, _pack(True, True), False),
    }
    for bits in (32, 64):
        for name, fn in _LOGIC.items():
            found[f"s_{name}_b{bits}"] = partial(_binary, bits, fn, True)
        for name, fn in _shifts(bits).items():
            found[name] = partial(_binary, bits, fn, True, second=32)
        found[f"s_bfm_b{bits}"] = partial(_binary, bits, _bfm(bits), False, first=32, second=32)
        for t in "ui":
            found[f"s_bfe_{t}{bits}"] = partial(_binary, bits, _bfe(bits, t == "i"), True, second=32)
    return found


# ---- arithmetic with carry or overflow in SCC


def _add(sign: int, carry: bool, signed: bool, target: Target, inst: Instruction) -> Step:
    a, b, dst = scalar32(inst.ops[1]), scalar32(inst.ops[2]), inst.ops[0].index

    def step(w: Wave) -> None:
        x, y = a(w), b(w)
        r = x + sign * (y + (w.scc if carry else 0))
        if signed:
            w.scc = int(not -(2**31) <= sx(x, 32) + sign * sx(y, 32) < 2**31)
        else:
            w.scc = int(r > M32 or r < 0)
        w.w32(dst, r & M32)

    return step


def _shift_add(k: int, target: Target, inst: Instruction) -> Step:
    a, b, dst = scalar32(inst.ops[1]), scalar32(inst.ops[2]), inst.ops[0].index

    def step(w: Wave) -> None:
        r = (a(w) << k) + b(w)
        w.w32(dst, r & M32)
        w.scc = int(r > M32)

    return step


def _short_constant(add: bool, target: Target, inst: Instruction) -> Step:
    """s_addk_i32, s_mulk_i32."""
    constant = inst.ops[1].value
    if not isinstance(constant, int):
        raise EmuError(f"constant {inst.ops[1].text}")
    dst, v = inst.ops[0].index, sx(constant, 16)

    def step(w: Wave) -> None:
        x = sx(w.r32(dst), 32)
        r = x + v if add else x * v
        w.w32(dst, r & M32)
        if add:
            w.scc = int(not -(2**31) <= r < 2**31)

    return step


def _extreme(least: bool, signed: bool, target: Target, inst: Instruction) -> Step:
    a, b, dst = scalar32(inst.ops[1]), scalar32(inst.ops[2]), inst.ops[0].index

    def step(w: Wave) -> None:
        x, y = a(w), b(w)
        kx, ky = (sx(x, 32), sx(y, 32)) if signed else (x, y)
        first = kx < ky if least else kx > ky
        w.w32(dst, x if first else y)
        w.scc = int(first)

    return step


# ---- selection, comparison, EXEC


def _cmov(bits: int, target: Target, inst: Instruction) -> Step:
    a, put = _READ[bits](inst.ops[1]), _writer(bits, inst.ops[0].index)
    return lambda w: put(w, a(w)) if w.scc else None


def _cselect(bits: int, target: Target, inst: Instruction) -> Step:
    a, b, put = _READ[bits](inst.ops[1]), _READ[bits](inst.ops[2]), _writer(bits, inst.ops[0].index)
    return lambda w: put(w, a(w) if w.scc else b(w))


def _bitset(bits: int, one: bool, target: Target, inst: Instruction) -> Step:
    dst, a, put = inst.ops[0], scalar32(inst.ops[1]), _writer(bits, inst.ops[0].index)
    old = _READ[bits](dst)

    def step(w: Wave) -> None:
        bit = 1 << (a(w) & (bits - 1))
        put(w, old(w) | bit if one else old(w) & ~bit)

    return step


def _compare(bits: int, signed: int, fn: Callable[[int, int], bool], target: Target, inst: Instruction) -> Step:
    """``signed``: 0, or the bits of the second source that are sign-extended (16 in the SOPK forms)."""
    a, b = _READ[bits](inst.ops[0]), _READ[bits](inst.ops[1])

    def step(w: Wave) -> None:
        x, y = a(w), b(w)
        w.scc = int(fn(sx(x, bits), sx(y, signed)) if signed else fn(x, y))

    return step


def _bitcmp(bits: int, want: int, target: Target, inst: Instruction) -> Step:
    a, b = _READ[bits](inst.ops[0]), scalar32(inst.ops[1])

    def step(w: Wave) -> None:
        w.scc = int(((a(w) >> (b(w) & (bits - 1))) & 1) == want)

    return step


def _saveexec(fn: Binary, target: Target, inst: Instruction) -> Step:
    a, dst = scalar64(inst.ops[1]), inst.ops[0].index

    def step(w: Wave) -> None:
        old = w.ex
        new = fn(a(w), old) & M64
        w.w64(dst, old)
        w.set_exec(new)
        w.scc = int(new != 0)

    return step


_CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "lg": operator.ne, "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le,
}  # fmt: skip


def _others() -> dict[str, Builder]:
    found: dict[str, Builder] = {
        "s_add_u32": partial(_add, 1, False, False),
        "s_addc_u32": partial(_add, 1, True, False),
        "s_sub_u32": partial(_add, -1, False, False),
        "s_subb_u32": partial(_add, -1, True, False),
        "s_add_i32": partial(_add, 1, False, True),
        "s_sub_i32": partial(_add, -1, False, True),
        "s_addk_i32": partial(_short_constant, True),
        "s_mulk_i32": partial(_short_constant, False),
        "s_min_i32": partial(_extreme, True, True),
        "s_min_u32": partial(_extreme, True, False),
        "s_max_i32": partial(_extreme, False, True),
        "s_max_u32": partial(_extreme, False, False),
        "s_cmp_eq_u64": partial(_compare, 64, 0, operator.eq),
        "s_cmp_lg_u64": partial(_compare, 64, 0, operator.ne),
    }
    for k in (1, 2, 3, 4):
        found[f"s_lshl{k}_add_u32"] = partial(_shift_add, k)
    for name, condition in _CONDITIONS.items():
        found[f"s_cmp_{name}_u32"] = partial(_compare, 32, 0, condition)
        found[f"s_cmp_{name}_i32"] = partial(_compare, 32, 32, condition)
        found[f"s_cmpk_{name}_u32"] = partial(_compare, 32, 0, condition)
        found[f"s_cmpk_{name}_i32"] = partial(_compare, 32, 16, condition)
    for bits in (32, 64):
        found[f"s_cmov_b{bits}"] = partial(_cmov, bits)
        found[f"s_cselect_b{bits}"] = partial(_cselect, bits)
        for one in (0, 1):
            found[f"s_bitset{one}_b{bits}"] = partial(_bitset, bits, bool(one))
            found[f"s_bitcmp{one}_b{bits}"] = partial(_bitcmp, bits, one)
    for name, fn in _SAVEEXEC.items():
        found[f"s_{name}_saveexec_b64"] = partial(_saveexec, fn)
    return found


FAMILY = Family("scalar arithmetic", {**_one_source(), **_two_sources(), **_others()})
