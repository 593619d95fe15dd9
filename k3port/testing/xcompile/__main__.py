"""``python -m k3port.testing.xcompile``: compiles the registered Triton kernels and prints a table."""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from pathlib import Path

from k3port.plugins import make_registry
from k3port.testing.targets import TARGETS
from k3port.testing.xcompile import TPS, compile_all, triton_kernels


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k3port.testing.xcompile", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every tuned configuration at every TP")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="can be repeated; default: all")
    parser.add_argument("--target", action="append", choices=TARGETS, help="can be repeated; default: all")
    parser.add_argument("--tp", action="append", type=int, choices=TPS, help="can be repeated; default: 8")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile (default: 2)")
    parser.add_argument("--cache", type=Path, help="folder of results (default: ~/.cache/k3port/xcompile)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    args = parser.parse_args(arguments)
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    start = time.perf_counter()
    kernels = triton_kernels(make_registry().kernels)
    if args.kernel:
        known = [spec.name for spec in kernels]
        if unknown := sorted(set(args.kernel) - set(known)):
            near = [name for text in unknown for name in difflib.get_close_matches(text, known, n=1)]
            more = f"did you mean {', '.join(near)}?" if near else f"there are: {', '.join(known)}"
            parser.error(f"no built Triton kernel {', '.join(unknown)}; {more}")
        kernels = tuple(spec for spec in kernels if spec.name in args.kernel)
    report = compile_all(
        kernels,
        targets=tuple(args.target or TARGETS),
        tps=tuple(args.tp or (TPS if args.all else (8,))),
        all_configs=args.all,
        jobs=args.jobs,
        cache_dir=args.cache,
    )
    print("\n".join(report.lines()))
    print(f"\n{len(kernels)} kernels in {time.perf_counter() - start:.0f} s; nothing was run.")
    if args.json:
        try:
            args.json.write_text(report.to_json() + "\n", encoding="utf-8")
        except OSError as exc:
            print(f"{parser.prog}: error: cannot write {args.json}: {exc.strerror or exc}", file=sys.stderr)
            return 1
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
