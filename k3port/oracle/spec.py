"""The records of the oracle: kernels, queries, devices, selections, plans. Frozen, without torch, JSON round trip."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from k3port.ops.catalog import Phase, slot_name

Vendor = Literal["cpu", "nvidia", "amd"]

PRIORITY_REFERENCE = 0
PRIORITY_PORTABLE = 100
PRIORITY_VENDOR = 200

PLAN_VERSION = 1


@dataclass(frozen=True)
class Device:
    """What kernels run on. ``source`` says whether it was seen here or read from a profile."""

    vendor: Vendor
    arch: str
    name: str
    source: Literal["detected", "profile", "fake"]
    count: int = 1


@dataclass(frozen=True)
class OpQuery:
    """One slot to fill: an op in one phase on one rank.

    Attributes:
        axes: per-rank sizes by name, such as ``{"H": 12, "K": 128}``.
        dtype: activation dtype name.
        weight_format: ``mxfp4``, ``bfloat16``, ``float32`` or empty where no packed weight is involved.
        direct: whether the model calls the slot itself; a fine op of composites only is filled when one is chosen.
    """

    op: str
    phase: Phase | None
    axes: Mapping[str, int]
    dtype: str
    weight_format: str = ""
    tp: int = 1
    direct: bool = True

    @property
    def slot(self) -> str:
        return slot_name(self.op, self.phase)


@dataclass(frozen=True)
class Requires:
    """Limits of a kernel as data; an empty tuple means no limit."""

    vendors: tuple[Vendor, ...] = ()
    archs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    weight_formats: tuple[str, ...] = ()
    max_tp: int | None = None


Check = Callable[[OpQuery, Device], str | None]


@dataclass(frozen=True)
class KernelSpec:
    """A kernel as the registry knows it; its module is imported only when it is chosen.

    Attributes:
        name: ``backend.kernel``, unique in the registry.
        op: catalog name.
        load: ``module:function``. With ``parts``, the function is a factory that takes the bound parts as keyword
            arguments and returns the kernel.
        doc: one line for listings.
        phases: phases it serves; empty means all phases of the op.
        requires, check: limits as data, and one function that returns the reason for a refusal or None.
        priority: :data:`PRIORITY_REFERENCE`, :data:`PRIORITY_PORTABLE`, :data:`PRIORITY_VENDOR`, or between.
        layouts: layout tag by shared object (``kda_state``, ``mla_cache``, ``experts``); all chosen kernels that
            touch an object must agree on its tag.
        pack: ``module:function`` that brings stored weights into the kernel's layout.
        parts: fine ops that a composite calls.
        covers: fine ops that a fused kernel does itself.
        numerics: what it rounds beyond its output, for people who compare outputs.
    """

    name: str
    op: str
    load: str
    doc: str
    phases: tuple[Phase, ...] = ()
    requires: Requires = Requires()
    check: Check | None = None
    priority: int = PRIORITY_REFERENCE
    layouts: Mapping[str, str] = field(default_factory=dict)
    pack: str = ""
    parts: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    deterministic: bool = True
    numerics: str = ""

    @property
    def is_reference(self) -> bool:
        return self.name.startswith("reference.")


RejectionCode = Literal[
    "VENDOR", "ARCH", "DTYPE", "WEIGHT_FORMAT", "AXIS", "PHASE", "LAYOUT", "NOT_PINNED", "OUTRANKED", "COVERED"
]


@dataclass(frozen=True)
class Rejection:
    """Why one kernel was not taken for one slot."""

    kernel: str
    code: RejectionCode
    detail: str


@dataclass(frozen=True)
class Selection:
    """The answer for one slot: the kernel, why, and why not each other one.

    ``kernel`` is empty where a fused kernel covers the op, or no chosen kernel needs it; ``reason`` says which.
    """

    op: str
    phase: Phase | None
    kernel: str
    reason: str
    accepted: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)

    @property
    def slot(self) -> str:
        return slot_name(self.op, self.phase)


@dataclass(frozen=True)
class Plan:
    """Every choice for one model on one platform: what runs, ``doctor`` prints and tests compare."""

    platform: str
    device: Device
    dtype: str
    tp: int
    selections: tuple[Selection, ...]
    warnings: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    def selection(self, op: str, phase: Phase | None = None) -> Selection:
        """The selection of one slot.

        Raises:
            KeyError: the plan has no such slot.
        """
        for selection in self.selections:
            if (selection.op, selection.phase) == (op, phase):
                return selection
        raise KeyError(slot_name(op, phase))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: another plan version.
        """
        data: dict[str, Any] = json.loads(text)
        if data.get("version") != PLAN_VERSION:
            raise ValueError(f"plan version {data.get('version')!r}, this k3port reads version {PLAN_VERSION}")
        selections = tuple(
            Selection(
                **{
                    **item,
                    "accepted": tuple(item["accepted"]),
                    "rejected": tuple(Rejection(**r) for r in item["rejected"]),
                }
            )
            for item in data["selections"]
        )
        return cls(
            **{
                **data,
                "device": Device(**data["device"]),
                "selections": selections,
                "warnings": tuple(data["warnings"]),
            }
        )

    def diff(self, other: Plan) -> list[str]:
        """One line per slot whose kernel differs."""
        mine, theirs = ({s.slot: s.kernel for s in plan.selections} for plan in (self, other))
        slots = sorted(mine.keys() | theirs.keys())
        return [
            f"{slot}: {mine.get(slot) or '-'} -> {theirs.get(slot) or '-'}"
            for slot in slots
            if mine.get(slot) != theirs.get(slot)
        ]
