"""K3's tokenizer: text to token ids and back.

The vocabulary is a byte-level BPE of ranks followed by control slots. Two encode modes keep structure and data apart:
`Tokenizer.encode` treats every character as data, whatever it spells, and only `Tokenizer.encode_control` turns the
text of a control token into its id. A prompt is built from segments that are encoded one by one; text from a user
always goes through the first.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tiktoken

from k3port.errors import UsageError
from k3port.text.vocabulary import Vocabulary, read_vocabulary

BLOCK_CHARS = 400_000
"""The text is first cut into blocks of this many characters."""

RUN_CHARS = 25_000
"""Inside a block, no stretch of only whitespace or only non-whitespace goes on for longer without a cut."""

# A letter, as the two halves of a word see it: without case, or marks, it may stand in either; Han stands apart.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PATTERN = "|".join(
    (
        r"\p{Han}+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_SUFFIX}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text falls into pieces before merging. The first alternative that matches wins, so their order matters."""

# A run is looked at only from its first character: trying every start would cost the square of its length. Python's
# \s is the test of str.isspace, which the cut is defined by; the pattern above has a slightly narrower one.
_LONG_RUN = re.compile(rf"(?<!\s)\s{{{RUN_CHARS + 1},}}|(?<!\S)\S{{{RUN_CHARS + 1},}}")

_STOP_NAMES = ("[EOS]", "<|end_of_msg|>", "[EOT]", "<|im_end|>")


class Tokenizer:
    """Text to ids and back, for one vocabulary. Immutable, and safe to share between threads.

    Args:
        vocabulary: the checked contents of a checkpoint's tokenizer files; `from_folder` reads them.

    Attributes:
        vocab_size: all ids are below it: BPE ranks and control slots.
        num_base_tokens: how many BPE ranks there are, which is also the id of the first control slot.
        control_tokens: the text of every control token, reserved slots included, to its id, in id order.
        bos_id: `[BOS]`, or None. Encoding never adds it.
        eos_id: the tokenizer's `[EOS]`, or None. A chat turn of K3 ends with `turn_end_id` instead.
        pad_id: `[PAD]`, or None.
        turn_end_id: `<|end_of_msg|>`, or None for a vocabulary that has no such token.
        stop_ids: the ids of `[EOS]`, `<|end_of_msg|>`, `[EOT]` and `<|im_end|>` (Kimi-Linear), those that exist.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        base = len(vocabulary.ranks)
        controls = vocabulary.controls
        self.num_base_tokens: int = base
        self.vocab_size: int = base + len(controls)
        self.control_tokens: Mapping[str, int] = MappingProxyType(
            {control.text: base + slot for slot, control in enumerate(controls)}
        )
        self.bos_id: int | None = vocabulary.roles.get("bos")
        self.eos_id: int | None = vocabulary.roles.get("eos")
        self.pad_id: int | None = vocabulary.roles.get("pad")
        self.turn_end_id: int | None = self.control_tokens.get("<|end_of_msg|>")
        self.stop_ids: frozenset[int] = frozenset(
            self.control_tokens[name] for name in _STOP_NAMES if name in self.control_tokens
        )

        # tiktoken is not told about control tokens: what it does not know it cannot find in a user's text.
        self._encoding = tiktoken.Encoding(
            "k3", pat_str=PATTERN, mergeable_ranks=dict(vocabulary.ranks), special_tokens={}
        )
        self._control_pattern = _longest_of(self.control_tokens)

        by_id = sorted(vocabulary.ranks, key=vocabulary.ranks.__getitem__)
        self._bytes = [*by_id, *(control.text.encode() for control in controls)]
        self._visible_bytes = [*by_id, *(b"" if control.special else control.text.encode() for control in controls)]

    @classmethod
    def from_folder(cls, path: str | Path, vocab_size: int | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder. Executes nothing from it, writes nothing.

        Args:
            path: a folder with ``tiktoken.model`` and ``tokenizer_config.json``.
            vocab_size: the model's vocabulary size, where the control slots end; without it there are 256 slots. A
                slot that the folder does not name is called ``<|reserved_token_{id}|>``.

        Raises:
            TokenizerError: a file is missing or damaged, or they contradict each other; its reasons name every
                fault with its file and line.
        """
        return cls(read_vocabulary(Path(path), vocab_size))

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, num_base_tokens={self.num_base_tokens})"

    def encode(self, text: str) -> list[int]:
        """The ids of plain text. Control tokens are never recognised: ``<|open|>`` is eight ordinary characters.

        Raises:
            UsageError: the text holds a lone surrogate, which is no Unicode character; the message says where.
        """
        _check_unicode(text)
        ids: list[int] = []
        for part in _cut(text):
            ids += self._encoding.encode_ordinary(part)
        return ids

    def encode_control(self, text: str) -> list[int]:
        """The ids of trusted text, in which the text of a control token means that token.

        The leftmost name counts, at one place the longest. The cuts for long text come first, as in the reference,
        so a name that lies across one (beyond 25,000 characters without whitespace, or 400,000 in all) is plain text.

        Raises:
            UsageError: as in `encode`.
        """
        if (whole := self.control_tokens.get(text)) is not None:
            return [whole]
        _check_unicode(text)
        ids: list[int] = []
        for part in _cut(text):
            done = 0
            for found in self._control_pattern.finditer(part):
                ids += self._encoding.encode_ordinary(part[done : found.start()])
                ids.append(self.control_tokens[found[0]])
                done = found.end()
            ids += self._encoding.encode_ordinary(part[done:])
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids. Bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave out control tokens that the checkpoint flags as special. Its chat markers
                ``<|open|>``, ``<|close|>``, ``<|sep|>`` and its reserved slots do not have that flag, so they show.

        Raises:
            UsageError: an id is not below `vocab_size`.
        """
        return self.decode_bytes(ids, skip_special).decode("utf-8", "replace")

    def decode_bytes(self, ids: Sequence[int], skip_special: bool = True) -> bytes:
        """The bytes of ids, before they are read as UTF-8. Arguments and errors as in `decode`."""
        table = self._visible_bytes if skip_special else self._bytes
        try:
            if len(ids) and min(ids) >= 0:
                return b"".join([table[id] for id in ids])
        except IndexError:
            pass
        for position, id in enumerate(ids):
            self._check_id(id, f" at position {position}")
        return b""

    def stream_decoder(self, skip_special: bool = True) -> StreamDecoder:
        """A decoder for one stream of ids."""
        return StreamDecoder(self, skip_special)

    def token_bytes(self, id: int, skip_special: bool = True) -> bytes:
        """The bytes of one id: possibly part of a character, and empty for a special token that is skipped.

        Raises:
            UsageError: the id is not below `vocab_size`.
        """
        self._check_id(id)
        return (self._visible_bytes if skip_special else self._bytes)[id]

    def _check_id(self, id: int, where: str = "") -> None:
        if not 0 <= id < self.vocab_size:
            raise UsageError(
                f"token id {int(id)}{where} is not in the vocabulary",
                reasons=[f"ids go from 0 to {self.vocab_size - 1}"],
                hint="decode ids with the tokenizer of the checkpoint that produced them",
            )


class StreamDecoder:
    """Decode ids one at a time. All returned strings together are what `Tokenizer.decode` makes of all ids.

    The bytes of a character that is not complete yet are held back until it is, so a character that is spread over
    several tokens comes out whole, with the last of them.

    Args:
        tokenizer: whose ids these are.
        skip_special: as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """Take one id; return the text that is certain now, often the token's own, sometimes none.

        Raises:
            UsageError: the id is not in the vocabulary. The decoder is then as it was before.
        """
        return self._utf8.decode(self._tokenizer.token_bytes(id, self._skip_special))

    def finish(self) -> str:
        """Return what was held back: U+FFFD for a character that never became complete. Ready for a new stream."""
        return self._utf8.decode(b"", final=True)


def _longest_of(names: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost name, and of several at one place the longest.

    Names are grouped by how they begin: one flat alternation would try all 256 of them at every ``<``.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=len, reverse=True):
        groups.setdefault(name[:3], []).append(re.escape(name[3:]))
    return re.compile("|".join(f"{re.escape(head)}(?:{'|'.join(tails)})" for head, tails in groups.items()) or "(?!)")


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # The text itself stays out of the message: it may be private.
        raise UsageError(
            f"the text has a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}",
            reasons=["half of a UTF-16 pair is not a character and has no UTF-8 form"],
            hint='decode the input as UTF-8 with errors="replace", or remove that character',
        ) from None


def _cut(text: str) -> Iterator[str]:
    """The parts of a text that are encoded on their own. Where it is cut changes the ids, so this is the model's rule.

    Blocks of `BLOCK_CHARS` first, then a cut wherever a run of only whitespace or only non-whitespace in a block
    would exceed `RUN_CHARS`. It also bounds how long most pieces are.
    """
    for start in range(0, len(text), BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS]
        done = 0
        if len(block) > RUN_CHARS:
            for run in _LONG_RUN.finditer(block):
                for cut in range(run.start() + RUN_CHARS, run.end(), RUN_CHARS):
                    yield block[done:cut]
                    done = cut
        yield block[done:]
