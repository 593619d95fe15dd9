"""Round trips, decoding and streaming."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import BASE

from k3port.errors import UsageError
from k3port.text.tokenizer import StreamDecoder, Tokenizer


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_round_trip(tok: Tokenizer, text: str) -> None:
    ids = tok.encode(text)
    assert tok.decode(ids) == tok.decode(ids, skip_special=False) == text
    assert tok.decode_bytes(ids) == text.encode()
    assert tok.decode(tok.encode_control(text), skip_special=False) == text


def test_every_character_round_trips(tok: Tokenizer) -> None:
    text = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert tok.decode(tok.encode(text)) == text


def test_empty(tok: Tokenizer) -> None:
    assert tok.encode("") == tok.encode_control("") == []
    assert tok.decode([]) == "" and tok.decode_bytes([]) == b"" and StreamDecoder(tok).finish() == ""


@pytest.mark.parametrize("text, position", [("\ud800", 0), ("ab\udfffc", 2), ("é\ud83d\ude00", 1), ("🙂\udc80", 1)])
def test_lone_surrogates_are_refused(tok: Tokenizer, text: str, position: int) -> None:
    for encode in (tok.encode, tok.encode_control):
        with pytest.raises(UsageError, match=rf"U\+{ord(text[position]):04X}, at character {position}\n") as caught:
            encode(text)
        assert caught.value.hint
        caught.value.render().encode()  # a message that cannot be printed would be the next error


@pytest.mark.parametrize("bad", [-1, BASE + 256, 10**12])
def test_unknown_ids_are_refused(tok: Tokenizer, bad: int) -> None:
    for decode in (tok.decode, tok.decode_bytes):
        with pytest.raises(UsageError, match=rf"token id {bad} at position 2 is not in the vocabulary"):
            decode([1, 2, bad, 3])
    stream = StreamDecoder(tok)
    assert stream.push(0xC3) == ""
    with pytest.raises(UsageError, match=rf"token id {bad} is not"):
        stream.push(bad)
    assert stream.push(0xA9) == "é"


def test_special_tokens_can_be_left_out(tok: Tokenizer) -> None:
    text = f"a[BOS]<|open|>b<|end_of_msg|><|reserved_token_{BASE + 100}|>"
    ids = tok.encode_control(text)
    assert tok.decode(ids, skip_special=False) == text
    assert tok.decode(ids) == f"a<|open|>b<|reserved_token_{BASE + 100}|>"
    assert tok.token_bytes(BASE) == b"" and tok.token_bytes(BASE, skip_special=False) == b"[BOS]"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.integers(0, BASE + 255), st.integers(0x80, 0xFF), st.just(BASE))), st.booleans())
def test_stream_equals_decode(tok: Tokenizer, ids: list[int], skip_special: bool) -> None:
    stream = StreamDecoder(tok, skip_special)
    assert "".join([*map(stream.push, ids), stream.finish()]) == tok.decode(ids, skip_special)
    assert stream.push(ord("a")) == "a"  # ready for the next text


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_stream_never_breaks_a_character(tok: Tokenizer, text: str) -> None:
    stream, shown = StreamDecoder(tok), ""
    for byte in text.encode():  # ids 0 to 255 are the single bytes: the finest split there is
        shown += stream.push(byte)
        assert text.startswith(shown)
    assert shown == text and stream.finish() == ""


def test_stream_shows_a_cut_character_at_the_end(tok: Tokenizer) -> None:
    stream = StreamDecoder(tok)
    assert [stream.push(byte) for byte in "é".encode() + b"\xf0\x9f"] == ["", "é", "", ""]
    assert stream.finish() == "\ufffd" and stream.finish() == ""
