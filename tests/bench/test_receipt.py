"""Receipts: what they hold, that they come back as they were, and the tables made of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from bench_parts import CEILINGS

from k3port.errors import UsageError
from k3port.testing.bench.machine import Machine, describe, package_version, target_of
from k3port.testing.bench.receipt import PeerRow, Receipt, Row, Skipped, read_receipt, write_receipt
from k3port.testing.bench.report import (
    HEADER,
    head_lines,
    main,
    markdown,
    number,
    skipped_lines,
    table_rows,
    time_text,
)
from k3port.testing.bench.timing import Settings, Timing, summarize

MACHINE = Machine(
    device="NVIDIA H200",
    arch="sm_90",
    vendor="nvidia",
    memory_bytes=141 * 10**9,
    compute_units=132,
    driver="580.1",
    toolkit="cu130",
    python="3.12.3",
    packages={"torch": "2.11.0+cu130", "triton": "3.6.0"},
    k3port="0.1.0",
    commit="abc123",
    date="2026-12-01T10:00:00+00:00",
)


def timing(microseconds: float) -> Timing:
    return summarize([microseconds * 1e-6] * 3)


def example() -> Receipt:
    row = Row(
        op="kda_core",
        phase="decode",
        case="H96 B32",
        axes={"T": 32, "H": 96},
        dtype="bfloat16",
        kernel="portable.kda_core_step",
        configs={"kda_step": {"num_warps": 4}},
        relative_rms=2e-3,
        tolerance=8e-3,
        bytes=412_000_000,
        flops=10**9,
        bound=96.5,
        bound_by="memory",
        copies=1,
        eager=timing(110),
        host=timing(31),
        captured=timing(104.25),
        not_captured="",
        percent_of_bound=92.6,
        launches=("kda_step_kernel",),
        peers=(
            PeerRow("fla", "measured", timing(140), timing(117), timing(90), 1.27, 1.12, 3e-3, "pinned"),
            PeerRow("other", "absent", note="not installed"),
        ),
    )
    skipped = tuple(Skipped("kda", "decode", f"H96 B{n}", "portable.x", "AXIS: too wide") for n in (1, 8, 32, 128))
    return Receipt(MACHINE, CEILINGS, Settings(), (row,), skipped, {"chunk_fwd": "BK: 64, num_warps: 4"})


def test_a_receipt_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    write_receipt(path, example())
    assert read_receipt(path) == example()
    assert [file.name for file in tmp_path.iterdir()] == ["receipt.json"]


def test_a_receipt_says_on_what_and_with_what(tmp_path: Path) -> None:
    record = example().to_record()
    machine = record["machine"]
    assert {"device", "arch", "driver", "packages", "k3port", "commit", "date", "python"} <= set(machine)
    row = record["rows"][0]
    assert row["configs"] == {"kda_step": {"num_warps": 4}}
    assert row["captured"]["median"] == pytest.approx(104.25)
    assert json.loads(json.dumps(record))["peer_configs"] == {"chunk_fwd": "BK: 64, num_warps: 4"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "no receipt of version"),
        ('{"version": 99}', "no receipt of version"),
        ('{"version": 1, "machine": {}}', "broken receipt"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_receipt(path)


def test_a_receipt_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text("old")
    with pytest.raises(TypeError):
        write_receipt(path, dataclasses.replace(example(), peer_configs={"a": object()}))  # type: ignore[dict-item]
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["receipt.json"]


def test_the_table() -> None:
    first, second = table_rows(example())
    assert dict(zip(HEADER, first, strict=True)) == {
        "op": "kda_core decode",
        "shape": "H96 B32",
        "kernel": "portable.kda_core_step",
        "eager µs": "110",
        "host µs": "31.0",
        "captured µs": "104",
        "% of bound": "93% memory",
        "peer": "fla: 140 / 117",
        "eager ratio": "1.27x",
        "captured ratio": "1.12x",
    }
    assert second[7:] == ("other: peer absent", "-", "-")


def test_numbers_have_three_digits() -> None:
    texts = [number(v) for v in (0.5, 3.914, 9.996, 14.63, 99.96, 498.4, 1110.0, 20912.0)]
    assert texts == ["0.50", "3.91", "10.0", "14.6", "100", "498", "1,110", "20,900"]
    assert time_text(summarize([9e-6, 10e-6, 11e-6])) == "10.0 ±5%"
    assert time_text(None) == "-"


def test_what_was_not_measured_is_told_once() -> None:
    assert skipped_lines(example()) == [
        "not measured: kda decode portable.x (H96 B1, H96 B8, H96 B32 and 1 more): AXIS: too wide"
    ]


def test_markdown_of_receipts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "receipt.json"
    write_receipt(path, example())
    assert main([str(path), str(path)]) == 0
    text = capsys.readouterr().out
    assert text == markdown([example(), example()])
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200 (sm_90), driver 580.1; torch 2.11.0+cu130, triton 3.6.0; Python 3.12.3")
    assert "4,000 GB/s copy (read + written), 700 TFLOP/s" in text
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
    assert "2026-12-01" in head_lines(example())[0]
    assert main([str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_this_machine_is_described() -> None:
    found = describe(torch.device("cpu"))
    assert found.packages["torch"] == torch.__version__
    assert (found.vendor, found.driver) == ("cpu", "")
    assert found.date.endswith("+00:00")
    target = target_of(found)
    assert (target.device.vendor, target.packages) == ("cpu", found.packages)
    assert package_version("no-such-package-at-all") == ""
