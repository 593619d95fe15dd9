"""What a tokenizer is made of: sizes, ids, control slots, roles; small and as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_tokenizer import BASE, NAMED, config_of, write_folder

from k3port.text.tokenizer import StreamDecoder, Tokenizer

ROOT = Path(__file__).resolve().parents[2]
PARITY = ROOT.parent / "shared" / "parity" / "tiny-k3"


def test_sizes_and_ids(tok: Tokenizer) -> None:
    assert (tok.num_base_tokens, tok.vocab_size) == (BASE, BASE + 256)
    assert (tok.bos_id, tok.eos_id, tok.turn_end_id, tok.pad_id) == (BASE, BASE + 1, BASE + 2, BASE + 255)
    assert tok.stop_ids == {BASE + 1, BASE + 2, BASE + 9}
    assert str(BASE + 256) in repr(tok)


def test_every_control_slot_has_a_name(tok: Tokenizer) -> None:
    assert list(tok.control_tokens.values()) == list(range(BASE, BASE + 256))
    for slot in range(256):
        text = NAMED[slot][0] if slot in NAMED else f"<|reserved_token_{BASE + slot}|>"
        assert tok.control_tokens[text] == BASE + slot
    with pytest.raises(TypeError):
        tok.control_tokens["new"] = 1  # type: ignore[index]


@pytest.mark.parametrize("slots", [256, 300])
def test_vocab_size_says_where_the_slots_end(folder: Path, slots: int) -> None:
    tok = Tokenizer.from_folder(str(folder), BASE + slots)
    assert len(tok.control_tokens) == slots and tok.vocab_size == BASE + slots
    assert tok.encode_control(f"<|reserved_token_{BASE + slots - 3}|>") == [BASE + slots - 3]


def test_without_vocab_size_there_are_256_slots(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).vocab_size == BASE + 256


def test_roles_may_be_absent_or_written_in_long_form(tmp_path: Path) -> None:
    decoder = {str(BASE): {"content": "<s>"}, str(BASE + 1): {"content": "<e>"}}
    config = {"added_tokens_decoder": decoder, "bos_token": {"content": "<s>", "lstrip": False}}
    tok = Tokenizer.from_folder(write_folder(tmp_path / "a", config=config))
    assert (tok.bos_id, tok.eos_id, tok.pad_id, tok.turn_end_id, tok.stop_ids) == (BASE, None, None, None, frozenset())
    names = config_of()
    del names["pad_token"]
    assert Tokenizer.from_folder(write_folder(tmp_path / "b", config=names)).pad_id == BASE + 255
    marked = b"\xef\xbb\xbf" + json.dumps(config_of()).encode()  # some editors put a byte order mark there
    assert Tokenizer.from_folder(write_folder(tmp_path / "c", config=marked)).pad_id == BASE + 255


@pytest.mark.skipif(not (PARITY / "tiktoken.model").exists(), reason=f"no parity checkpoint at {PARITY}")
def test_parity_checkpoint() -> None:
    config = json.loads((PARITY / "config.json").read_text())
    tok = Tokenizer.from_folder(PARITY, config["text_config"]["vocab_size"])
    assert (tok.num_base_tokens, tok.vocab_size) == (288, 544)
    assert (tok.bos_id, tok.turn_end_id, tok.pad_id) == tuple(config[f"{n}_token_id"] for n in ("bos", "eos", "pad"))
    assert tok.eos_id == 289 and tok.stop_ids == {289, 290, 297}
    assert tok.control_tokens["<|media_pad|>"] == config["media_placeholder_token_id"]
    for ids in json.loads((PARITY / "expected" / "prompts.json").read_text())["prompts"]:
        stream = StreamDecoder(tok)
        assert "".join([*map(stream.push, ids), stream.finish()]) == tok.decode(ids)
    for image in json.loads((PARITY / "expected" / "vision" / "images.json").read_text()).values():
        ids = tok.encode_control(image["prompt"])
        assert [id - 288 for id in ids if id >= 288] == [18, 19, 21, 20]
        assert max(tok.encode(image["prompt"])) < 288
    # Part of the multimodal prompt. Its maker did not split letters from digits ("x4" is one token there), so these
    # ids are a fact about decoding only.
    ids = [306, 271, 32, 55, 53, 281, 54, 307, 309, 308]
    text = "<|media_begin|>image 75x46<|media_content|><|media_pad|><|media_end|>"
    assert tok.decode(ids, skip_special=False) == tok.decode(tok.encode_control(text), skip_special=False) == text
