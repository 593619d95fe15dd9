"""Tokenizers of other people's exports (``tokenizer.json``), read by the optional package transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3port.errors import TokenizerError

_LFS_POINTER = b"version https://git-lfs"


class ForeignTokenizer:
    """A ``tokenizer.json`` behind the interface of :class:`k3port.text.tokenizer.Tokenizer`.

    Executes no code of the checkpoint. Names of special tokens in a text stay text.

    Attributes:
        vocab_size: ids are below it.
        stop_ids: the id of the tokenizer's end-of-sequence token, where it names one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.encode_special_tokens = True
        self.vocab_size: int = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.stop_ids: frozenset[int] = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))

    @classmethod
    def from_folder(cls, path: str | Path, vocab_size: int | None = None) -> ForeignTokenizer:
        """Reads ``tokenizer.json`` and, where present, ``tokenizer_config.json``.

        Args:
            path: the folder.
            vocab_size: the model's vocabulary size; its embedding may have more rows than the tokenizer has ids.

        Raises:
            TokenizerError: transformers is not installed, cannot read the files, or they have ids that the model
                does not.
        """
        _refuse_lfs_pointer(Path(path) / "tokenizer.json")
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise TokenizerError(
                f"{path} has a tokenizer.json, which needs the package transformers",
                hint="pip install 'k3port[hf]', or use a checkpoint with tiktoken.model",
            ) from None
        try:
            tokenizer = cls(PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True))
        except Exception as exc:
            # The library raises whatever its parser meets: OSError, ValueError, plain Exception from Rust.
            raise TokenizerError(
                f"cannot read the tokenizer in {path}",
                reasons=[f"{type(exc).__name__}: {exc}"],
                hint="fetch tokenizer.json and tokenizer_config.json again",
            ) from exc
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise TokenizerError(
                f"the tokenizer in {path} is not this model's",
                reasons=[f"tokenizer.json has ids up to {tokenizer.vocab_size - 1}, but vocab_size is {vocab_size}"],
                hint="fetch tokenizer.json and config.json again, both from the same checkpoint",
            )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of plain text, without any added token."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream_decoder(self) -> ForeignStreamDecoder:
        return ForeignStreamDecoder(self)


def _refuse_lfs_pointer(path: Path) -> None:
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return  # the library says what is wrong with it
    if is_pointer:
        raise TokenizerError(f"{path} is a git-LFS pointer, not the file itself", hint="run: git lfs pull")


class ForeignStreamDecoder:
    """Text as it becomes certain; all returned strings together are what ``decode`` makes of all ids."""

    def __init__(self, tokenizer: ForeignTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def push(self, id: int) -> str:
        """Takes one id; an unfinished character (U+FFFD at the end) is held back."""
        self._ids.append(id)
        text = self._tokenizer.decode(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._shown):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def finish(self) -> str:
        """What was held back."""
        text = self._tokenizer.decode(self._ids)
        new = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._ids, self._shown = [], ""
        return new
