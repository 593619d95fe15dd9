"""A second implementation of splitting, merging and cutting, written only to be compared with."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from itertools import pairwise

import regex

from k3port.text.tokenizer import BLOCK_CHARS, RUN_CHARS


def merge_all(piece: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Byte-pair merging as its definition reads: lowest rank first, leftmost on ties."""
    if piece in ranks:
        return [piece]
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


WHITESPACE = set("\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | {chr(c) for c in range(0x2000, 0x200B)}


def is_han(char: str) -> bool:
    return regex.match(r"\p{Han}", char) is not None


def is_upper(char: str) -> bool:
    category = unicodedata.category(char)
    return (category in {"Lu", "Lt", "Lm", "Lo"} or category[0] == "M") and not is_han(char)


def is_lower(char: str) -> bool:
    category = unicodedata.category(char)
    return (category in {"Ll", "Lm", "Lo"} or category[0] == "M") and not is_han(char)


def is_symbol(char: str) -> bool:
    return char not in WHITESPACE and unicodedata.category(char)[0] not in "LN"


def run_end(text: str, start: int, test: Callable[[str], bool], limit: int | None = None) -> int:
    end = start
    while end < len(text) and test(text[end]) and (limit is None or end < start + limit):
        end += 1
    return end


def piece_end(text: str, start: int) -> int:
    """Where the piece that begins at ``start`` ends: the table of the eight alternatives, one by one."""
    first = text[start]
    if (end := run_end(text, start, is_han)) > start:
        return end

    def with_suffix(end: int) -> int:
        for suffix in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
            if text[end : end + len(suffix)].casefold() == suffix:
                return end + len(suffix)
        return end

    leads = [start]
    if first not in "\r\n" and unicodedata.category(first)[0] not in "LN":
        leads = [start + 1, start]
    for word in leads:
        for lower in range(run_end(text, word, is_upper), word - 1, -1):
            if (end := run_end(text, lower, is_lower)) > lower:
                return with_suffix(end)
    for word in leads:
        if (lower := run_end(text, word, is_upper)) > word:
            return with_suffix(run_end(text, lower, is_lower))
    if (end := run_end(text, start, lambda c: unicodedata.category(c)[0] == "N", 3)) > start:
        return end
    symbols = start + (first == " ")
    if (end := run_end(text, symbols, is_symbol)) > symbols:
        return run_end(text, end, "\r\n".__contains__)
    end = run_end(text, start, WHITESPACE.__contains__)
    last_break = max(text.rfind("\r", start, end), text.rfind("\n", start, end))
    if last_break >= 0:
        return last_break + 1
    return end - 1 if end < len(text) and end - start > 1 else end


def split_pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while start < len(text):
        end = piece_end(text, start)
        pieces.append(text[start:end])
        start = end
    return pieces


def cut_slowly(text: str) -> list[str]:
    """The cuts, character by character."""
    parts = []
    for start in range(0, len(text), BLOCK_CHARS):
        part, run, was_space = "", 0, None
        for char in text[start : start + BLOCK_CHARS]:
            run = run + 1 if char.isspace() == was_space else 1
            was_space = char.isspace()
            if run > RUN_CHARS:
                parts.append(part)
                part, run = "", 1
            part += char
        parts.append(part)
    return parts
