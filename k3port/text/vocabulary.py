"""Read and check the two files that define K3's vocabulary: ``tiktoken.model`` and ``tokenizer_config.json``.

Nothing in the folder is executed. Every fault found in both files is reported in one `TokenizerError`, because a
damaged download usually has more than one and a user should not have to find them one run at a time.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3port.errors import TokenizerError

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
DEFAULT_CONTROL_SLOTS = 256
"""Control slots behind the BPE ranks when no ``vocab_size`` is given: what every published Kimi vocabulary has."""

_LFS_POINTER = b"version https://git-lfs"
_MAX_DIGITS = 9
"""Longer numbers are no token ids, and Python itself refuses to convert very long ones."""


@dataclass(frozen=True, slots=True)
class ControlToken:
    """One control slot: its text, and whether the checkpoint flags it as invisible to readers."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A complete vocabulary: BPE ranks ``0 .. len(ranks) - 1``, then one control token per slot up to the end.

    Attributes:
        ranks: token bytes to rank.
        controls: one entry per slot, in id order; the first has id ``len(ranks)``.
        roles: ``bos``, ``eos`` and ``pad`` to an id, where the checkpoint has one.
    """

    ranks: Mapping[bytes, int]
    controls: tuple[ControlToken, ...]
    roles: Mapping[str, int]


def read_vocabulary(folder: Path, vocab_size: int | None = None) -> Vocabulary:
    """Read the vocabulary of a checkpoint folder.

    Args:
        folder: where ``tiktoken.model`` and ``tokenizer_config.json`` lie.
        vocab_size: rows of the embedding, from the model's configuration; the control slots end there.
            Without it there are 256 of them.

    Raises:
        TokenizerError: a file is missing or damaged, or the files and ``vocab_size`` contradict each other. The
            reasons name the file and the line of every fault.
    """
    faults: list[str] = []
    ranks = _read_ranks(folder / RANKS_FILE, faults)
    num_base = len(ranks) if ranks is not None else None

    end: int | None = None
    if num_base is not None:
        end = num_base + DEFAULT_CONTROL_SLOTS if vocab_size is None else vocab_size
        if end < num_base:
            faults.append(f"{RANKS_FILE} line {num_base}: {num_base} tokens, but vocab_size is only {vocab_size}")
            end = None  # every control id would be "outside" too: one cause, one reason
    named, roles = _read_config(folder / CONFIG_FILE, num_base, end, faults)
    if not faults and num_base is not None:
        _check_fit(num_base, vocab_size, named, faults)

    if faults or ranks is None or num_base is None or end is None:
        raise TokenizerError(
            f"the tokenizer files in {folder} cannot be used",
            reasons=faults,
            hint=f"fetch {RANKS_FILE}, {CONFIG_FILE} and config.json again, all three from the same checkpoint",
        )
    slots = range(num_base, end)
    controls = tuple(named.get(slot) or ControlToken(f"<|reserved_token_{slot}|>") for slot in slots)
    ids = {control.text: slot for slot, control in zip(slots, controls, strict=True)}
    return Vocabulary(ranks, controls, {role: ids[text] for role, text in roles.items()})


def _check_fit(num_base: int, vocab_size: int | None, named: Mapping[int, ControlToken], faults: list[str]) -> None:
    """The control slots begin right behind the ranks. A file that was cut between two lines shows nowhere else."""
    first = min(named)
    if first == num_base or (vocab_size is not None and vocab_size - num_base == DEFAULT_CONTROL_SLOTS):
        return
    size = "" if vocab_size is None else f", and vocab_size is {vocab_size}"
    faults.append(
        f"{RANKS_FILE} line {num_base}: the file ends after {num_base} ranks, but the first control token "
        f"{named[first].text!r} of {CONFIG_FILE} has id {first}{size}: {first - num_base} ranks are missing"
    )


def _read_bytes(path: Path, faults: list[str]) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        faults.append(f"{path.name}: {(error.strerror or 'cannot be read').lower()}")
        return None
    if not data.strip():
        faults.append(f"{path.name} line 1: the file is empty")
    elif data.startswith(_LFS_POINTER):
        faults.append(f"{path.name} line 1: this is a Git LFS pointer, not the file itself; run: git lfs pull")
    else:
        return data
    return None


def _read_ranks(path: Path, faults: list[str]) -> dict[bytes, int] | None:
    """``base64(token) rank`` per line. None when nothing could be read at all or any line is bad."""
    data = _read_bytes(path, faults)
    if data is None:
        return None
    ranks: dict[bytes, int] = {}
    line_of_rank: dict[int, int] = {}
    lines_without_rank = 0
    num_faults_before = len(faults)

    def fault(number: int, what: str) -> None:
        faults.append(f"{path.name} line {number}: {what}")

    number = 0
    for number, line in enumerate(data.splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue  # a blank line at the end is harmless
        if len(fields) != 2:
            fault(number, "no rank after the token" if len(fields) == 1 else "more than a token and its rank")
            lines_without_rank += 1
            continue
        if not fields[1].isdigit() or len(fields[1]) > _MAX_DIGITS:
            fault(number, "the rank is not a decimal number")
            lines_without_rank += 1
            continue
        rank = int(fields[1])
        if rank in line_of_rank:
            fault(number, f"rank {rank} was already given in line {line_of_rank[rank]}")
            continue
        line_of_rank[rank] = number
        try:
            token = base64.b64decode(fields[0], validate=True)
        except (binascii.Error, ValueError):
            fault(number, f"the token of rank {rank} is not base64")
            continue
        if not token:
            fault(number, f"the token of rank {rank} is empty")
        elif token in ranks:
            fault(number, f"rank {rank} repeats the token of line {line_of_rank[ranks[token]]}")
        else:
            ranks[token] = rank

    # A line whose rank could not be read leaves a hole that is no fault of its own.
    gaps = _gaps(sorted(line_of_rank))
    if sum(last - first + 1 for first, last in gaps) > lines_without_rank:
        for first, last in gaps:
            missing = f"rank {first} is missing" if first == last else f"ranks {first} to {last} are missing"
            fault(line_of_rank[last + 1], f"{missing} before rank {last + 1}")
    # Without all bytes some text would have no encoding. Bad lines above may be the cause, so report them first.
    absent = [value for value in range(256) if bytes([value]) not in ranks]
    if absent and len(absent) > len(faults) - num_faults_before:
        shown = ", ".join(f"0x{value:02x}" for value in absent[:4]) + (", ..." if len(absent) > 4 else "")
        fault(number, f"the file ends without {len(absent)} of the 256 single bytes: {shown}")
    return ranks if len(faults) == num_faults_before else None


def _gaps(present: list[int]) -> list[tuple[int, int]]:
    """The runs of numbers, from 0 on, that a sorted list leaves out. Never enumerates them: a rank may be huge."""
    expected, gaps = 0, []
    for value in present:
        if value > expected:
            gaps.append((expected, value - 1))
        expected = value + 1
    return gaps


def _read_config(
    path: Path, num_base: int | None, end: int | None, faults: list[str]
) -> tuple[dict[int, ControlToken], dict[str, str]]:
    """Named control tokens by id, and the texts of the bos, eos and pad tokens.

    Ids are checked against ``num_base`` and ``end`` only where those are known.
    """
    named: dict[int, ControlToken] = {}
    roles: dict[str, str] = {}
    config, text = _read_json_object(path, faults)
    if config is None:
        return named, roles

    def fault(key: str, what: str) -> None:
        faults.append(f"{path.name} line {_line_of_key(text, key)}: {what}")

    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict) or not entries:
        fault("added_tokens_decoder", "added_tokens_decoder names no control token")
        return named, roles
    id_of_text: dict[str, str] = {}
    for key, entry in entries.items():
        if not re.fullmatch(rf"0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}}", key, re.ASCII):
            fault(key, f"{key[:20]!r} is not a token id")
            continue
        content = entry.get("content") if isinstance(entry, dict) else None
        special = entry.get("special", False) if isinstance(entry, dict) else None
        if not isinstance(content, str) or not content or not isinstance(special, bool) or not _is_unicode(content):
            fault(key, f"token {key} needs a non-empty text `content` and a true or false `special`")
            continue
        slot = int(key)
        reserved = re.fullmatch(r"<\|reserved_token_([0-9]+)\|>", content, re.ASCII)
        if num_base is not None and slot < num_base:
            fault(key, f"control token {content!r} has id {key}, which is a BPE rank (0 to {num_base - 1})")
        elif end is not None and slot >= end:
            fault(key, f"control token {content!r} has id {key}, outside the vocabulary of {end}")
        elif content in id_of_text:
            fault(key, f"control token {content!r} is both {id_of_text[content]} and {key}")
        elif reserved and reserved[1] != key:
            fault(key, f"token {key} carries the reserved name of another slot, {content!r}")
        named[slot] = ControlToken(content, special)
        id_of_text.setdefault(content, key)

    for role in ("bos", "eos", "pad"):
        value = config.get(f"{role}_token")
        if isinstance(value, dict):  # the long form of the same field
            value = value.get("content")
        if value is None:
            value = f"[{role.upper()}]"
            if value not in id_of_text:
                continue
        if not isinstance(value, str) or value not in id_of_text:
            fault(f"{role}_token", f"{role}_token is not one of the control tokens in added_tokens_decoder")
            continue
        roles[role] = value
    return named, roles


def _read_json_object(path: Path, faults: list[str]) -> tuple[dict[str, Any] | None, str]:
    data = _read_bytes(path, faults)
    if data is None:
        return None, ""
    repeated: list[str] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built = dict(pairs)
        if len(built) < len(pairs):  # JSON readers differ in which one wins, so neither may
            keys = [key for key, _ in pairs]
            repeated.extend(sorted({key for key in keys if keys.count(key) > 1}))
        return built

    text = ""
    try:
        text = data.decode("utf-8-sig")
        config = json.loads(text, object_pairs_hook=build)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        faults.append(f"{path.name} line {line}: not UTF-8")
        return None, text
    except json.JSONDecodeError as error:
        faults.append(f"{path.name} line {error.lineno}: not JSON ({error.msg} at column {error.colno})")
        return None, text
    except (RecursionError, ValueError):
        faults.append(f"{path.name} line 1: not JSON that can be read (nested too deeply, or a number too long)")
        return None, text
    faults.extend(f"{path.name} line {_line_of_key(text, key)}: key {key[:40]!r} appears twice" for key in repeated)
    if not isinstance(config, dict):
        faults.append(f"{path.name} line 1: not a JSON object")
        return None, text
    return config, text


def _line_of_key(text: str, key: str) -> int:
    """The line of a key in JSON text, 1 when it is written in some unusual way. For messages only."""
    found = re.search(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _is_unicode(text: str) -> bool:
    """Whether a string has no lone surrogate, which JSON escapes can smuggle in."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
