"""Which tokenizer a checkpoint folder has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from k3port.text.foreign import ForeignTokenizer
from k3port.text.tokenizer import Tokenizer


class TextStream(Protocol):
    """Ids in, text out, as it becomes certain."""

    def push(self, id: int) -> str: ...

    def finish(self) -> str: ...


class TextTokenizer(Protocol):
    """What the runtime needs of a tokenizer."""

    stop_ids: frozenset[int]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def stream_decoder(self) -> TextStream: ...


def load_tokenizer(folder: Path, vocab_size: int) -> TextTokenizer | None:
    """The tokenizer of a checkpoint: K3's own format first, then ``tokenizer.json``; None where there is neither.

    Raises:
        TokenizerError: the files are there but damaged, do not fit ``vocab_size``, or need a package that is not
            installed.
    """
    if (folder / "tiktoken.model").exists():
        return Tokenizer.from_folder(folder, vocab_size)
    if (folder / "tokenizer.json").exists():
        return ForeignTokenizer.from_folder(folder, vocab_size)
    return None
