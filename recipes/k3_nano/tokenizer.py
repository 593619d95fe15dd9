"""Train the 3,840-rank byte-level BPE of k3-nano and write it in the tiktoken layout of Kimi K3.

Usage: ``python tokenizer.py --text DIR/train.txt --out DIR``. Writes ``tiktoken.model`` (base64 token, rank) and
``tokenizer_config.json`` (names of the control slots).
"""

from __future__ import annotations

import argparse
import base64
import json
from collections import Counter
from pathlib import Path

import tiktoken

RANKS = 3840
SLOTS = 256
# Offsets of the named control slots after the ranks; the other slots are <|reserved_token_{id}|>.
NAMED = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}
BOS, END = RANKS, RANKS + 2
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def load(path: Path) -> tiktoken.Encoding:
    """The encoding of a ``tiktoken.model`` file."""
    ranks = {}
    for line in path.read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    special = {NAMED.get(i, f"<|reserved_token_{RANKS + i}|>"): RANKS + i for i in range(SLOTS)}
    return tiktoken.Encoding("k3-nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def train(text: str) -> list[bytes]:
    """Tokens in rank order: the 256 bytes, then the merges in the order they were learnt.

    ``tokenizers`` counts pairs and merges the most frequent one; pieces are cut beforehand with the same pattern
    (through the ``regex`` module, which knows class intersection in its V1 mode).
    """
    import regex
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    cutter = regex.compile("(?V1)" + PATTERN)
    counts = Counter(piece for doc in text.split("\0") for piece in cutter.findall(doc))
    # One letter per byte, none of them white space, so that a blank can separate the pieces.
    alphabet = byte_alphabet()
    mapped = (("".join(alphabet[b] for b in piece.encode()), n) for piece, n in counts.items() if n > 1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.BpeTrainer(
        vocab_size=RANKS, initial_alphabet=sorted(alphabet.values()), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator((" ".join([m] * n) for m, n in mapped), trainer)
    back = {c: b for b, c in alphabet.items()}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [bytes([b]) for b in range(256)]
    known = set(tokens)
    for pair in merges:
        left, right = pair if isinstance(pair, list) else pair.split(" ")
        token = bytes(back[c] for c in left + right)
        if token not in known:
            known.add(token)
            tokens.append(token)
    return tokens[:RANKS]


def byte_alphabet() -> dict[int, str]:
    """One printable, non-space character per byte value (private use for the unprintable ones)."""
    return {b: chr(b) if 33 <= b < 127 else chr(0x4E00 + b) for b in range(256)}


def check(encoding: tiktoken.Encoding, tokens: list[bytes], text: str) -> None:
    """Each token must come out of its own bytes as one token, and text must survive a round trip."""
    for rank, token in enumerate(tokens[256:], start=256):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        index = {t: r for r, t in enumerate(tokens[:rank])}
        if not any(a in index and b in index for a, b in splits):
            raise ValueError(f"rank {rank} has no parents")
    sample = text[:2_000_000]
    if encoding.decode(encoding.encode(sample, disallowed_special=())) != sample:
        raise ValueError("round trip failed")
    expected = ["Hello", ",", " WORLD", " it's", " ", "123", "45"]
    import regex

    if regex.compile("(?V1)" + PATTERN).findall("Hello, WORLD it's 12345") != expected:
        raise ValueError("pre-tokenisation differs")


def write(tokens: list[bytes], out: Path) -> None:
    """Both tokenizer files."""
    out.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    (out / "tiktoken.model").write_text(lines)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    plain = {"<|open|>", "<|close|>", "<|sep|>"}
    added = {str(RANKS + i): {"content": name, **flags, "special": name not in plain} for i, name in NAMED.items()}
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "model_max_length": 8192,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=60_000_000, help="characters to train on")
    args = parser.parse_args()
    text = args.text.read_text()[: args.limit]
    tokens = train(text)
    if len(tokens) != RANKS:
        raise SystemExit(f"{len(tokens)} tokens learnt")
    write(tokens, args.out)
    encoding = load(args.out / "tiktoken.model")
    check(encoding, tokens, text)
    ids = encoding.encode(text[:5_000_000], disallowed_special=())
    print("bytes per token", len(text[:5_000_000].encode()) / len(ids))


if __name__ == "__main__":
    main()
