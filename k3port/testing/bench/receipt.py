"""The record of one measurement: on what, with what, when, which shapes, which configurations, which numbers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3port.errors import UsageError
from k3port.testing.bench.ceilings import Ceilings
from k3port.testing.bench.machine import Machine
from k3port.testing.bench.timing import Settings, Timing

RECEIPT_VERSION = 1


@dataclass(frozen=True)
class PeerRow:
    """A peer beside one kernel: its times, or why there are none.

    ``eager_ratio`` and ``captured_ratio`` say how many times as fast the kernel is; eager over eager and captured over
    captured. ``error`` is the relative RMS error of its result where it has one.
    """

    name: str
    status: str
    eager: Timing | None = None
    captured: Timing | None = None
    host: Timing | None = None
    eager_ratio: float | None = None
    captured_ratio: float | None = None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One kernel on one shape. Times are microseconds; ``percent_of_bound`` belongs to the captured time alone."""

    op: str
    phase: str
    case: str
    axes: dict[str, int]
    dtype: str
    kernel: str
    configs: dict[str, dict[str, int]]
    relative_rms: float
    tolerance: float
    bytes: int
    flops: int
    bound: float
    bound_by: str
    copies: int
    eager: Timing
    host: Timing
    captured: Timing | None
    not_captured: str
    percent_of_bound: float | None
    launches: tuple[str, ...] | None
    peers: tuple[PeerRow, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A kernel that was not measured on a shape: refused by its own limits, or by the gate (``failed``)."""

    op: str
    phase: str
    case: str
    kernel: str
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class Receipt:
    """Everything about one run of ``k3port bench kernels``."""

    machine: Machine
    ceilings: Ceilings
    settings: Settings
    rows: tuple[Row, ...]
    skipped: tuple[Skipped, ...] = ()
    peer_configs: dict[str, str] = field(default_factory=dict)
    version: int = RECEIPT_VERSION

    def to_record(self) -> dict[str, Any]:
        """As JSON values."""
        return dataclasses.asdict(self)


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Writes a receipt as JSON, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, json.dumps(receipt.to_record(), indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Puts a file in place of another in one step: a reader sees the old one or the new one."""
    draft = path.with_name(f".{path.name}.new")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_receipt(path: Path) -> Receipt:
    """Reads what :func:`write_receipt` wrote.

    Raises:
        UsageError: it is not there, is no receipt, or has another version.
    """
    hint = "give a file that k3port bench kernels --save wrote"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read", reasons=[str(exc)], hint=hint) from exc
    if not isinstance(data, dict) or data.get("version") != RECEIPT_VERSION:
        raise UsageError(f"{path} is no receipt of version {RECEIPT_VERSION}", hint=hint)
    try:
        return Receipt(
            machine=Machine(**data["machine"]),
            ceilings=Ceilings(**data["ceilings"]),
            settings=Settings(**data["settings"]),
            rows=tuple(_row(item) for item in data["rows"]),
            skipped=tuple(Skipped(**item) for item in data["skipped"]),
            peer_configs=data["peer_configs"],
        )
    except (KeyError, TypeError) as exc:
        raise UsageError(f"{path} is a broken receipt", reasons=[str(exc)], hint=hint) from exc


def _row(data: dict[str, Any]) -> Row:
    names = data["launches"]
    peers = tuple(PeerRow(**_timed(peer)) for peer in data["peers"])
    return Row(**{**_timed(data), "peers": peers, "launches": None if names is None else tuple(names)})


def _timed(data: dict[str, Any]) -> dict[str, Any]:
    return data | {key: Timing(**data[key]) for key in ("eager", "captured", "host") if data[key] is not None}
