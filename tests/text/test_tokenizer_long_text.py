"""Long text: where it is cut, and that its time grows in proportion."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import make
from tokenizer_reference import WHITESPACE, cut_slowly

from k3port.text.tokenizer import BLOCK_CHARS, RUN_CHARS, Tokenizer, _cut


def test_a_cut_changes_the_ids_where_the_reference_cuts() -> None:
    ranks = {bytes([value]): value for value in range(256)} | {b"aa": 256}
    tok = make(ranks, "<|open|>")
    a, aa, b, space = 97, 256, 98, 32
    assert tok.encode("b" + "a" * 24_999) == [b, *[aa] * 12_499, a]
    assert tok.encode("b" + "a" * 25_000) == [b, *[aa] * 12_499, a, a]  # one more, and the last stands alone
    assert tok.encode("b" + "a" * 25_000 + "aa") == [b, *[aa] * 12_499, a, aa, a]
    # A new run starts a new count.
    assert tok.encode("b" + "a" * 24_999 + " " + "a" * 24_999) == [b, *[aa] * 12_499, a, space, *[aa] * 12_499, a]
    # Blocks: characters 399,999 and 400,000 are both "a".
    assert tok.encode("b " * 199_999 + "baa")[-3:] == [b, a, a]
    assert tok.encode("b " * 199_999 + " aa")[-2:] == [a, a]
    assert tok.encode("b " * 199_998 + "baa")[-2:] == [b, aa]
    # The count of a run does not go on into the next block.
    assert list(map(len, _cut(("b" + " " * 9_999) * 39 + " " * 5_000 + "a" * 30_000))) == [400_000, 25_000]


def test_a_control_name_across_a_cut_is_plain_text() -> None:
    tok = make({bytes([value]): value for value in range(256)}, "<|open|>")
    fits = "b" * (RUN_CHARS - 8) + "<|open|>"
    assert tok.encode_control(fits) == [98] * (RUN_CHARS - 8) + [256]
    assert tok.encode_control("b" + fits) == tok.encode("b" + fits)


RUN_LENGTHS = st.sampled_from([1, 2, 3, RUN_CHARS - 1, RUN_CHARS, RUN_CHARS + 1, 2 * RUN_CHARS, 2 * RUN_CHARS + 1])
RUNS = st.tuples(st.sampled_from(["a", " ", "\n", "\x1c", "\u3000", "\u200b", "🙂"]), RUN_LENGTHS)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, BLOCK_CHARS + 2).map("a ".__mul__), st.lists(RUNS, max_size=10))
def test_cuts_equal_a_walk_over_the_characters(head: str, runs: list[tuple[str, int]]) -> None:
    text = head[: len(head) // 2] + "".join(char * count for char, count in runs)
    assert list(_cut(text)) == cut_slowly(text)


def test_pattern_and_cut_agree_on_whitespace() -> None:
    # The pattern sees no whitespace run that the cut does not bound: that is what overflows the engine's stack.
    everything = {chr(code) for code in range(0x110000)}
    by_cut = {char for char in everything if char.isspace()}
    assert by_cut == {char for char in everything if re.match(r"\s", char)}
    assert by_cut >= WHITESPACE and by_cut - WHITESPACE == set("\x1c\x1d\x1e\x1f")


LONG = {
    "a": "a",
    "upper": "A",
    "spaces": " ",
    "newlines": "\n",
    "emoji": "🙂",
    "marks": "\u0301",
    "han": "語",
    "symbols": "!",
    "symbols-separators": "!" * 24_999 + "\x1c",  # one piece for the pattern, many runs for the cut
    "spaces-newline": " " * 24_999 + "\n",
    "letter-upper": "א" + "A" * 20_000,
    "half-markers": "<|",
    "reserved": "<|reserved_token_",
    "markers": "<|open|>",
    "mixed": "Hello, WORLD it's 12345 你好\n\n  x=3; // <|sep|>\r\n",
}


def seconds_for(tok: Tokenizer, unit: str, num_chars: int) -> float:
    """The shorter of two times for encoding both ways, with a check that the text comes back."""
    text = (unit * (num_chars // len(unit) + 1))[:num_chars]
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        ids = tok.encode(text)
        control_ids = tok.encode_control(text)
        best = min(best, time.perf_counter() - start)
        assert tok.decode(ids) == tok.decode(control_ids, skip_special=False) == text
    return best


@pytest.mark.parametrize("name", LONG)
def test_long_text_takes_time_in_proportion(tok: Tokenizer, name: str) -> None:
    short, long = (seconds_for(tok, LONG[name], num_chars) for num_chars in (125_000, 1_000_000))
    assert long < 30 * short + 0.05, "8 times the text should take about 8 times as long; its square is 64 times"


def test_runs_just_under_the_limit_cost_no_more_than_words(tok: Tokenizer) -> None:
    words, runs = (seconds_for(tok, unit, 250_000) for unit in (LONG["mixed"], "a" * (RUN_CHARS - 1) + " "))
    assert runs < 10 * words + 0.05
