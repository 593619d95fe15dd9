"""A small vocabulary learned from one sentence, with K3's control tokens, and its folder."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from tokenizer_reference import split_pieces

from k3port.text.tokenizer import Tokenizer
from k3port.text.vocabulary import ControlToken, Vocabulary

LESSON = "the theme of the other theory: there, they're, hello, don't -- 12 of 123; 日本語の語 über Übung é 🙂🙂 aaaa\n\n\n  a"
# Offsets from the first control slot, in K3's order.
NAMED: dict[int, tuple[str, bool]] = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|end_of_msg|>", True),
    3: ("<|open|>", False),
    4: ("<|close|>", False),
    5: ("<|sep|>", False),
    6: ("[start_header_id]", True),
    7: ("[end_header_id]", True),
    9: ("[EOT]", True),
    18: ("<|media_begin|>", True),
    19: ("<|media_content|>", True),
    20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True),
    65: ("<osagent_mode>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}


def learn_ranks(lesson: str, num_merges: int) -> dict[bytes, int]:
    ranks = {bytes([value]): value for value in range(256)}
    words = [[char.to_bytes() for char in piece.encode()] for piece in split_pieces(lesson)]
    for rank in range(256, 256 + num_merges):
        pairs = Counter((a + b) for word in words for a, b in pairwise(word))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks[best] = rank
        for word in words:
            i = 0
            while i + 1 < len(word):
                if word[i] + word[i + 1] == best:
                    word[i : i + 2] = [best]
                i += 1
    return ranks


RANKS = learn_ranks(LESSON, 60)
BASE = len(RANKS)


def rank_lines(ranks: Mapping[bytes, int] = RANKS) -> list[bytes]:
    return [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]


def config_of(named: Mapping[int, tuple[str, bool]] = NAMED, base: int = BASE) -> dict[str, object]:
    decoder = {str(base + slot): {"content": text, "special": special} for slot, (text, special) in named.items()}
    return {"added_tokens_decoder": decoder, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}


def write_folder(folder: Path, lines: list[bytes] | None = None, config: object = None) -> Path:
    """A tokenizer folder; ``config`` as an object, or as raw text or bytes."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "tiktoken.model").write_bytes(b"\n".join(rank_lines() if lines is None else lines) + b"\n")
    config = config_of() if config is None else config
    raw = config if isinstance(config, bytes) else config if isinstance(config, str) else json.dumps(config, indent=1)
    (folder / "tokenizer_config.json").write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    return folder


def make(ranks: Mapping[bytes, int], *controls: str) -> Tokenizer:
    return Tokenizer(Vocabulary(ranks, tuple(ControlToken(text) for text in controls), {}))
