"""Memory instructions: widths, bounds, atomics, LDS, the moment when a direct-to-LDS copy lands, races."""

from __future__ import annotations

import numpy as np
import pytest
from amd_asm import LANES, memory_of, run_asm

from k3port.testing.amd_isa import EmuError

M32 = (1 << 32) - 1


def pointer(a: np.ndarray, first: int) -> dict[int, int]:
    return {first: a.ctypes.data & M32, first + 1: a.ctypes.data >> 32}


def offsets(stride: int) -> list[int]:
    return (LANES * stride).tolist()


@pytest.mark.parametrize(
    ("op", "stride", "want"),
    [
        ("ubyte", 1, lambda x: x.view(np.uint8)[:64].astype(np.uint32)),
        ("sbyte", 1, lambda x: x.view(np.int8)[:64].astype(np.int32).view(np.uint32)),
        ("ushort", 2, lambda x: x.view(np.uint16)[:64].astype(np.uint32)),
        ("sshort", 2, lambda x: x.view(np.int16)[:64].astype(np.int32).view(np.uint32)),
        ("short_d16", 2, lambda x: x.view(np.uint16)[:64] | np.uint32(0xABCD0000)),
        ("short_d16_hi", 2, lambda x: x.view(np.uint16)[:64].astype(np.uint32) << np.uint32(16) | np.uint32(0x1234)),
        ("dword", 4, lambda x: x[:64]),
    ],
)
def test_loads(op: str, stride: int, want) -> None:
    x = np.random.default_rng(1).integers(0, 2**32, 80, dtype=np.uint32)
    ran = run_asm(
        f"global_load_{op} v0, v1, s[2:3]",
        v={0: 0xABCD1234, 1: offsets(stride)},
        s=pointer(x, 2),
        memory=memory_of(x=x),
    )
    np.testing.assert_array_equal(ran.v(0), want(x))


@pytest.mark.parametrize("words", [2, 3, 4])
@pytest.mark.parametrize("active", [(1 << 64) - 1, 0x5555])
def test_wide_loads_and_stores(words: int, active: int) -> None:
    x = np.arange(64 * words, dtype=np.uint32)
    y = np.zeros(64 * words + 1, np.uint32)
    last = 3 + words
    text = [
        f"global_load_dwordx{words} v[4:{last}], v1, s[2:3]",
        f"global_store_dwordx{words} v1, v[4:{last}], s[6:7] offset:4",
    ]
    run_asm(
        text,
        v={1: offsets(4 * words)},
        s={**pointer(x, 2), **pointer(y, 6)},
        memory=memory_of(x=x, y=y),
        exec_mask=active,
    )
    lanes = np.array([active >> k & 1 for k in range(64)], bool)
    np.testing.assert_array_equal(y[1:].reshape(64, words), np.where(lanes[:, None], x.reshape(64, words), 0))


def test_addresses_per_lane() -> None:
    x = np.arange(64, dtype=np.uint32)
    at = [x.ctypes.data + 4 * (63 - k) for k in range(64)]
    v = {2: [p & M32 for p in at], 3: [p >> 32 for p in at]}
    assert run_asm("global_load_dword v0, v[2:3], off", v=v, memory=memory_of(x=x)).v(0).tolist() == x[::-1].tolist()


def test_out_of_bounds_names_the_tensor_and_the_source_line() -> None:
    x, y = np.zeros(64, np.uint32), np.zeros(4096, np.uint32)
    with pytest.raises(
        EmuError, match=r"global_load_dword.*\(kern\.py:7\).*offset 256 of weights, which has 256 bytes"
    ):
        run_asm("global_load_dword v0, v1, s[2:3]", v={1: offsets(4)[1:] + [256]}, s=pointer(x, 2),
                memory=memory_of(weights=x, other=y), source="kern.py")  # fmt: skip
    with pytest.raises(EmuError, match="of weights"):
        run_asm(
            "global_store_dword v1, v0, s[2:3]",
            v={0: 0, 1: [-4] + [0] * 63},
            s=pointer(x, 2),
            memory=memory_of(weights=x),
        )
    with pytest.raises(EmuError, match=r"s_load_dwordx4.*offset 244 of weights"):
        run_asm("s_load_dwordx4 s[8:11], s[2:3], 0xf4", s=pointer(x, 2), memory=memory_of(weights=x))


def test_an_inactive_lane_may_point_anywhere() -> None:
    x = np.zeros(64, np.uint32)
    v = {0: 9, 1: [0] * 63 + [1 << 30]}
    run_asm("global_store_dword v1, v0, s[2:3]", v=v, s=pointer(x, 2), memory=memory_of(x=x), exec_mask=(1 << 63) - 1)
    assert x[0] == 9


def test_buffers_end_where_their_descriptor_says() -> None:
    """What is beyond reads zero and is not stored, if it has the offset of a masked lane."""
    x = np.arange(64, dtype=np.uint32) + 1
    s = {**pointer(x, 4), 6: 128, 7: 0x27000, 8: 16}
    at = [4 * k if k < 27 else 0x80000000 for k in range(64)]
    ran = run_asm("buffer_load_dword v0, v1, s[4:7], s8 offen offset:4", v={1: at}, s=s, memory=memory_of(x=x))
    assert ran.v(0).tolist() == [k + 6 if k < 27 else 0 for k in range(64)]
    at = [4 * k if k < 32 else 0x80000000 for k in range(64)]
    run_asm("buffer_store_dword v0, v1, s[4:7], 0 offen", v={0: 7, 1: at}, s=s, memory=memory_of(x=x))
    assert x.tolist() == [7] * 32 + list(range(33, 65))


@pytest.mark.parametrize("op", ["buffer_load_dword", "buffer_store_dword", "buffer_atomic_add"])
@pytest.mark.parametrize(("stray", "shown"), [(-4, r"-4 as a signed"), (125, "offset 125"), (0x80000004, "2147483652")])
def test_a_stray_buffer_offset_is_an_error(op: str, stray: int, shown: str) -> None:
    x = np.arange(64, dtype=np.uint32)
    s, at = {**pointer(x, 4), 6: 128, 7: 0x27000}, [0] * 63 + [stray & M32]
    text = f"{op} v0, v1, s[4:7], 0 offen"
    with pytest.raises(EmuError, match=f"{op}.*buffer access out of bounds: .*{shown}"):
        run_asm(text, v={0: 0, 1: at}, s=s, memory=memory_of(x=x))
    run_asm(text, v={0: 0, 1: at}, s=s, memory=memory_of(x=x), exec_mask=(1 << 63) - 1)


def test_scratch() -> None:
    text = ["scratch_store_dword off, v1, off offset:8", "scratch_load_dword v0, off, off offset:8"]
    ran = run_asm(text, v={1: offsets(3)}, settings={"private_segment_fixed_size": 12})
    assert ran.v(0).tolist() == offsets(3)
    with pytest.raises(EmuError, match="scratch access out of bounds"):
        run_asm(text, v={1: 0}, settings={"private_segment_fixed_size": 8})
    unwritten = run_asm(text[1], settings={"private_segment_fixed_size": 12})
    assert np.isnan(unwritten.v(0, np.float32)).all()


def test_scalar_loads() -> None:
    x = np.arange(16, dtype=np.uint32)
    ran = run_asm(
        ["s_load_dwordx2 s[8:9], s[2:3], 0x8", "s_load_dword s10, s[2:3], s11"],
        s={**pointer(x, 2), 11: 20},
        memory=memory_of(x=x),
    )
    assert [ran.s(k) for k in (8, 9, 10)] == [2, 3, 5]


@pytest.mark.parametrize(
    ("name", "start", "value", "want"),
    [
        ("add", 5, 2, 5 + 64 * 2), ("umax", 5, 9, 9), ("smin", 5, -3 & M32, -3 & M32), ("xor", 5, 1, 5), ("swap", 5, 8, 8),
    ],
)  # fmt: skip
def test_atomics(name: str, start: int, value: int, want: int) -> None:
    x = np.array([start, 0], np.uint32)
    ran = run_asm(
        f"global_atomic_{name} v0, v1, v2, s[2:3] sc0", v={1: 0, 2: value}, s=pointer(x, 2), memory=memory_of(x=x)
    )
    assert x.tolist() == [want, 0]
    assert ran.v(0)[0] == start


def test_float_atomics_and_compare_and_swap() -> None:
    x = np.array([1.5, 0], np.float32)
    run_asm(
        "global_atomic_add_f32 v1, v2, s[2:3]", v={1: 0, 2: np.float32(0.25)}, s=pointer(x, 2), memory=memory_of(x=x)
    )
    assert x[0] == 1.5 + 16
    y = np.array([4], np.uint32)
    v = {1: 0, 2: list(range(5, 69)), 3: list(range(4, 68))}  # each lane replaces what the lane before it wrote
    run_asm("global_atomic_cmpswap v1, v[2:3], s[2:3]", v=v, s=pointer(y, 2), memory=memory_of(y=y))
    assert y[0] == 68


def test_lds() -> None:
    text = ["ds_write_b32 v1, v2 offset:4", "ds_read_b32 v0, v1 offset:4"]
    assert run_asm(text, v={1: offsets(4), 2: offsets(7)}, lds=260).v(0).tolist() == offsets(7)
    text = ["ds_write2_b32 v1, v2, v3 offset0:1 offset1:0", "ds_read_b64 v[4:5], v1"]
    ran = run_asm(text, v={1: offsets(8), 2: offsets(2), 3: offsets(3)}, lds=512)
    assert (ran.v(4).tolist(), ran.v(5).tolist()) == (offsets(3), offsets(2))
    text = [
        "ds_write_b16 v1, v2",
        "ds_write_b8_d16_hi v1, v2 offset:2",
        "ds_read_u16 v0, v1",
        "ds_read_i8 v3, v1 offset:2",
    ]
    ran = run_asm(text, v={1: offsets(4), 2: 0x00F0ABCD}, lds=256)
    assert (ran.v(0)[3], ran.v(3, np.int32)[3]) == (0xABCD, -16)
    ran = run_asm(["ds_add_rtn_u32 v0, v1, v2"], v={1: 0, 2: 1}, lds=4)
    assert ran.v(0).tolist() == [(M32 + k) & M32 for k in range(64)]


def test_unwritten_lds_and_registers_are_nan() -> None:
    ran = run_asm(
        ["ds_read_b32 v0, v1", "v_add_f32 v3, v2, 1.0", "v_pk_add_f16 v4, v5, v5"], v={1: offsets(4)}, lds=256
    )
    assert np.isnan(ran.v(0, np.float32)).all()
    assert np.isnan(ran.v(3, np.float32)).all()
    assert np.isnan(ran.v(4, np.float16)).all()
    assert np.isnan(np.uint32(ran.s(40)).view(np.float32))


def test_reading_lds_that_was_never_written_is_reported() -> None:
    """Also where the pattern is an ordinary number; after the write, and without the check, not."""
    never = "never written"
    for op in ("ds_read_u8 v0, v1", "ds_read_b64 v[4:5], v1", "ds_add_u32 v1, v2"):
        assert any(never in r and op in r for r in run_asm(op, v={1: offsets(8), 2: 1}, lds=520).outcome.races)
        assert run_asm(op, v={1: offsets(8), 2: 1}, lds=520, race_check=False).outcome.races == ()
        written = ["ds_write_b64 v1, v[2:3]", "s_barrier", op]
        assert run_asm(written, v={1: offsets(8), 2: 1, 3: 2}, lds=520).outcome.races == ()
    hole = ["ds_write_b32 v1, v2", "s_barrier", "ds_read_b64 v[4:5], v1"]
    assert any(never in r for r in run_asm(hole, v={1: offsets(8), 2: 1}, lds=5000).outcome.races)
    late = ["ds_write_b32 v1, v2", "s_barrier", "ds_read_b32 v4, v1 offset:4096"]
    assert any(never in r for r in run_asm(late, v={1: offsets(4), 2: 1}, lds=8192).outcome.races)


def test_lds_base_and_offset_wrap() -> None:
    """The compiler folds base - 512 + 512 into a negative base and an offset."""
    base = [4 * k - 512 for k in range(64)]
    text = ["ds_write_b32 v1, v2 offset:512", "ds_read2_b32 v[4:5], v1 offset0:128 offset1:129"]
    ran = run_asm(text, v={1: base, 2: offsets(3)}, lds=260, race_check=False)
    assert ran.v(4).tolist() == offsets(3)
    assert ran.v(5).tolist() == [*offsets(3)[1:], M32]
    ran = run_asm(["ds_write_b32 v1, v2 offset:512", "ds_add_rtn_u32 v0, v1, v3 offset:512"],
                  v={1: base, 2: 5, 3: 1}, lds=256)  # fmt: skip
    assert ran.v(0).tolist() == [5] * 64
    with pytest.raises(EmuError, match=r"byte 4294967292\+4 of 256"):
        run_asm("ds_read_b32 v0, v1 offset:508", v={1: base}, lds=256)


def test_lds_ends_at_its_size() -> None:
    with pytest.raises(EmuError, match=r"ds_read_b32.*LDS access out of bounds: byte 252\+4 of 252"):
        run_asm("ds_read_b32 v0, v1", v={1: offsets(4)}, lds=252)
    with pytest.raises(EmuError, match=r"LDS access out of bounds: byte 252\+4 of 252"):
        run_asm("ds_add_rtn_u32 v0, v1, v2", v={1: offsets(4), 2: 1}, lds=252)


@pytest.mark.parametrize(("bits", "t"), [(16, np.uint16), (8, np.uint8)])
def test_transposing_read(bits: int, t: type) -> None:
    """Groups of 16 lanes: lane i reads row i of bytes, and gets a column of the matrix that is 16 wide."""
    n = 64 // bits
    data = np.random.default_rng(2).integers(0, 2**bits, 64 * n).astype(t)
    v = {1: offsets(8), 2: data.view(np.uint32)[0::2], 3: data.view(np.uint32)[1::2]}
    ran = run_asm(["ds_write_b64 v1, v[2:3]", f"ds_read_b64_tr_b{bits} v[4:5], v1"], "gfx950", v=v, lds=512)
    got = np.stack([ran.v(4), ran.v(5)], 1).copy().view(t)
    for group in range(4):
        matrix = data[16 * n * group :][: 16 * n].reshape(n, 16)
        for lane in range(16):
            assert got[16 * group + lane].tolist() == matrix[:, lane].tolist()


COPY = "global_load_lds_dword v1, s[2:3]"


@pytest.mark.parametrize(
    ("waits", "landed"),
    [([], False), (["s_waitcnt lgkmcnt(0)"], False), (["s_waitcnt vmcnt(1)"], False), (["s_waitcnt vmcnt(0)"], True),
     (["global_load_dword v9, v1, s[2:3]", "s_waitcnt vmcnt(1)"], True), (["s_waitcnt 0"], True)],
)  # fmt: skip
def test_a_direct_copy_lands_at_the_wait_that_covers_it(waits: list[str], landed: bool) -> None:
    x = np.arange(64, dtype=np.uint32)
    ran = run_asm(
        [COPY, *waits, "ds_read_b32 v0, v1"],
        v={1: offsets(4)},
        s={**pointer(x, 2), 124: 0},
        memory=memory_of(x=x),
        lds=256,
    )
    assert ran.v(0).tolist() == (x.tolist() if landed else [M32] * 64)


@pytest.mark.parametrize(
    ("op", "stride", "want"),
    [("ubyte", 1, lambda x: x.view(np.uint8).astype(np.uint32)), ("sbyte", 1, lambda x: x.view(np.int8).astype(np.int32)),
     ("sshort", 2, lambda x: x.view(np.int16).astype(np.int32))],
)  # fmt: skip
def test_a_direct_copy_of_less_than_a_dword_fills_one_per_lane(op: str, stride: int, want) -> None:
    x = np.random.default_rng(4).integers(0, 2**32, 16 * stride, dtype=np.uint32)
    copies = {
        f"global_load_lds_{op} v1, s[2:3]": pointer(x, 2),
        f"buffer_load_{op} v1, s[4:7], 0 offen lds": {**pointer(x, 4), 6: x.nbytes, 7: 0x27000},
    }
    for copy, s in copies.items():
        ran = run_asm(
            [copy, "s_waitcnt vmcnt(0)", "ds_read_b32 v0, v2"],
            v={1: offsets(stride), 2: offsets(4)},
            s={**s, 124: 0},
            memory=memory_of(x=x),
            lds=256,
        )
        np.testing.assert_array_equal(ran.v(0), want(x).astype(np.int64).astype(np.uint32))


PRODUCE = "ds_write_b32 v1, v2"
CONSUME = "ds_read_b32 v0, v3"


def exchange(*middle: str, waves: int = 2):
    """Each wave writes its part, then reads the part of the other one."""

    def setup(w) -> None:
        w.V[1], w.V[2] = LANES * 4 + 256 * w.wid, LANES + 1000 * w.wid
        w.V[3] = LANES * 4 + 256 * (1 - w.wid)

    return run_asm([PRODUCE, *middle, CONSUME], setup=setup, waves=waves, lds=512, source="ring.py")


def test_a_barrier_between_two_waves() -> None:
    ran = exchange("s_barrier")
    assert ran.outcome.races == ()
    assert ran.v(0, wave=0).tolist() == (LANES + 1000).tolist()
    assert ran.v(0, wave=1).tolist() == LANES.tolist()


def test_a_missing_barrier_is_a_race() -> None:
    ran = exchange("s_nop 0")
    assert any("read-after-write" in r and CONSUME in r and "ring.py:7" in r for r in ran.outcome.races)
    assert any("write-after-read" in r and PRODUCE in r for r in ran.outcome.races)


def test_races_of_writes() -> None:
    def setup(w) -> None:
        w.V[1], w.V[2] = LANES * 4, LANES + w.wid

    assert "write-after-write" in run_asm(PRODUCE, setup=setup, waves=2, lds=256).outcome.races[0]
    assert run_asm(PRODUCE, setup=setup, waves=2, lds=256, race_check=False).outcome.races == ()
    same = run_asm(PRODUCE, v={1: offsets(4), 2: 5}, waves=2, lds=256)
    assert same.outcome.races == ()  # the same values: no conflict


def test_races_are_told_apart_by_bytes() -> None:
    """Two waves write alternate bytes and read their own: no conflict, until one reads the other's."""

    def setup(w) -> None:
        w.V[1], w.V[2], w.V[3] = LANES * 2 + w.wid, LANES + 64 * w.wid, LANES * 2

    own = ["ds_write_b8 v1, v2", "ds_read_u8 v4, v1", "ds_write_b8 v1, v3"]
    assert run_asm(own, setup=setup, waves=2, lds=128).outcome.races == ()
    both = run_asm([*own, "ds_read_u16 v5, v3"], setup=setup, waves=2, lds=128).outcome.races
    assert any("read-after-write" in race and "ds_read_u16" in race for race in both)


def test_every_reader_counts_and_a_barrier_forgets_them() -> None:
    """Three waves read in turn; the last but one of them writes what the others have read."""

    def setup(w) -> None:
        w.V[1], w.V[2] = LANES * 4, 7
        w.S[4] = w.wid

    fill = ["ds_write_b32 v1, v2", "s_barrier", "ds_read_b32 v3, v1"]
    write = ["s_cmp_lg_u32 s4, 2", "s_cbranch_scc1 .LBB0_1", "ds_write_b32 v1, v3", "v_mov_b32_e32 v3, 9",
             "ds_write_b32 v1, v3", ".LBB0_1:"]  # fmt: skip
    found = run_asm([*fill, *write], setup=setup, waves=3, lds=256).outcome.races
    assert len(found) == 1 and "write-after-read" in found[0]
    assert run_asm([*fill, "s_barrier", *write], setup=setup, waves=3, lds=256).outcome.races == ()


def test_a_wave_alone_has_no_races_but_reads_nothing_unwritten() -> None:
    again = ["ds_write_b32 v1, v2", "ds_read_b32 v3, v1", "ds_write_b32 v1, v1", "ds_read_b32 v3, v1"]
    assert run_asm(again, v={1: offsets(4), 2: 1}, lds=512).outcome.races == ()
    (race,) = run_asm([*again, "ds_read_b32 v3, v1 offset:64"], v={1: offsets(4), 2: 1}, lds=512).outcome.races
    assert "never written" in race and "offset:64" in race


def test_an_asynchronous_copy_over_what_another_wave_reads_is_a_race() -> None:
    x = np.arange(64, dtype=np.uint32)
    text = ["ds_read_b32 v0, v1", COPY, "s_waitcnt vmcnt(0)"]
    ran = run_asm(text, v={1: offsets(4)}, s={**pointer(x, 2), 124: 0}, waves=2, memory=memory_of(x=x), lds=256)
    assert any("asynchronous write-after-read" in r for r in ran.outcome.races)
