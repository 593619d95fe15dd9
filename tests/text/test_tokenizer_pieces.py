"""Pieces and merges: how text becomes tokens, against vectors and a second implementation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizer import LESSON, RANKS, make
from tokenizer_reference import merge_all, split_pieces

from k3port.text.tokenizer import Tokenizer


def pieces_of(text: str) -> list[str]:
    """How the tokenizer splits text: with every substring in the vocabulary, each piece becomes one token."""
    data = text.encode()
    found = {data[a:b] for a in range(len(data)) for b in range(a + 1, len(data) + 1)}
    ranks = {bytes([value]): value for value in range(256)}
    ranks |= {token: 256 + n for n, token in enumerate(sorted(t for t in found if len(t) > 1))}
    tok = make(ranks)
    return [tok.decode([id]) for id in tok.encode(text)]


SPEC_VECTORS = {
    "Hello, WORLD it's 12345": ["Hello", ",", " WORLD", " it's", " ", "123", "45"],
    "你好ABC世界": ["你好", "ABC", "世界"],
    "  a\n\n  b": [" ", " a", "\n\n", " ", " b"],
    "x=3.14;// ok": ["x", "=", "3", ".", "14", ";//", " ok"],
    "日本語です": ["日本語", "です"],
    ' role="assistant"': [" role", '="', "assistant", '"'],
}
MORE_VECTORS = {
    "HELLOworld Été ÀB": ["HELLOworld", " Été", " ÀB"],
    "THEY'LL we'Ve": ["THEY'LL", " we'Ve"],
    "camelCaseHTML": ["camel", "Case", "HTML"],
    "\t\tif\r\n": ["\t", "\tif", "\r\n"],
    "a \r\n \n b": ["a", " \r\n \n", " b"],
    "end.  \n": ["end", ".", "  \n"],
    "tail   ": ["tail", "   "],
    "½½½½Ⅷ": ["½½½", "½Ⅷ"],
    "e\u0301a\u0301!": ["e\u0301a\u0301", "!"],
    "〇々x": ["〇々", "x"],
    "A\u0301Ab אAb": ["A\u0301Ab", " אAb"],
    " \r  b\rA": [" \r", " ", " b", "\r", "A"],
    "(\u00a0A": ["(", "\u00a0A"],
}


@pytest.mark.parametrize("text", [*SPEC_VECTORS, *MORE_VECTORS])
def test_piece_vectors(text: str) -> None:
    assert pieces_of(text) == (SPEC_VECTORS | MORE_VECTORS)[text]
    assert split_pieces(text) == (SPEC_VECTORS | MORE_VECTORS)[text]


# Characters that every Unicode version in use here knows: the engines follow newer tables than Python's unicodedata.
KNOWN = st.characters(exclude_categories=("Cs", "Cn"))
TRICKY = st.sampled_from(" \n\r\t'sStTreVEmMlLdD019.,;!aAzZéÉ\u00a0\u0301\u3000\x1c\x85日本々〇ªʰǅßſאกÅ🙂½٣_-<|>")


@settings(max_examples=120, deadline=None)
@given(st.text(st.one_of(TRICKY, TRICKY, KNOWN), max_size=10))
def test_pieces_equal_the_table(text: str) -> None:
    assert pieces_of(text) == split_pieces(text)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(st.one_of(TRICKY, KNOWN)), st.lists(st.sampled_from(LESSON.split(" ") + [" "])).map("".join)))
def test_encode_equals_the_reference(tok: Tokenizer, text: str) -> None:
    expected = [RANKS[part] for piece in split_pieces(text) for part in merge_all(piece.encode(), RANKS)]
    assert tok.encode(text) == expected


def test_merges_are_used(tok: Tokenizer) -> None:
    assert len(tok.encode(LESSON)) < len(LESSON.encode()) * 0.7
