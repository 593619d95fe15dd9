"""Golden plans: what every platform gives the published Kimi K3, as text that is reviewed like code.

``python -m k3port.testing.golden`` rewrites the files below ``tests/golden/plans``; with ``--check`` it only says which
differ. Versions are those of the profiles, so the answer is the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from k3port.model.config import ModelConfig
from k3port.model.config_file import parse_config
from k3port.model.shapes import TP_SIZES
from k3port.oracle.diff import join_windows, pair_windows
from k3port.oracle.profile import Profile, load_profiles
from k3port.oracle.spec import ALL_TOKENS, Plan, Selection, Tokens
from k3port.plugins import make_registry
from k3port.runtime.planner import Workload, make_plan
from k3port.runtime.terms import gib, vision_bytes
from k3port.testing.published import published_k3_config

FOLDER = Path(__file__).parents[2] / "tests" / "golden" / "plans"


def golden_names() -> Iterator[tuple[str, int]]:
    """Every platform with every tensor-parallel size."""
    for platform in sorted(load_profiles()):
        for tp in TP_SIZES:
            yield platform, tp


def golden_file(platform: str, tp: int) -> str:
    return f"{platform}-tp{tp}.txt"


def golden_plan(platform: str, tp: int) -> Plan:
    """The published model on a platform: its default activations, captured decode steps on GPUs, 8 requests."""
    values = published_k3_config()
    config: ModelConfig = parse_config(values)
    vision = values["vision_config"]
    profile: Profile = load_profiles()[platform]
    work = Workload(
        profile.activations,
        "mxfp4",
        tp=tp,
        nodes=-(-tp // profile.gpus_per_node),
        graph=profile.vendor != "cpu",
        vision=(vision["vt_hidden_size"], vision["patch_size"]),
    )
    return make_plan(
        config,
        work,
        profile.target(),
        make_registry(entry_points=False).kernels,
        usable_share=profile.usable_share,
        gpus_per_node=profile.gpus_per_node,
        vision=vision_bytes(vision, config.hidden_size),
        allow_gaps=True,
    )


def golden_text(plan: Plan) -> str:
    """What is compared: kernels per slot and window, padding, memory, and whether it fits."""
    packages = ", ".join(f"{name} {version}" for name, version in sorted(plan.packages.items()))
    lines = [
        f"Kimi K3 on {plan.platform} ({plan.device.arch}), tp {plan.tp}, {plan.dtype}",
        f"packages: {packages or 'none'}",
        "",
    ]
    for tokens, now, would in join_windows(pair_windows(plan.selections, plan.would_run)):
        assert now is not None
        assert would is not None
        lines.append(f"{now.slot}{_window(tokens)}: {_name(now)}")
        if would.kernel != now.kernel or would.padding:
            lines.append(f"  would run: {_name(would)}{f' ({would.padding})' if would.padding else ''}")
    if plan.memory is not None:
        lines += ["", "memory per rank"]
        lines += [f"  {item.kind}: {gib(item.bytes)}" for item in plan.memory.items]
        capacity = gib(plan.memory.capacity_bytes) if plan.memory.capacity_bytes else "an unknown amount"
        lines.append(f"  sum: {gib(plan.memory.total_bytes)} of {capacity}")
        if plan.memory.capacity_bytes and plan.memory.fits:
            limits = plan.memory
            lines.append(f"  fits: {limits.max_context_tokens} tokens, or {limits.max_concurrency} requests")
        lines += [f"  {part}" for part in plan.memory.advice.split("; ") if part]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return "\n".join(lines) + "\n"


def _name(selection: Selection) -> str:
    return selection.kernel or f"- ({selection.reason})"


def _window(tokens: Tokens) -> str:
    first, last = tokens
    return "" if tokens == ALL_TOKENS else f" {first}..{'' if last is None else last}"


def main() -> int:
    """Rewrites or checks all files; the exit status is 1 where a check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m k3port.testing.golden", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, name the files that differ")
    only_check = parser.parse_args().check
    wanted = {golden_file(platform, tp): golden_text(golden_plan(platform, tp)) for platform, tp in golden_names()}
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt")}
    changed = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    for name in changed:
        sys.stdout.write(f"{name}\n")
    if only_check:
        return int(bool(changed))
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in changed:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
