"""Tokenizers of others through transformers: plain encoding, streaming, clear errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from k3port.errors import TokenizerError
from k3port.text.foreign import ForeignTokenizer
from k3port.text.loading import load_tokenizer

TEXT = "Hello, hello <|end|> wörld 🎉!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="the extra hf is not installed")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("foreign")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["hello hello world world hello"] * 4, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(str(path))
    return path


def test_round_trip_and_stop_id(folder: Path):
    tokenizer = load_tokenizer(folder, 300)
    assert isinstance(tokenizer, ForeignTokenizer)
    assert tokenizer.stop_ids == {0}
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_special_names_in_text_stay_text(folder: Path):
    assert 0 not in ForeignTokenizer.from_folder(folder).encode(TEXT)


def test_streamed_text_equals_the_whole(folder: Path):
    tokenizer = ForeignTokenizer.from_folder(folder)
    for ids in (tokenizer.encode(TEXT), tokenizer.encode("🎉")[:-1], []):
        stream = tokenizer.stream_decoder()
        parts = [stream.push(i) for i in ids]
        assert "\ufffd" not in "".join(parts)
        assert "".join(parts) + stream.finish() == tokenizer.decode(ids)


def test_a_damaged_file_is_named(tmp_path: Path, folder: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="cannot read the tokenizer"):
        load_tokenizer(tmp_path, 300)


def test_without_transformers_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path, 300)
    assert "k3port[hf]" in caught.value.hint


def test_a_folder_without_tokenizer_has_none(tmp_path: Path):
    assert load_tokenizer(tmp_path, 300) is None


def test_a_git_lfs_pointer_is_named(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is a git-LFS pointer"):
        load_tokenizer(tmp_path, 300)


def test_ids_that_the_model_lacks_are_refused(folder: Path):
    size = ForeignTokenizer.from_folder(folder).vocab_size
    assert load_tokenizer(folder, size) is not None
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(folder, size - 1)
    assert caught.value.reasons == (f"tokenizer.json has ids up to {size - 1}, but vocab_size is {size - 1}",)
    assert caught.value.hint
