"""The records of the oracle: kernels, queries, targets, selections, plans. Frozen, without torch, JSON round trip."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from k3port.ops.catalog import Phase, slot_name

Vendor = Literal["cpu", "nvidia", "amd"]
Source = Literal["detected", "profile", "fake"]

PRIORITY_REFERENCE = 0
PRIORITY_PORTABLE = 100
PRIORITY_VENDOR = 200

PLAN_VERSION = 2

GAP = "no kernel fits"
"""The reason of a selection without a kernel where one is needed."""

Tokens = tuple[int, int | None]
"""A closed range of token counts ``(first, last)``; None has no end."""
ALL_TOKENS: Tokens = (1, None)


@dataclass(frozen=True)
class Device:
    """What kernels run on: one accelerator of a rank. ``source`` says whether it was seen here or read from a profile.

    ``memory_bytes`` and ``lds_bytes`` (shared memory per block) are 0 where unknown.
    """

    vendor: Vendor
    arch: str
    name: str
    source: Source
    count: int = 1
    memory_bytes: int = 0
    lds_bytes: int = 0
    compute_units: int = 0
    uuid: str = ""
    pci: str = ""


@dataclass(frozen=True)
class Target:
    """Everything outside the model that a kernel may depend on.

    Attributes:
        packages: version by canonical package name; a package that is not listed is not there.
        packages_source: where the versions come from: ``profile``, ``host``, or a file's name.
        runtime: versions of ``cuda``, ``rocm``, ``driver`` where known.
        features: what the interconnect and the system offer, such as ``multicast``, ``mnnvl``, ``xgmi``.
        preferences: kernel names by op, best first; they come before priorities.
        disabled: why, by kernel name.
        failed_probes: what a probe on this very machine found, by kernel name.
        missing_symbols: ``package.module:name`` entries that the installed packages lack; empty when not looked up.
        allow_reference: whether fallbacks may run on an accelerator; on a CPU they always may.
    """

    platform: str
    device: Device
    packages: Mapping[str, str] = field(default_factory=dict)
    packages_source: str = "profile"
    runtime: Mapping[str, str] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    preferences: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    disabled: Mapping[str, str] = field(default_factory=dict)
    failed_probes: Mapping[str, str] = field(default_factory=dict)
    missing_symbols: frozenset[str] = frozenset()
    allow_reference: bool = True


@dataclass(frozen=True)
class OpQuery:
    """One slot to fill: an op in one phase on one rank.

    Attributes:
        axes: per-rank sizes by name, such as ``{"H": 12, "K": 128}``; the families' letters are in ``ops/catalog.py``.
        dtype: activation dtype name.
        weight_format: ``mxfp4``, ``bfloat16``, ``float32`` or empty where no packed weight is involved.
        kv_dtype: dtype of the latent cache; empty where the op has none.
        state_dtype: dtype of the recurrent state; empty where the op has none.
        query_tokens: most new tokens of one request in decode: 1, or more when drafts are verified. Verification is
            decode with a longer query, so one predicate answers for both.
        tokens: token counts of a step that the slot has to serve.
        graph: whether decode steps are captured into a graph.
        deterministic: whether a kernel must give the same bits each time.
        rounds: roundings of activations that are allowed beside the activation dtype, such as ``mxfp8``.
        direct: whether the model calls the slot itself; a fine op of composites only is filled when one is chosen.
    """

    op: str
    phase: Phase | None
    axes: Mapping[str, int]
    dtype: str
    weight_format: str = ""
    kv_dtype: str = ""
    state_dtype: str = ""
    tp: int = 1
    ep: int = 1
    nodes: int = 1
    query_tokens: int = 1
    tokens: Tokens = ALL_TOKENS
    graph: bool = False
    deterministic: bool = False
    rounds: frozenset[str] = frozenset()
    direct: bool = True

    @property
    def slot(self) -> str:
        return slot_name(self.op, self.phase)


@dataclass(frozen=True)
class AxisRule:
    """A limit on one axis of the query: a set of values, a range, or a multiple. ``why`` is added to a refusal."""

    axis: str
    allowed: tuple[int, ...] = ()
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int = 1
    why: str = ""

    def refusal(self, axes: Mapping[str, int]) -> str | None:
        """Why the axes break the rule, or None. An axis that the query does not have breaks no rule."""
        value = axes.get(self.axis)
        if value is None:
            return None
        problem = ""
        if self.allowed and value not in self.allowed:
            problem = f"one of {', '.join(map(str, self.allowed))}"
        elif self.minimum is not None and value < self.minimum:
            problem = f"at least {self.minimum}"
        elif self.maximum is not None and value > self.maximum:
            problem = f"at most {self.maximum}"
        elif value % self.multiple_of:
            problem = f"a multiple of {self.multiple_of}"
        return f"{self.axis} = {value}, needs {problem}{f' ({self.why})' if self.why else ''}" if problem else None


@dataclass(frozen=True)
class Requires:
    """Limits of a kernel as data; an empty tuple means no limit.

    Attributes:
        archs: exact architecture names; architectures are never ordered.
        query_tokens: most new tokens per request in decode; None: any.
        packages: PEP 508 requirements, all needed.
        symbols: ``package.module:name`` entries that must exist in the installed packages.
        runtime: requirements on the driver stack such as ``cuda>=12.8``, one of which must hold where the key is
            known to the target.
        features: all needed.
    """

    vendors: tuple[Vendor, ...] = ()
    archs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    weight_formats: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    state_dtypes: tuple[str, ...] = ()
    axes: tuple[AxisRule, ...] = ()
    tp: tuple[int, ...] = ()
    ep: tuple[int, ...] = ()
    max_nodes: int | None = None
    query_tokens: int | None = None
    packages: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    min_lds_bytes: int = 0


Check = Callable[[OpQuery, Target], "str | None"]


@dataclass(frozen=True)
class Padding:
    """What a kernel rounds up: the axes it really works on, and the cost in one sentence."""

    axes: Mapping[str, int]
    note: str


@dataclass(frozen=True)
class KernelSpec:
    """A kernel as the registry knows it; its module is imported only when it is chosen.

    Attributes:
        name: ``backend.kernel``, unique in the registry.
        op: catalog name.
        load: ``module:function``; empty for a kernel that is declared but has no adapter yet (NOT_BUILT). With
            ``parts``, the function is a factory that takes the bound parts as keyword arguments.
        doc: one line for listings.
        phases: phases it serves; empty means all phases of the op.
        requires, check: limits as data, and one function that returns the reason for a refusal or None.
        priority: :data:`PRIORITY_REFERENCE`, :data:`PRIORITY_PORTABLE`, :data:`PRIORITY_VENDOR`, or between.
        layouts: layout tag by shared object (``kda_state``, ``conv_state``, ``mla_cache``, ``experts``); all chosen
            kernels that touch an object must agree on its tag.
        pack: ``module:function`` that brings stored weights into the kernel's layout.
        parts: fine ops that a composite calls.
        covers: fine ops that a fused kernel does itself.
        tokens: token counts that it serves, or a function of query and target (message sizes of collectives).
        fallback: readable code that is right everywhere and fast nowhere: an accelerator takes it only where the
            target allows it, or a pin names it. Composites are none, and neither is what does nothing on one rank.
        graph_safe: whether it may be captured into a graph.
        records_drafts: whether a decode kernel leaves the record from which accepted drafts are replayed; ops that must
            (``OpInfo.records_drafts``) are served by no other kernel while drafts are verified.
        rounds: what it rounds activations to beyond their dtype (``mxfp8``); a query must allow it.
        padding: what it rounds up for a query, None where nothing.
        workspace_bytes: scratch memory for a query.
        numerics: what people who compare outputs should know.
        note: what a plan says beside the choice: the rule that let the query in, or what the kernel costs there.
        source: where the limits come from.
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
    tokens: Tokens | Callable[[OpQuery, Target], Tokens] = ALL_TOKENS
    fallback: bool = False
    graph_safe: bool = True
    deterministic: bool = True
    records_drafts: bool = False
    rounds: str = ""
    padding: Callable[[OpQuery], Padding | None] | None = None
    workspace_bytes: Callable[[OpQuery], int] | None = None
    numerics: str = ""
    note: Callable[[OpQuery, Target], str] | None = None
    source: str = ""

    @property
    def is_reference(self) -> bool:
        return self.name.startswith("reference.")

    @property
    def is_built(self) -> bool:
        return bool(self.load)

    def needs_leave(self, target: Target) -> bool:
        """Whether it is a fallback that would run on an accelerator."""
        return self.fallback and target.device.vendor != "cpu"

    def window(self, query: OpQuery, target: Target) -> Tokens:
        return self.tokens(query, target) if callable(self.tokens) else self.tokens


RejectionCode = Literal[
    "VENDOR",
    "ARCH",
    "DTYPE",
    "WEIGHT_FORMAT",
    "KV_DTYPE",
    "AXIS",
    "TOKENS",
    "PHASE",
    "PACKAGE_MISSING",
    "PACKAGE_VERSION",
    "SYMBOL_MISSING",
    "RUNTIME",
    "FEATURE",
    "LDS",
    "GRAPH",
    "DETERMINISM",
    "DISABLED",
    "LAYOUT",
    "NOT_BUILT",
    "REFERENCE",
    "PROBE_FAILED",
    "NUMERICS",
    "NOT_PINNED",
    "OUTRANKED",
    "COVERED",
]


@dataclass(frozen=True)
class Rejection:
    """Why one kernel was not taken for one slot, and what would change that."""

    kernel: str
    code: RejectionCode
    detail: str
    hint: str = ""


@dataclass(frozen=True)
class Selection:
    """The answer for one slot and one token window: the kernel, why, and why not each other one.

    ``kernel`` is empty where a fused kernel covers the op, or no chosen kernel needs it; ``reason`` says which.
    """

    op: str
    phase: Phase | None
    kernel: str
    reason: str
    tokens: Tokens = ALL_TOKENS
    accepted: tuple[str, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    layouts: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    padding: str = ""

    @property
    def slot(self) -> str:
        return slot_name(self.op, self.phase)


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind on one rank, with the arithmetic that gives them."""

    kind: str
    bytes: int
    arithmetic: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank.

    Attributes:
        items: what is needed, by kind.
        capacity_bytes: what one device offers for all of it.
        fits: whether the sum stays below.
        max_context_tokens: longest context of ``concurrency`` requests that fits; 0 where the weights alone do not.
        max_concurrency: most requests of the asked context.
        advice: what would fit, where this does not.
    """

    items: tuple[MemoryItem, ...]
    capacity_bytes: int
    fits: bool
    max_context_tokens: int
    max_concurrency: int
    advice: str = ""

    @property
    def total_bytes(self) -> int:
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True)
class Plan:
    """Every choice for one model on one platform: what runs, ``doctor`` prints and tests compare.

    ``selections`` is what runs now; ``would_run`` is what would, were every declared kernel built.
    """

    platform: str
    device: Device
    dtype: str
    tp: int
    selections: tuple[Selection, ...]
    would_run: tuple[Selection, ...] = ()
    ep: int = 1
    pp: int = 1
    packages: Mapping[str, str] = field(default_factory=dict)
    packages_source: str = "profile"
    digests: Mapping[str, str] = field(default_factory=dict)
    memory: MemoryPlan | None = None
    warnings: tuple[str, ...] = ()
    version: int = PLAN_VERSION

    def selection(self, op: str, phase: Phase | None = None, *, tokens: int = 1, would: bool = False) -> Selection:
        """The selection of one slot for a step of ``tokens`` tokens.

        Raises:
            KeyError: the plan has no such slot.
        """
        for selection in self.would_run if would else self.selections:
            first, last = selection.tokens
            if (selection.op, selection.phase) == (op, phase) and first <= tokens and (last is None or tokens <= last):
                return selection
        raise KeyError(slot_name(op, phase))

    def gaps(self, *, would: bool = False) -> tuple[Selection, ...]:
        """The slots that need a kernel and have none."""
        return tuple(s for s in (self.would_run if would else self.selections) if s.reason == GAP)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: no plan, or another plan version.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != PLAN_VERSION:
            found = data.get("version") if isinstance(data, dict) else None
            raise ValueError(f"plan version {found!r}, this k3port reads version {PLAN_VERSION}")
        memory = data.get("memory")
        if memory is not None:
            memory = MemoryPlan(**{**memory, "items": tuple(MemoryItem(**item) for item in memory["items"])})
        return cls(
            **{
                **data,
                "device": Device(**data["device"]),
                "selections": tuple(map(_selection_from, data["selections"])),
                "would_run": tuple(map(_selection_from, data["would_run"])),
                "memory": memory,
                "warnings": tuple(data["warnings"]),
            }
        )

    def diff(self, other: Plan) -> list[str]:
        """One line per slot and window whose kernel differs, then per memory kind whose bytes differ."""
        from k3port.oracle.diff import diff_plans

        return diff_plans(self, other)


def _selection_from(item: Mapping[str, Any]) -> Selection:
    return Selection(
        **{
            **item,
            "tokens": tuple(item["tokens"]),
            "accepted": tuple(item["accepted"]),
            "rejected": tuple(Rejection(**rejection) for rejection in item["rejected"]),
        }
    )
