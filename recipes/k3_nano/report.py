"""Write the numbers of ``results.json`` into the README of this folder and the checkpoint's MODEL_CARD.md.

Usage: ``python report.py [--check]``. With ``--check`` nothing is written; the exit status is 1 where a file differs.
``make nano-numbers WORK=FOLDER`` at the root of the project measures first and then calls this.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILES = (HERE / "README.md", HERE.parents[1] / "k3port" / "assets" / "k3-nano" / "MODEL_CARD.md")
BLOCK = re.compile(r"(?<=<!-- numbers -->\n).*?(?=<!-- end of numbers -->)", re.DOTALL)


def table(results: dict[str, float]) -> str:
    """The table of both files."""
    rows = {
        "held-out text": f"{results['heldout_documents']} documents, {results['heldout_bytes']:,} bytes, "
        f"windows of {results['context']:,} tokens that start from nothing",
        "held-out bits per byte (MXFP4 experts, float32 arithmetic)": f"{results['bits_per_byte']:.4f}",
        "the same weights before MXFP4 rounding": f"{results['bits_per_byte_unrounded']:.4f}",
        "perplexity cost of MXFP4": f"{results['mxfp4_perplexity_cost']:.2%}",
        "`xz -9e` on the same text, bits per byte": f"{results['xz_bits_per_byte']:.4f}",
        "below `xz -9e`": f"{results['below_xz']:.1%}",
        f"50-byte spans of {results['sample_count']} samples (temperature {results['temperature']}, top-p 0.95) "
        "that occur in the training text": f"{results['verbatim_share']:.2%} of {results['verbatim_spans']:,}",
    }
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items())]) + "\n"


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    args = parser.parse_args()
    block = table(json.loads((HERE / "results.json").read_text()))
    stale = []
    for file in FILES:
        text = file.read_text()
        new, count = BLOCK.subn(lambda _: block, text)
        if count != 1:
            raise SystemExit(f"{file}: expected one block of numbers, found {count}")
        if new != text:
            stale.append(file.name)
            if not args.check:
                file.write_text(new)
    if args.check and stale:
        raise SystemExit(f"numbers are out of date in {', '.join(stale)}: run python report.py")


if __name__ == "__main__":
    main()
