"""``docs/settings.md``, made from the table of settings: ``python -m k3port.testing.settings_doc`` rewrites it."""

from __future__ import annotations

import sys
from pathlib import Path

from k3port.settings import FOREIGN, RETIRED, VARIABLES, Activations, owned_environment

FILE = Path(__file__).parents[2] / "docs" / "settings.md"

_INTRODUCTION = """\
# Settings

Environment variables that k3port reads, once per process. Command-line options and function arguments come before
them. `k3port doctor --settings` shows the value, the source and the effect of each one here and now.

This file is generated: `python -m k3port.testing.settings_doc` writes it.
"""
_UNKNOWN = """\
A name that starts with `K3PORT_` and is none of these is reported with the nearest one. A value that cannot be read,
or that contradicts another setting, stops the command with exit code 2. `NO_COLOR` and `TERM=dumb` switch colour off.
"""
_DISABLED = """\
`K3PORT_DISABLE` takes names and patterns. Pinning a kernel and excluding that same name is an error; a pin of a kernel
that only a pattern excludes is kept: `K3PORT_DISABLE=rocm.aiter_*` with `--kernel mla_attend@decode=rocm.aiter_mla_asm`
uses that one kernel of AITER.
"""
_OWNED = """\
## Variables that belong to k3port

AITER reads these for itself, and its kernels expect the weights in the order that belongs to the mode. k3port derives
them from `K3PORT_ACTIVATIONS` before AITER is imported. Another value in the environment is an error that names both
where `K3PORT_ACTIVATIONS` is set, and a warning where it is not. No adapter for AITER exists in this version, so they
are checked and never set yet.
"""
_FOREIGN = """\
## Variables that k3port does not read

Switches of other programs, often left set. They change nothing here; `k3port doctor` lists those that are set.
"""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def settings_markdown() -> str:
    """The whole file."""
    modes: tuple[Activations, ...] = ("bf16", "mxfp8", "mxfp4")
    owned = {mode: owned_environment(mode) for mode in modes}
    lines = [_INTRODUCTION, _row("Variable", "Value", "Meaning", "Without it"), _row(*["---"] * 4)]
    lines += [_row(f"`{v.name}`", v.expected, v.doc, v.unset) for v in VARIABLES]
    lines += ["", _UNKNOWN, _DISABLED]
    if RETIRED:
        lines += ["## Retired names", "", _row("Name", "Instead"), _row("---", "---")]
        lines += [*(_row(f"`{name}`", text) for name, text in RETIRED.items()), ""]
    lines += [_OWNED, _row("Variable", *(f"`{mode}`" for mode in modes)), _row(*["---"] * 4)]
    lines += [_row(f"`{name}`", *(owned[mode][name] for mode in modes)) for name in owned["bf16"]]
    lines += ["", _FOREIGN, _row("Variable", "Instead"), _row("---", "---")]
    lines += [_row(f"`{pattern}`", text) for pattern, text in FOREIGN]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the file."""
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(settings_markdown(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
