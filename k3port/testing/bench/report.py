"""Receipts as text: a table for the terminal, and Markdown rows for docs/performance.md.

``python -m k3port.testing.bench.report RECEIPT...`` prints the Markdown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from k3port.errors import K3Error
from k3port.testing.bench.ceilings import Ceilings
from k3port.testing.bench.receipt import PeerRow, Receipt, Row, read_receipt
from k3port.testing.bench.timing import Timing

HEADER = (
    "op",
    "shape",
    "kernel",
    "eager µs",
    "host µs",
    "captured µs",
    "% of bound",
    "peer",
    "eager ratio",
    "captured ratio",
)


def number(value: float) -> str:
    """Three digits and no exponent: 3.91, 14.6, 498, 20,900."""
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def time_text(timing: Timing | None) -> str:
    """The median, and the spread of the quartiles where it is more than 3%."""
    if timing is None:
        return "-"
    return number(timing.median) + (f" ±{50 * timing.spread:.0f}%" if timing.spread > 0.03 else "")


def ratio_text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


def table_rows(receipt: Receipt) -> list[tuple[str, ...]]:
    """One line per kernel, shape and peer, without a header."""
    lines: list[tuple[str, ...]] = []
    for row in receipt.rows:
        share = "-" if row.percent_of_bound is None else f"{row.percent_of_bound:.0f}% {row.bound_by}"
        times = (time_text(row.eager), number(row.host.median), time_text(row.captured))
        head = (op_text(row), row.case, row.kernel, *times, share)
        for peer in row.peers or (None,):
            lines.append((*head, *_peer_cells(peer)))
            # A second peer repeats the names, not the numbers.
            head = (*head[:3], *['"'] * 4)
    return lines


def op_text(row: Row) -> str:
    return f"{row.op} {row.phase}".rstrip()


def _peer_cells(peer: PeerRow | None) -> tuple[str, str, str]:
    if peer is None:
        return "-", "-", "-"
    if peer.status == "measured":
        times = f"{time_text(peer.eager)} / {time_text(peer.captured)}"
        return f"{peer.name}: {times}", ratio_text(peer.eager_ratio), ratio_text(peer.captured_ratio)
    return f"{peer.name}: peer {peer.status}", "-", "-"


def ceilings_text(ceilings: Ceilings) -> str:
    """Both ceilings with their units."""
    copy = f"{ceilings.copy_bytes_per_second / 1e9:,.0f} GB/s copy (read + written)"
    return f"{copy}, {ceilings.matmul_flops_per_second / 1e12:,.0f} TFLOP/s bf16 matrix product"


def head_lines(receipt: Receipt) -> list[str]:
    """Device, versions, date, ceilings, and how it was measured."""
    machine, settings = receipt.machine, receipt.settings
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    source = f"k3port {machine.k3port}{f' ({machine.commit})' if machine.commit else ''}"
    driver = f", driver {machine.driver}" if machine.driver else ""
    return [
        f"{machine.device} ({machine.arch}){driver}; {versions}; Python {machine.python}; {source}; {machine.date}",
        f"ceilings in the same run: {ceilings_text(receipt.ceilings)}",
        f"medians of {settings.rounds} rounds, kernels and peers in turn; buffers rotate below 100 MB; "
        "percent of bound: captured runs only",
    ]


def skipped_lines(receipt: Receipt) -> list[str]:
    """What was not measured and why, each reason once per kernel."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for item in receipt.skipped:
        cases.setdefault((f"{item.op} {item.phase}".rstrip(), item.kernel, item.reason), []).append(item.case)
    return [
        f"not measured: {op} {kernel} ({', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''})"
        f": {reason}"
        for (op, kernel, reason), names in cases.items()
    ]


def markdown(receipts: Sequence[Receipt]) -> str:
    """One section per receipt: what it was measured on, then the table."""
    parts: list[str] = []
    for receipt in receipts:
        parts += [f"{line}." for line in head_lines(receipt)]
        parts += ["", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
        parts += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table_rows(receipt)]
        parts += ["", *(f"* {line}" for line in skipped_lines(receipt)), ""]
    return "\n".join(parts).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints receipts as Markdown."""
    parser = argparse.ArgumentParser(
        description="Receipts of k3port bench kernels as Markdown for docs/performance.md."
    )
    parser.add_argument("receipts", nargs="+", type=Path)
    args = parser.parse_args(argv)
    try:
        sys.stdout.write(markdown([read_receipt(path) for path in args.receipts]))
    except K3Error as exc:
        sys.stderr.write(exc.render() + "\n")
        return int(exc.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
