"""A small checkpoint with a tokenizer, for tests that need text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from k3port.testing.synthetic import EditFile, tiny_k3_config, write_checkpoint

VOCAB = 320
BOS, EOS, PAD = 256, 257, 258


def tiny_text_config() -> dict[str, Any]:
    """The tiny Kimi K3 with a vocabulary that has room for all bytes and for control tokens."""
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    values = {**tiny_k3_config(), **ids}
    values["text_config"] = {**values["text_config"], **ids, "vocab_size": VOCAB}
    return values


def write_tiny_text_checkpoint(folder: Path, *, edit: EditFile | None = None) -> Path:
    """Deterministic weights and a tokenizer whose tokens are the 256 bytes: all that ``k3port run`` needs."""
    write_checkpoint(folder, tiny_text_config(), edit=edit)
    lines = [f"{base64.b64encode(bytes([value])).decode()} {value}" for value in range(256)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    named = {BOS: "[BOS]", EOS: "[EOS]", PAD: "[PAD]"}
    decoder = {str(id): {"content": text, "special": True} for id, text in named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    return folder
