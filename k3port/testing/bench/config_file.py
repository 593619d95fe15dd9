"""Writes tuned configurations into ``backends/portable/configs``: one entry per line, other devices' entries kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3port.errors import K3Error
from k3port.testing.bench.receipt import replace_text

Range = tuple[int | None, int | None]
Axes = Mapping[str, int]
Config = Mapping[str, int]


@dataclass(frozen=True)
class Tuned:
    """The best configuration at one point of a kernel's axes, and what was measured there."""

    axes: Axes
    config: Config
    microseconds: float


@dataclass(frozen=True)
class NewEntry:
    """An entry to write: where it applies, the configuration, and the times at the points that it came from."""

    when: Mapping[str, Range]
    config: Config
    microseconds: Mapping[str, float] = field(default_factory=dict)


def merge_points(points: Sequence[Tuned]) -> list[NewEntry]:
    """Entries for measured points: each holds up to the middle between it and its neighbours.

    Along an axis that was measured at several sizes the largest one holds for all that is larger. Below the smallest
    size, and beside the only one, an entry holds within a factor of two: a kernel's other uses, such as decode beside
    prefill or another width, have shapes far away. Neighbours along one axis with equal configurations become one.
    """
    names = list(points[0].axes) if points else []
    ranges = {name: _ranges(sorted({point.axes[name] for point in points})) for name in names}
    entries = [
        NewEntry(
            {name: ranges[name][point.axes[name]] for name in names},
            point.config,
            {_label(point.axes): round(point.microseconds, 2)},
        )
        for point in sorted(points, key=lambda p: tuple(p.axes.values()))
    ]
    for name in reversed(names):
        entries = _joined(entries, name)
    return entries


def _label(axes: Axes) -> str:
    return " ".join(f"{name}={size}" for name, size in axes.items())


def _ranges(sizes: Sequence[int]) -> dict[int, Range]:
    middles = [int((a * b) ** 0.5) if a else b - 1 for a, b in zip(sizes, sizes[1:], strict=False)]
    lows = [sizes[0] // 2 + 1 if sizes[0] else 0, *(middle + 1 for middle in middles)]
    alone = len(sizes) == 1
    highs: list[int | None] = [*middles, max(2 * sizes[-1] - 1, sizes[-1]) if alone else None]
    return {size: (low, high) for size, low, high in zip(sizes, lows, highs, strict=True)}


def _joined(entries: Sequence[NewEntry], name: str, any_config: bool = False) -> list[NewEntry]:
    """Entries that touch along one axis, agree on all others and have one configuration, or any, as one."""
    done: list[NewEntry] = []
    for entry in sorted(entries, key=lambda e: _order(e.when, last=name)):
        before = done[-1] if done else None
        if before is not None and _touches(before, entry, name) and (any_config or before.config == entry.config):
            when = {**before.when, name: (before.when[name][0], entry.when[name][1])}
            done[-1] = NewEntry(when, before.config, {**before.microseconds, **entry.microseconds})
        else:
            done.append(entry)
    return sorted(done, key=lambda e: _order(e.when))


def _touches(a: NewEntry, b: NewEntry, name: str) -> bool:
    end, begin = a.when[name][1], b.when[name][0]
    others = all(a.when[other] == b.when[other] for other in a.when if other != name)
    return others and end is not None and begin == end + 1


def _order(when: Mapping[str, Range], last: str = "") -> tuple[int, ...]:
    names = [*(name for name in when if name != last), *([last] if last else [])]
    return tuple(when[name][0] or 0 for name in names)


def updated_file(
    old: Mapping[str, Any], arch: str, entries: Sequence[NewEntry], measured: Mapping[str, Any]
) -> dict[str, Any]:
    """The file's content with new entries of one architecture in front.

    Kept behind them: entries of other architectures, entries for every architecture, and those of this one that no new
    entries cover; they serve the sizes between and beyond. An entry that is covered, by one or by neighbours along one
    axis, loses this architecture.

    Args:
        measured: device and versions; the times are added per entry.
    """
    kept: list[dict[str, Any]] = []
    names = entries[0].when if entries else ()
    joined = [span for name in names for span in _joined(entries, name, any_config=True)]
    spans = [entry.when for entry in (*entries, *joined)]
    for entry in old["entries"]:
        archs = entry["archs"]
        if arch in archs and any(_covers(span, entry["when"]) for span in spans):
            archs = [name for name in archs if name != arch]
        if archs:
            kept.append({**entry, "archs": archs})
    fresh = [
        {
            "archs": [arch],
            "when": {name: list(limits) for name, limits in entry.when.items()},
            "config": dict(entry.config),
            "measured": {**measured, "us": dict(entry.microseconds)},
        }
        for entry in entries
    ]
    return {**old, "entries": fresh + kept}


def _covers(new: Mapping[str, Range], old: Mapping[str, Sequence[int | None]]) -> bool:
    """Whether an entry fits all axes that an older one fits. An axis that is left out has no bounds."""
    for name, (low, high) in new.items():
        old_low, old_high = old.get(name, (None, None))
        if (low is not None and (old_low is None or old_low < low)) or (
            high is not None and (old_high is None or old_high > high)
        ):
            return False
    return True


def config_text(data: Mapping[str, Any]) -> str:
    """The file as text: an entry per line, so that a change of one is a change of one line."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in data["entries"])
    return f'{{\n "kernel": {json.dumps(data["kernel"])},\n "entries": [\n{lines}\n ]\n}}\n'


def save_config(path: Path, arch: str, entries: Sequence[NewEntry], measured: Mapping[str, Any]) -> None:
    """Puts the entries into the file, in one step.

    Raises:
        K3Error: the file cannot be read or written, or does not end with an entry for every architecture and shape.
    """
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
        last = old["entries"][-1]
        if last["when"] or last["archs"] != ["*"]:
            raise ValueError('its last entry is not {"archs": ["*"], "when": {}}')
        replace_text(path, config_text(updated_file(old, arch, entries, measured)))
    except (OSError, ValueError, KeyError, IndexError) as exc:
        raise K3Error(
            f"{path} cannot be updated",
            reasons=[f"{type(exc).__name__}: {exc}"],
            hint="tune from a checkout whose files can be written, or leave --save out",
        ) from exc
