"""Why a kernel cannot serve a query on a target: data first, then the kernel's own check. One function, one reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from k3port.ops.catalog import MAX_DRAFT, OPS
from k3port.oracle.spec import ALL_TOKENS, KernelSpec, OpQuery, Padding, Rejection, RejectionCode, Target, Tokens

_ROUNDING_HINTS = {
    "mxfp8": "--activations mxfp8",
    "mxfp4": "--activations mxfp4",
    "fp8_query": "--fp8-queries",
    "int8_messages": "no option allows it, only Workload(rounds=...) of the library",
}


@lru_cache(maxsize=4096)
def _requirement(text: str) -> Requirement:
    return Requirement(text)


def satisfies(version: str, requirement: str) -> bool:
    """Whether a version meets a PEP 508 requirement; pre-releases count. A version that is not PEP 440 meets none."""
    try:
        return _requirement(requirement).specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


LEAVE = "--allow-reference"
"""The option that lets fallbacks run on a GPU."""


def is_own_fault(detail: str) -> bool:
    """Whether a refusal says that a function of the kernel's record raised, or answered what it must not."""
    return re.match(r"its own (check|tokens|padding|note|workspace_bytes) failed: ", detail) is not None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_window(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and _is_count(value[0])
        and (value[1] is None or _is_count(value[1]))
    )


def _is_padding(value: object) -> bool:
    if not isinstance(value, Padding):
        return value is None
    return isinstance(value.axes, Mapping) and all(map(_is_count, value.axes.values())) and isinstance(value.note, str)


# By field of the record: whether an answer is one, and what it has to be.
_ANSWERS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "check": (lambda value: value is None or isinstance(value, str), "a reason or None"),
    "tokens": (_is_window, "(first, last), last None for no end"),
    "padding": (_is_padding, "a Padding or None"),
    "note": (lambda value: value is None or isinstance(value, str), "text"),
    "workspace_bytes": (_is_count, "a number of bytes"),
}


def ask_record(spec: KernelSpec, field: str, query: OpQuery, target: Target) -> tuple[Any, str]:
    """What a function of the record says, and what is wrong with it: ``(value, "")`` or ``(None, fault)``.

    A function that fails must not take the plan of all other kernels with it. A field that holds no function says None.

    Args:
        field: ``check``, ``tokens``, ``padding``, ``note`` or ``workspace_bytes``.
    """
    function = getattr(spec, field)
    if not callable(function):
        return None, ""
    accepts, expected = _ANSWERS[field]
    try:
        value = function(query) if field in ("padding", "workspace_bytes") else function(query, target)
    except (Exception, SystemExit) as exc:
        return None, _line(f"its own {field} failed: {type(exc).__name__}: {exc}")
    if not accepts(value):
        return None, _line(f"its own {field} failed: {field} must return {expected}, it returned {value!r:.80}")
    return _line(value) if isinstance(value, str) else value, ""


def served(spec: KernelSpec, query: OpQuery, target: Target) -> Tokens:
    """The token counts that a kernel serves; all of them where its own function fails, which :func:`reject` tells."""
    if not callable(spec.tokens):
        return spec.tokens
    found, fault = ask_record(spec, "tokens", query, target)
    return ALL_TOKENS if fault else found


def _line(text: str) -> str:
    return " ".join(text.split())


def reject(spec: KernelSpec, query: OpQuery, target: Target, *, built_only: bool = True) -> Rejection | None:
    """The first reason why ``spec`` cannot serve ``query`` on ``target``, or None.

    What the kernel is for comes first (phase, device), then what the model asks (types, sizes), then what is
    installed, then what people switched off, and last whether its adapter exists: the reason that no setting can
    change is the one reported.

    Args:
        built_only: whether a kernel without an adapter is refused (NOT_BUILT).
    """
    for code, detail, hint in _reasons(spec, query, target, built_only):
        if detail:
            return Rejection(spec.name, code, detail, hint)
    return None


def _reasons(spec: KernelSpec, query: OpQuery, target: Target, built_only: bool):
    req, device = spec.requires, target.device
    yield "PHASE", _not_in(query.phase, spec.phases, "serves {0}, not {1}"), ""
    yield "VENDOR", _not_in(device.vendor, req.vendors, "needs {0}, the device is {1}"), ""
    yield "ARCH", _not_in(device.arch, req.archs, "needs {0}, the device is {1}"), ""
    if req.min_lds_bytes and device.lds_bytes and device.lds_bytes < req.min_lds_bytes:
        yield "LDS", f"needs {req.min_lds_bytes} bytes of shared memory per block, there are {device.lds_bytes}", ""
    yield "DTYPE", _not_in(query.dtype, req.dtypes, "needs {0} activations, asked for {1}"), "--dtype"
    yield (
        "WEIGHT_FORMAT",
        _not_in(query.weight_format, req.weight_formats, "reads {0} weights, the checkpoint has {1}"),
        "",
    )
    yield "KV_DTYPE", _not_in(query.kv_dtype, req.kv_dtypes, "needs a {0} cache, asked for {1}"), "--kv-dtype"
    yield "DTYPE", _not_in(query.state_dtype, req.state_dtypes, "needs a {0} state, asked for {1}"), "--state-dtype"
    for rule in req.axes:
        yield "AXIS", rule.refusal(query.axes) or "", ""
    yield "AXIS", _not_in(query.tp, req.tp, "serves {0} ranks, asked for {1}"), "--tp"
    yield "AXIS", _not_in(query.ep, req.ep, "serves expert-parallel size {0}, asked for {1}"), "--ep"
    if req.max_nodes is not None and query.nodes > req.max_nodes:
        yield "FEATURE", f"serves {req.max_nodes} node, asked for {query.nodes}", ""
    if query.phase == "decode" and req.query_tokens is not None and query.query_tokens > req.query_tokens:
        detail = f"serves {req.query_tokens} new tokens per request, asked for {query.query_tokens}"
        yield "AXIS", detail, _fewer_drafts(req.query_tokens)
    yield "AXIS", _unrecorded(spec, query), _fewer_drafts(MAX_DRAFT if spec.records_drafts else 1)
    yield "AXIS", _checked(spec, query, target), ""
    if spec.rounds and spec.rounds not in query.rounds:
        yield "NUMERICS", f"its rounding {spec.rounds} was not asked for", _ROUNDING_HINTS.get(spec.rounds, "")
    # Only decode steps are captured; an op without phases is part of them.
    if query.graph and query.phase != "prefill" and not spec.graph_safe:
        yield "GRAPH", "cannot be captured into a graph", "--no-graphs"
    if query.deterministic and not spec.deterministic:
        yield "DETERMINISM", "does not give the same bits each time", ""
    yield from _software(spec, target)
    yield "AXIS", ask_record(spec, "tokens", query, target)[1], ""
    first, last = served(spec, query, target)
    if query.tokens[0] < first or (last is not None and (query.tokens[1] is None or query.tokens[1] > last)):
        yield "TOKENS", f"serves steps of {first} to {'any' if last is None else last} tokens", ""
    # Asked here, where the kernel would be taken: later is too late to leave it out.
    for field in ("padding", "note", "workspace_bytes"):
        yield "AXIS", ask_record(spec, field, query, target)[1], ""
    if spec.needs_leave(target) and not target.allow_reference:
        yield "REFERENCE", "runs on a GPU only where references are allowed: right, and slow", LEAVE
    yield "DISABLED", target.disabled.get(spec.name, ""), ""
    yield "PROBE_FAILED", target.failed_probes.get(spec.name, ""), "k3port doctor --probe"
    if built_only and not spec.is_built:
        yield "NOT_BUILT", "its adapter does not exist in this version", ""


def _unrecorded(spec: KernelSpec, query: OpQuery) -> str:
    """Why drafts that the kernel verifies could not be taken back, empty where they could."""
    op = OPS.get(query.op)
    if query.phase != "decode" or query.query_tokens == 1 or op is None or not op.records_drafts:
        return ""
    if not spec.records_drafts:
        return "leaves no record of the drafts that it verifies, so that rejected ones could not be taken back"
    if query.query_tokens > MAX_DRAFT:
        return f"records {MAX_DRAFT} tokens per request, asked for {query.query_tokens}"
    return ""


def _fewer_drafts(most: int) -> str:
    """The option for ``most`` new tokens per request: drafts and the last accepted token."""
    return f"--draft-tokens {most - 1}{' or fewer' if most > 1 else ''}"


def _checked(spec: KernelSpec, query: OpQuery, target: Target) -> str:
    """What the kernel's own check says; a check that fails refuses."""
    reason, fault = ask_record(spec, "check", query, target)
    return fault or reason or ""


def _software(spec: KernelSpec, target: Target):
    code: RejectionCode
    for text in spec.requires.packages:
        requirement = _requirement(text)
        version = target.packages.get(canonicalize_name(requirement.name))
        if version is None:
            detail = f"{requirement.name} is not installed ({target.packages_source})"
            yield "PACKAGE_MISSING", detail, f"pip install '{text}'"
        elif not satisfies(version, text):
            code = "PACKAGE_VERSION"
            detail = f"needs {text}, {target.packages_source} has {version}"
            yield code, detail, f"pip install '{text}'"
    for text in spec.requires.runtime:
        name = _requirement(text).name
        version = target.runtime.get(name)
        if version is not None and not satisfies(version, text):
            yield "RUNTIME", f"needs {text}, the target has {name} {version}", ""
    for feature in spec.requires.features:
        if feature not in target.features:
            yield "FEATURE", f"needs {feature}, which {target.platform} does not have", ""
    for symbol in spec.requires.symbols:
        if symbol in target.missing_symbols:
            yield "SYMBOL_MISSING", f"{symbol} is not in the installed package", ""


def _not_in(value: object, allowed: tuple[str, ...] | tuple[int, ...], text: str) -> str:
    """``text`` filled in where a limit exists and the value, if there is one, is outside."""
    if not allowed or value in ("", None) or value in allowed:
        return ""
    return text.format(" or ".join(map(str, allowed)), value)
