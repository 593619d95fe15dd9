"""Everything that can be wrong with the files of a tokenizer is named with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_tokenizer import BASE, LESSON, NAMED, RANKS, config_of, rank_lines, write_folder

from k3port.errors import TokenizerError
from k3port.text.tokenizer import Tokenizer


def faults_of(folder: Path, vocab_size: int | None = None) -> tuple[str, ...]:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_folder(folder, vocab_size)
    assert str(folder) in caught.value.message and "tiktoken.model" in caught.value.hint
    return caught.value.reasons


def swapped(number: int, line: bytes) -> list[bytes]:
    lines = rank_lines()
    lines[number - 1] = line
    return lines


LAST = rank_lines()[-1].split()[0]
BAD_RANKS: dict[str, tuple[list[bytes], list[str]]] = {
    "empty": ([], ["line 1: the file is empty"]),
    "blank": ([b"", b"  "], ["line 1: the file is empty"]),
    "lfs": (
        [b"version https://git-lfs.github.com/spec/v1", b"oid sha256:0"],
        ["line 1: this is a Git LFS pointer, not the file itself; run: git lfs pull"],
    ),
    "no rank": (swapped(300, b"dGhl"), ["line 300: no rank after the token"]),
    "three fields": (swapped(300, b"dGhl 299 1"), ["line 300: more than a token and its rank"]),
    "rank is text": (swapped(300, b"dGhl x"), ["line 300: the rank is not a decimal number"]),
    "negative rank": (swapped(300, b"dGhl -1"), ["line 300: the rank is not a decimal number"]),
    "endless rank": (swapped(300, b"dGhl " + b"9" * 9999), ["line 300: the rank is not a decimal number"]),
    "bad base64": (swapped(300, b"d*hl 299"), ["line 300: the token of rank 299 is not base64"]),
    "bad padding": (swapped(300, b"dGh 299"), ["line 300: the token of rank 299 is not base64"]),
    "byte broken": (swapped(66, b"Q 65"), ["line 66: the token of rank 65 is not base64"]),
    "repeated rank": ([*rank_lines(), b"enp6 299"], [f"line {BASE + 1}: rank 299 was already given in line 300"]),
    "repeated token": (
        [*rank_lines(), LAST + b" %d" % BASE],
        [f"line {BASE + 1}: rank {BASE} repeats the token of line {BASE}"],
    ),
    "gap": (
        [*rank_lines(), b"enp6 %d" % (BASE + 1)],
        [f"line {BASE + 1}: rank {BASE} is missing before rank {BASE + 1}"],
    ),
    "huge gap": (
        [*rank_lines(), b"enp6 999999999"],
        [f"line {BASE + 1}: ranks {BASE} to 999999998 are missing before rank 999999999"],
    ),
    "starts at 1": (
        rank_lines({token: rank + 1 for token, rank in RANKS.items()}),
        ["line 1: rank 0 is missing before rank 1"],
    ),
    "no byte 0x41": (
        swapped(66, b"enp6 65"),
        [f"line {BASE}: the file ends without 1 of the 256 single bytes: 0x41"],
    ),
    "not this kind of file": ([b"\x00\xff\x80{}"], ["line 1: no rank after the token"]),
    "several": (
        [*swapped(300, b"dGhl x"), b"?? %d" % BASE, b"enp6 %d" % (BASE + 3)],
        [
            "line 300: the rank is not a decimal number",
            f"line {BASE + 1}: the token of rank {BASE} is not base64",
            "line 301: rank 299 is missing before rank 300",
            f"line {BASE + 2}: ranks {BASE + 1} to {BASE + 2} are missing before rank {BASE + 3}",
        ],
    ),
}


@pytest.mark.parametrize("name", BAD_RANKS)
def test_broken_ranks(tmp_path: Path, name: str) -> None:
    lines, expected = BAD_RANKS[name]
    faults = faults_of(write_folder(tmp_path, lines))
    assert list(faults)[: len(expected)] == [f"tiktoken.model {fault}" for fault in expected]
    assert len(faults) == len(expected) or name == "not this kind of file"


def test_missing_bytes_are_counted_not_listed(tmp_path: Path) -> None:
    (fault,) = faults_of(write_folder(tmp_path, rank_lines({b"aa": 0, b"bb": 1})))
    assert fault.endswith("line 2: the file ends without 256 of the 256 single bytes: 0x00, 0x01, 0x02, 0x03, ...")


@pytest.mark.parametrize("ending", [b"\r\n", b"\n\n", b"\n"])
def test_line_endings_and_order_do_not_matter(tmp_path: Path, tok: Tokenizer, ending: bytes) -> None:
    write_folder(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(ending.join(reversed(rank_lines())))
    assert Tokenizer.from_folder(tmp_path).encode(LESSON) == tok.encode(LESSON)


def entry(content: object, special: object = True) -> dict[str, object]:
    return {"content": content, "special": special}


def with_entries(**entries: object) -> dict[str, object]:
    config = config_of()
    decoder = config["added_tokens_decoder"]
    assert isinstance(decoder, dict)
    decoder.update({key.removeprefix("_"): value for key, value in entries.items()})
    return config


NEW = f"_{BASE + 30}"
BAD_CONFIGS: dict[str, tuple[object, str]] = {
    "empty": ("", "line 1: the file is empty"),
    "cut off": ('{\n"a": [1,\n', "line 3: not JSON (Expecting value at column 1)"),
    "not utf-8": (b'{\n"a": "\xff"}', "line 2: not UTF-8"),
    "too deep": ("[" * 100_000, "line 1: not JSON that can be read (nested too deeply, or a number too long)"),
    "long number": ('{"a": ' + "9" * 9999 + "}", "line 1: not JSON that can be read (nested too deeply, or a num"),
    "a list": ("[]", "line 1: not a JSON object"),
    "nothing named": ({}, "line 1: added_tokens_decoder names no control token"),
    "a list of names": ({"x": 1, "added_tokens_decoder": []}, "line 3: added_tokens_decoder names no control token"),
    "bpe id": (
        with_entries(_65=entry("<|x|>")),
        f"line 67: control token '<|x|>' has id 65, which is a BPE rank (0 to {BASE - 1})",
    ),
    "outside": (
        with_entries(**{f"_{BASE + 256}": entry("<|x|>")}),
        f"line 67: control token '<|x|>' has id {BASE + 256}, outside the vocabulary of {BASE + 256}",
    ),
    "id is text": (with_entries(_x=entry("<|x|>")), "line 67: 'x' is not a token id"),
    "padded id": (with_entries(_0300=entry("<|x|>")), "line 67: '0300' is not a token id"),
    "endless id": (
        with_entries(**{"_" + "9" * 9999: entry("<|x|>")}),
        "line 67: '99999999999999999999' is not a token",
    ),
    "same name": (with_entries(**{NEW: entry("<|sep|>")}), f"line 67: control token '<|sep|>' is both {BASE + 5} and"),
    "name of another slot": (
        with_entries(**{NEW: entry(f"<|reserved_token_{BASE + 31}|>")}),
        f"line 67: token {BASE + 30} carries the reserved name of another slot",
    ),
    "no text": (with_entries(**{NEW: entry("")}), f"line 67: token {BASE + 30} needs a non-empty text"),
    "text is number": (with_entries(**{NEW: entry(5)}), f"line 67: token {BASE + 30} needs a non-empty text"),
    "text is no unicode": (
        with_entries(**{NEW: entry("\ud800")}),
        f"line 67: token {BASE + 30} needs a non-empty text",
    ),
    "special is text": (with_entries(**{NEW: entry("x", "no")}), f"line 67: token {BASE + 30} needs a non-empty text"),
    "entry is text": (with_entries(**{NEW: "<|x|>"}), f"line 67: token {BASE + 30} needs a non-empty text"),
    "twice": (
        '{"added_tokens_decoder": {}, \n "added_tokens_decoder": {}}',
        "line 1: key 'added_tokens_decoder' appears twice",
    ),
    "unknown eos": (config_of() | {"eos_token": "</s>"}, "line 69: eos_token is not one of the control tokens"),
    "eos is number": (config_of() | {"eos_token": 7}, "line 69: eos_token is not one of the control tokens"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_broken_config(tmp_path: Path, name: str) -> None:
    config, expected = BAD_CONFIGS[name]
    faults = faults_of(write_folder(tmp_path, config=config), BASE + 256)
    assert faults[0].startswith(f"tokenizer_config.json {expected}")
    assert len(faults) == 1 or name == "twice"


def test_missing_files(tmp_path: Path, folder: Path) -> None:
    both = ("tiktoken.model: no such file or directory", "tokenizer_config.json: no such file or directory")
    assert faults_of(tmp_path) == faults_of(tmp_path / "absent") == both
    for n, name in enumerate(("tiktoken.model", "tokenizer_config.json")):
        write_folder(tmp_path / name)
        (tmp_path / name / name).unlink()
        assert faults_of(tmp_path / name) == (both[n],)
        (tmp_path / name / name).mkdir()
        assert faults_of(tmp_path / name) == (f"{name}: is a directory",)
    assert faults_of(folder / "tiktoken.model")[0] == "tiktoken.model: not a directory"


@pytest.mark.parametrize("vocab_size", [BASE - 1, 1, 0, -5])
def test_vocab_size_below_the_ranks(folder: Path, vocab_size: int) -> None:
    assert faults_of(folder, vocab_size) == (
        f"tiktoken.model line {BASE}: {BASE} tokens, but vocab_size is only {vocab_size}",
    )


def test_vocab_size_that_cuts_named_slots_off(folder: Path) -> None:
    faults = faults_of(folder, BASE + 254)
    assert [re.findall(r"'(.*)'", fault) for fault in faults] == [["[UNK]"], ["[PAD]"]]
    assert all(f"outside the vocabulary of {BASE + 254}" in fault for fault in faults)
    assert len(faults_of(folder, BASE)) == len(NAMED)


def test_faults_of_both_files_come_together(tmp_path: Path) -> None:
    config = with_entries(_65=entry("<|x|>"), _y=entry("z"))
    faults = faults_of(write_folder(tmp_path, swapped(300, b"dGhl"), config))
    assert [fault.split(":")[0] for fault in faults] == ["tiktoken.model line 300", "tokenizer_config.json line 71"]


@pytest.mark.parametrize("lost", [1, 7, BASE - 256])
def test_ranks_that_were_cut_between_two_lines(tmp_path: Path, lost: int) -> None:
    """What is left parses, but every control token would be one of the missing ranks."""
    folder = write_folder(tmp_path, rank_lines()[:-lost])
    assert faults_of(folder, BASE + 256) == (
        f"tiktoken.model line {BASE - lost}: the file ends after {BASE - lost} ranks, but the first control token "
        f"'[BOS]' of tokenizer_config.json has id {BASE}, and vocab_size is {BASE + 256}: {lost} ranks are missing",
    )
    assert all("outside the vocabulary" in fault for fault in faults_of(folder))  # 256 slots no longer reach [PAD]


def test_the_first_slot_may_be_unnamed_where_there_are_256(tmp_path: Path) -> None:
    named = {slot: name for slot, name in NAMED.items() if slot not in (0, 1)}
    config = config_of(named) | {"bos_token": None, "eos_token": None}
    folder = write_folder(tmp_path, config=config)
    assert Tokenizer.from_folder(folder, BASE + 256).bos_id is None
    (fault,) = faults_of(folder, BASE + 300)
    assert f"has id {BASE + 2}, and vocab_size is {BASE + 300}" in fault
