"""``k3port doctor``: what this machine has, what is wrong with it, and one command against each fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import click

from k3port import __version__
from k3port.cli.console import Console
from k3port.cli.options import COUNT, INPUT, INPUT_FILE, TEXT
from k3port.errors import ExitCode
from k3port.oracle.builtin_checks import CHECKS
from k3port.oracle.checks import CATEGORIES, Checked, DoctorCheck, Facts, Status, run_checks, worst
from k3port.oracle.detect import Detection
from k3port.oracle.package_checks import PACKAGE_CHECKS
from k3port.oracle.sources import Gpu

ALL_CHECKS: tuple[DoctorCheck, ...] = (*CHECKS, *PACKAGE_CHECKS)
_MARKS: dict[Status, str] = {"ok": "[ok]  ", "info": "[ok]  ", "warning": "[warn]", "fail": "[FAIL]"}
_BULLETS: dict[Status, str] = {"ok": "-", "info": "-", "warning": "!", "fail": "x"}


@click.command(short_help="Look for what is wrong with this machine.")
@click.option(
    "--platform", type=TEXT, metavar="NAME", help="Look from the view of this profile. Default: what is here."
)
@click.option("--profiles", multiple=True, type=INPUT_FILE, metavar="FILE", help="A file with own platforms.")
@click.option("--model", type=INPUT, metavar="PATH", help="Also check a checkpoint folder or a config.json.")
@click.option("--tp", type=COUNT, metavar="N", help="GPUs that have to work together.")
@click.option("--settings", "show_settings", is_flag=True, help="Also list every setting: value, source, effect.")
@click.option("--deep", is_flag=True, help="Also try to import optional packages, each in its own process.")
@click.option("--strict", is_flag=True, help="Fail on warnings too.")
@click.option("--json", "json_mode", is_flag=True, help="Write one JSON document on stdout instead of text.")
@click.option("-v", "--verbose", is_flag=True, help="Print every result, not only what is wrong.")
@click.pass_context
def doctor(ctx: click.Context, **given: Any) -> None:
    """Check system, settings, devices, packages, plugins, profiles and kernels.

    Needs no torch and no GPU. Exit code 0: nothing failed; 1: a check failed, or with --strict warned.
    """
    from k3port.cli.doctor_facts import DoctorOptions, gather

    console: Console = ctx.obj
    console.json_mode, console.verbose = given["json_mode"], given["verbose"]
    options = DoctorOptions(given["platform"], given["model"], given["tp"], given["deep"], given["profiles"])
    facts, registry = gather(options)
    checked = run_checks((*ALL_CHECKS, *registry.checks), facts)
    status = worst(item.result.status for item in checked)
    failed = status == "fail" or (given["strict"] and status == "warning")
    if console.json_mode:
        console.document(document(facts, checked, failed=failed))
    else:
        # What was asked about is told in full.
        asked = {"model", "kernels"} if given["model"] is not None else set()
        for line in lines(checked, verbose=given["verbose"], asked=asked):
            console.line(line)
        if given["show_settings"]:
            for line in settings_lines(facts):
                console.line(line)
    if failed:
        ctx.exit(int(ExitCode.FAILED))


def lines(checked: Sequence[Checked], *, verbose: bool, asked: Collection[str] = ()) -> list[str]:
    """One line per category; below it what is wrong, what is ``asked`` about, or with ``verbose`` everything."""
    out = [f"k3port {__version__} doctor"]
    categories = dict.fromkeys((*CATEGORIES, *(item.category for item in checked)))
    for category in categories:
        mine = [item for item in checked if item.category == category]
        if not mine:
            continue
        status = worst(item.result.status for item in mine)
        summary = next((item.result.text for item in mine if item.result.status == "ok"), "")
        out.append(f"{_MARKS[status]} {category:9} {summary}".rstrip())
        for item in mine:
            result = item.result
            quiet = result.status == "info" or (result.status == "ok" and category not in asked)
            if quiet and not verbose:
                continue
            out.append(f"         {_BULLETS[result.status]} {item.id}: {result.text}")
            if result.remedy:
                out.append(f"           try: {result.remedy}")
    fails = sum(item.result.status == "fail" for item in checked)
    warnings = sum(item.result.status == "warning" for item in checked)
    if fails or warnings:
        parts = [f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((fails, "failure"), (warnings, "warning")) if n]
        out.append(" and ".join(parts))
    else:
        out.append("nothing is wrong")
    return out


def settings_lines(facts: Facts) -> list[str]:
    """The table of ``--settings``."""
    rows = [("setting", "value", "source", "effect")]
    rows += [(row.name, row.value or "-", row.source, row.effect) for row in facts.settings]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = ["  ".join([*(c.ljust(w) for c, w in zip(r, widths, strict=False)), r[3]]) for r in rows]
    digest = [f"digest of what changes a plan or a result: {facts.settings_digest}"] if facts.settings else []
    return ["", *table, *digest]


def document(facts: Facts, checked: Sequence[Checked], *, failed: bool) -> dict[str, Any]:
    """Everything as JSON values."""
    return {
        "k3port": __version__,
        "ok": not failed,
        "status": worst(item.result.status for item in checked),
        "platform": facts.profile.name if facts.profile is not None else None,
        "here": facts.here,
        "checks": [{"id": item.id, "category": item.category, **dataclasses.asdict(item.result)} for item in checked],
        "detection": _detection_record(facts.detection),
        "packages": dict(facts.packages),
        "settings_digest": facts.settings_digest,
        "settings": [
            {"name": r.name, "value": r.value, "source": r.source, "effect": r.effect, "kind": r.kind}
            for r in facts.settings
        ],
    }


def _gpu_record(gpu: Gpu) -> dict[str, Any]:
    return {**dataclasses.asdict(gpu.device), "index": gpu.index, "sources": list(gpu.sources), "parent": gpu.parent}


def _detection_record(detection: Detection) -> dict[str, Any]:
    return {
        "at": detection.at,
        "seconds": round(detection.seconds, 3),
        "gpus": [_gpu_record(gpu) for gpu in detection.gpus],
        "visible": {
            vendor: [gpu.device.uuid or gpu.device.pci for gpu in gpus] for vendor, gpus in detection.visible.items()
        },
        "because": {vendor: text for vendor, text in detection.because.items() if text},
        "blocked": dict(detection.blocked),
        "sources": [
            {
                "source": report.source,
                "vendor": report.vendor,
                "state": report.state,
                "detail": report.detail,
                "gpus": len(report.gpus),
                "facts": dict(report.facts),
            }
            for report in detection.reports
        ],
        "torch": dataclasses.asdict(detection.torch),
    }
