"""Ends of text and tokenizers: what a run would trip over is found before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_faults import FILE_1, cut, faults_of
from tiny_text import EOS, VOCAB, write_tiny_text_checkpoint

from k3port.errors import CheckpointError, ConfigError, ExitCode, TokenizerError
from k3port.runtime.preflight import Checkpoint, check_checkpoint
from k3port.runtime.prepare import Prepared, prepare

GENERATION = "generation_config.json"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize(
    ("value", "ids"), [(5, {5, 126}), ([120, 121], {120, 121, 126}), (None, {126}), ([], {126}), (127, {126, 127})]
)
def test_ends_of_both_files(folder: Path, value: object, ids: set[int]) -> None:
    (folder / GENERATION).write_text(json.dumps({"eos_token_id": value}))
    assert check_checkpoint(folder).eos_ids == ids


def test_the_file_and_its_key_are_optional(folder: Path) -> None:
    (folder / GENERATION).write_text("{}")
    assert check_checkpoint(folder).eos_ids == {126}
    (folder / GENERATION).unlink()
    assert check_checkpoint(folder).eos_ids == {126}
    assert Checkpoint.__dataclass_fields__["eos_ids"].default == frozenset()


BROKEN: dict[str, tuple[bytes | str, str]] = {
    "empty": ("", "is not valid JSON: it is empty"),
    "cut": ("{", "is not valid JSON"),
    "a list": ("[]", "holds no JSON object"),
    "null": ("null", "holds no JSON object"),
    "lfs": (LFS, "is a git-LFS pointer"),
    "binary": (b"\x80\xff\x00\x01", "is not valid JSON"),
    "too deep": ("[" * 100_000, "nested too deeply"),
    "long number": ('{"eos_token_id": ' + "9" * 5000 + "}", "a number in it is too long"),
    "nested": ('{"eos_token_id": [[1]]}', "has the eos_token_id [[1]]: expected a token id in 0..127 or a list"),
    "an object": ('{"eos_token_id": {"a": 1}}', "has the eos_token_id {'a': 1}"),
    "text": ('{"eos_token_id": "126"}', "has the eos_token_id '126'"),
    "true": ('{"eos_token_id": true}', "has the eos_token_id True"),
    "float": ('{"eos_token_id": 1.0}', "has the eos_token_id 1.0"),
    "outside": ('{"eos_token_id": [126, 128]}', "has the eos_token_id [126, 128]"),
    "negative": ('{"eos_token_id": -1}', "has the eos_token_id -1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_generation_config_is_a_fault(folder: Path, name: str) -> None:
    content, expected = BROKEN[name]
    (folder / GENERATION).write_bytes(content if isinstance(content, bytes) else content.encode())
    (fault,) = faults_of(folder)
    assert fault.startswith(GENERATION + " ") and expected in fault


def test_a_folder_in_place_of_the_file(folder: Path) -> None:
    (folder / GENERATION).unlink()
    (folder / GENERATION).mkdir()
    assert faults_of(folder) == [f"{GENERATION} cannot be read: Is a directory"]


def test_it_comes_with_all_other_faults(folder: Path) -> None:
    (folder / GENERATION).write_text("{")
    cut(folder / FILE_1, 0)
    assert [fault.split()[0] for fault in faults_of(folder)] == [FILE_1, GENERATION]
    (folder / "config.json").write_text("{")
    faults = faults_of(folder)
    assert [fault.split()[0] for fault in faults[:2]] == [FILE_1, GENERATION]
    assert "config.json is not valid JSON" in faults[2]


def test_a_size_that_no_model_has_is_refused_at_once(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"]["num_experts"] = 1_000_000
    (folder / "config.json").write_text(json.dumps(values))
    assert any("lacks routed experts" in fault for fault in faults_of(folder))
    values["text_config"]["num_experts"] = 2**31 - 1
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="experts in all"):
        check_checkpoint(folder)


@pytest.fixture
def text_folder(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    source = tmp_path_factory.getbasetemp() / "tiny-text-source"
    if not source.exists():
        write_tiny_text_checkpoint(source)
    return Path(shutil.copytree(source, tmp_path / "text"))


def prepared(folder: Path, need_text: bool = False) -> Prepared:
    return prepare(folder, platform="cpu", max_requests=1, kv_tokens=256, need_text=need_text)


def test_prepare_reads_the_tokenizer(text_folder: Path) -> None:
    found = prepared(text_folder, need_text=True)
    assert found.tokenizer is not None
    assert found.tokenizer.encode("hi") == [104, 105]
    assert found.checkpoint.eos_ids == {EOS}


@pytest.mark.parametrize("need_text", [True, False])
@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tiktoken.model", LFS, "Git LFS pointer"),
        ("tiktoken.model", "", "is empty"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", LFS, "Git LFS pointer"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"320": {"content": "x"}}}', f"vocabulary of {VOCAB}"),
    ],
)
def test_prepare_refuses_a_broken_tokenizer(
    text_folder: Path, file: str, content: str, expected: str, need_text: bool
) -> None:
    (text_folder / file).write_text(content)
    with pytest.raises(TokenizerError) as caught:
        prepared(text_folder, need_text)
    assert any(file in reason and expected in reason for reason in caught.value.reasons), caught.value.reasons


def test_prepare_refuses_a_broken_generation_config(text_folder: Path) -> None:
    (text_folder / GENERATION).write_text("{")
    with pytest.raises(CheckpointError):
        prepared(text_folder)


def test_a_checkpoint_without_tokenizer_takes_ids_only(text_folder: Path) -> None:
    (text_folder / "tiktoken.model").unlink()
    assert prepared(text_folder).tokenizer is None
    with pytest.raises(TokenizerError, match=r"has no tokenizer \(tiktoken.model or tokenizer.json\)") as caught:
        prepared(text_folder, need_text=True)
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.FAILED
