"""Faults of files: absent, damaged, with a header or an index that does not fit."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_faults import FILE_2, INDEX, LAYERS, cut, edit_header, edit_index, faults_of

from k3port.errors import CheckpointError
from k3port.runtime.headers import read_header
from k3port.runtime.preflight import check_checkpoint


def test_missing_folder_and_file_instead_of_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        check_checkpoint(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        check_checkpoint(tmp_path / "file")


def test_a_folder_without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    (folder / INDEX).unlink()
    (folder / "K3-Q4.gguf").write_text("")
    assert faults_of(folder) == ["no *.safetensors files (found K3-Q4.gguf, which k3port does not read)"]


def corrupt_json(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] = ord("\\")
    path.write_bytes(data)


FILE_FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda p: p.unlink(), f"{FILE_2} is missing"),
    ("empty", lambda p: cut(p, 0), f"{FILE_2} is empty"),
    ("six bytes", lambda p: cut(p, 6), f"{FILE_2} is truncated: 6 bytes"),
    ("cut header", lambda p: cut(p, 100), f"{FILE_2} is truncated inside its header"),
    ("cut data", lambda p: cut(p, p.stat().st_size - 1), f"{FILE_2} is truncated: its header promises"),
    ("longer", lambda p: cut(p, p.stat().st_size + 3), f"{FILE_2} has 3 bytes that no tensor owns"),
    (
        "lfs pointer",
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        f"{FILE_2} is a git-LFS pointer",
    ),
    ("html", lambda p: p.write_text("<!DOCTYPE html><html>Entry not found</html>"), "corrupt header"),
    ("corrupt json", corrupt_json, f"{FILE_2} has a corrupt header"),
    ("list header", lambda p: p.write_bytes(struct.pack("<Q", 2) + b"[]"), "it is not a JSON object"),
]


@pytest.mark.parametrize(("plant", "expected"), [f[1:] for f in FILE_FAULTS], ids=[f[0] for f in FILE_FAULTS])
@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_damaged_file(folder: Path, plant: Callable[[Path], object], expected: str, indexed: bool) -> None:
    if not indexed:
        (folder / INDEX).unlink()
    plant(folder / FILE_2)
    faults = faults_of(folder)
    if not indexed and not (folder / FILE_2).exists():
        # Nothing says that a file should be there: its tensors are missing.
        assert all("layers.1" in fault or "layer 1" in fault for fault in faults)
        assert "layer 1 lacks routed experts 0, 1, 2, 3, 4, 5, 6, 7 (8 of 8)" in faults
    else:
        assert len(faults) == 1, faults  # the tensors inside are not reported as missing too
        assert expected in faults[0]


HEADER_FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("gap", {"data_offsets": [8, 264]}, "leaves a gap before it|overlaps the tensor before it"),
    ("negative", {"data_offsets": [-4, 252]}, r"has the offsets \[-4, 252\]"),
    ("reversed", {"data_offsets": [256, 0]}, r"has the offsets \[256, 0\]"),
    ("wrong size", {"shape": [63]}, r"spans 128 bytes, but BF16 \[63\] needs 126"),
    ("dtype", {"dtype": "F17"}, "has the unknown dtype 'F17'"),
    ("shape", {"shape": "64"}, "has the shape '64'"),
    ("bool", {"shape": [True]}, r"has the shape \[True\]"),
]


@pytest.mark.parametrize(("change", "expected"), [f[1:] for f in HEADER_FAULTS], ids=[f[0] for f in HEADER_FAULTS])
def test_inconsistent_header(folder: Path, change: dict[str, Any], expected: str) -> None:
    def plant(header: dict[str, Any]) -> None:
        entry = header[LAYERS + "1.input_layernorm.weight"]
        if "data_offsets" in change and change["data_offsets"] == [8, 264]:
            begin, end = entry["data_offsets"]
            entry["data_offsets"] = [begin + 2, end + 2]
        else:
            entry.update(change)

    edit_header(folder / FILE_2, plant)
    (fault,) = faults_of(folder)
    assert "input_layernorm" in fault or "starts at byte" in fault
    assert re.search(expected, fault), fault


def test_overlapping_tensors(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(6))
    (fault,) = read_header(path).faults
    assert "b overlaps the tensor before it (starts at byte 2, expected 4)" in fault


def test_index_that_is_not_json(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    (fault,) = faults_of(folder)
    assert fault.startswith(f"{INDEX} is not valid JSON")


def test_index_that_is_a_git_lfs_pointer(folder: Path) -> None:
    (folder / INDEX).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert faults_of(folder) == [f"{INDEX} is a git-LFS pointer, not the file itself: run `git lfs pull`"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"metadata": ' + "9" * 5000 + "}", "", "\n"])
def test_index_that_no_parser_reads(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    (fault,) = faults_of(folder)
    assert fault.startswith(f"{INDEX} is not valid JSON")


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]"])
def test_index_without_a_weight_map(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    assert faults_of(folder) == [f"{INDEX} has no weight_map"]


def test_index_that_names_a_file_without_the_tensor(folder: Path) -> None:
    name = LAYERS + "1.self_attn.A_log"
    edit_index(folder, lambda weight_map: weight_map.update({name: "model-00003-of-000005.safetensors"}))
    assert faults_of(folder) == [f"{INDEX} places {name} in model-00003-of-000005.safetensors, which does not hold it"]


def test_index_that_leaves_the_folder(folder: Path) -> None:
    name = LAYERS + "1.self_attn.A_log"
    edit_index(folder, lambda weight_map: weight_map.update({name: "../model.safetensors"}))
    assert faults_of(folder)[0] == (
        f"{INDEX} names something that is not a file of this folder: {name} in '../model.safetensors'"
    )
