"""``bench kernels`` as a library: every kernel of a workload through the gate, then timed beside its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from k3port.ops.contract import Sample, cloned
from k3port.oracle.predicates import reject
from k3port.oracle.spec import KernelSpec, Target
from k3port.testing.bench.ceilings import Bound, Ceilings, bound
from k3port.testing.bench.clock import Clock
from k3port.testing.bench.gate import PEER_TOLERANCE, GateError, GateReport, answer_of, pass_gate, peer_error
from k3port.testing.bench.observe import observed_configs
from k3port.testing.bench.receipt import PeerRow, Row, Skipped
from k3port.testing.bench.rotate import COLD_BYTES, copies_needed, tensor_bytes
from k3port.testing.bench.timing import Measured, Settings, Subject, Timing, measure
from k3port.testing.bench.workload import Answer, Args, Case, Op, Peer, PeerAbsent, Workload
from k3port.testing.harness import build_kernel, dtype_name, sample_query

if TYPE_CHECKING:
    from k3port.backends.portable.launch import Lookup

SEED = 20261
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """How and on what to measure.

    Attributes:
        kernels: all kernels of the registry.
        names: only these kernels; empty takes every one that the target admits, references and fallbacks left out.
        peers: whether peers are measured too.
    """

    clock: Clock
    target: Target
    ceilings: Ceilings
    kernels: Sequence[KernelSpec]
    settings: Settings
    names: frozenset[str] = frozenset()
    peers: bool = True
    cold_bytes: int = COLD_BYTES
    progress: Progress = lambda text: None


@dataclass(frozen=True)
class _Ready:
    """A kernel that passed the gate."""

    spec: KernelSpec
    function: Op
    gate: GateReport
    configs: Sequence[Lookup]


@torch.no_grad()
def run_case(bench: Bench, workload: Workload, case: Case) -> Iterator[Row | Skipped]:
    """Measures all kernels of one case. What is left out is said as a :class:`Skipped`."""
    args = make_args(case, bench.clock.device)
    admitted: list[KernelSpec] = []
    found = candidates(bench, workload, case, args)
    if not found:
        reason = (
            "no kernel that was asked for has this op and phase" if bench.names else "no kernel is built for this GPU"
        )
        yield Skipped(workload.op, workload.phase or "", case.name, "-", reason)
    for spec, refusal in found:
        if refusal:
            yield _skipped(workload, case, spec, refusal)
        else:
            admitted.append(spec)
    if not admitted:
        return
    bench.progress(f"{workload.slot} {case.name}: reference")
    try:
        answer = answer_of(workload, args)
    except Exception as exc:
        # One shape that is too large for this device must not cost the others.
        for spec in admitted:
            yield _skipped(workload, case, spec, f"no reference: {_sentence(exc)}", failed=True)
        return
    ready: list[_Ready] = []
    for spec in admitted:
        bench.progress(f"{workload.slot} {case.name}: {spec.name}")
        try:
            ready.append(_through_gate(bench, workload, case, spec, args, answer))
        except GateError as exc:
            yield _skipped(workload, case, spec, "; ".join((exc.message, *exc.reasons)), failed=True)
    if not ready:
        return
    bench.progress(f"{workload.slot} {case.name}: timing")
    try:
        yield from _timed(bench, workload, case, ready, args, answer)
    except Exception as exc:
        for one in ready:
            yield _skipped(workload, case, one.spec, f"timing failed: {_sentence(exc)}", failed=True)


def make_args(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments of one call, the same ones every time."""
    return case.make(device, torch.Generator(device).manual_seed(SEED))


def candidates(bench: Bench, workload: Workload, case: Case, args: Args) -> list[tuple[KernelSpec, str]]:
    """The kernels of a case, each with the reason why it cannot serve it, or nothing.

    Without names these are the built kernels of the op for this phase and vendor that are no references.
    """
    query = sample_query(workload.contract, Sample(case.name, args), workload.dtype)
    found = []
    for spec in bench.kernels:
        if spec.op != workload.op or (spec.phases and workload.phase not in spec.phases):
            continue
        if bench.names and spec.name not in bench.names:
            continue
        rejection = reject(spec, query, bench.target)
        if not bench.names and (spec.is_reference or not spec.is_built or spec.parts):
            continue
        if not bench.names and rejection is not None and rejection.code == "VENDOR":
            continue
        found.append((spec, f"{rejection.code}: {rejection.detail}" if rejection else ""))
    return found


def _through_gate(bench: Bench, workload: Workload, case: Case, spec: KernelSpec, args: Args, answer: Answer) -> _Ready:
    try:
        function = build_kernel(spec, bench.kernels, workload.phase)
    except Exception as exc:
        raise GateError(f"{spec.name} cannot be loaded", reasons=[_sentence(exc)]) from exc
    with observed_configs() as configs:
        report = pass_gate(spec.name, function, workload, case.name, args, answer)
    return _Ready(spec, function, report, tuple(configs))


def _timed(
    bench: Bench, workload: Workload, case: Case, ready: Sequence[_Ready], args: Args, answer: Answer
) -> Iterator[Row]:
    cost = workload.cost(case)
    results = sum(wanted.numel() for wanted in answer.outputs) * workload.dtype.itemsize
    copies = copies_needed(tensor_bytes(*args.values()) + results, bench.cold_bytes)
    sets = [cloned(args) for _ in range(copies)]
    subjects = [Subject(r.spec.name, _calls(r.function, sets), r.spec.graph_safe, "graph_safe is False") for r in ready]
    peers: list[tuple[Peer, PeerRow]] = []
    for peer in workload.peers(case, cost, bench.kernels) if bench.peers else ():
        row = PeerRow(peer.name, "measured")
        try:
            # On a copy: a peer may change its arguments too, and its result is compared first.
            error = peer_error(peer.prepare(cloned(args)), answer) if peer.same_result else None
            calls = tuple(peer.prepare(own) for own in sets)
        except PeerAbsent as exc:
            row = PeerRow(peer.name, "absent", note=str(exc))
        except Exception as exc:
            row = PeerRow(peer.name, "failed", note=_sentence(exc))
        else:
            row = PeerRow(peer.name, "measured", error=error)
            if error is not None and not error <= PEER_TOLERANCE:
                row = PeerRow(peer.name, "differs", error=error, note=f"relative RMS error {error:.1e}: other work")
            else:
                subjects.append(Subject(peer.name, calls))
        peers.append((peer, row))
    del answer
    measured = {found.name: found for found in measure(subjects, bench.clock, bench.settings)}
    limit = bound(cost, bench.ceilings)
    for one, subject in zip(ready, subjects, strict=False):
        found = measured[one.spec.name]
        rows = tuple(_peer_row(peer, row, found, measured.get(peer.name)) for peer, row in peers)
        yield _row(workload, case, one, found, limit, copies, bench.clock.launches(subject.calls[0]), rows)


def _calls(function: Op, sets: Sequence[Args]) -> tuple[Callable[[], Any], ...]:
    # Bound as defaults: a call is one Python frame, as in a forward step.
    return tuple(lambda f=function, a=own: f(**a) for own in sets)


def _row(
    workload: Workload,
    case: Case,
    one: _Ready,
    found: Measured,
    limit: Bound,
    copies: int,
    launches: tuple[str, ...] | None,
    peers: tuple[PeerRow, ...],
) -> Row:
    return Row(
        op=workload.op,
        phase=workload.phase or "",
        case=case.name,
        axes=dict(case.axes),
        dtype=dtype_name(workload.dtype),
        kernel=one.spec.name,
        configs={request.name: dict(request.config) for request in one.configs},
        relative_rms=one.gate.relative_rms,
        tolerance=one.gate.tolerance,
        bytes=limit.bytes,
        flops=limit.flops,
        bound=limit.microseconds,
        bound_by=limit.limit,
        copies=copies,
        eager=found.eager,
        host=found.host,
        captured=found.captured,
        not_captured=found.not_captured,
        percent_of_bound=None if found.captured is None else limit.percent(found.captured.median),
        launches=launches,
        peers=peers,
    )


def _peer_row(peer: Peer, row: PeerRow, kernel: Measured, found: Measured | None) -> PeerRow:
    if row.status != "measured" or found is None:
        return row
    note = "; ".join(filter(None, (peer.note(), f"not captured: {found.not_captured}" if found.not_captured else "")))
    return PeerRow(
        peer.name,
        "measured",
        found.eager,
        found.captured,
        found.host,
        ratio(found.eager, kernel.eager),
        ratio(found.captured, kernel.captured),
        row.error,
        note,
    )


def ratio(peer: Timing | None, kernel: Timing | None) -> float | None:
    """How many times as fast the kernel is, for two times of the same kind; None where one is missing."""
    return None if peer is None or kernel is None else peer.median / kernel.median


def _skipped(workload: Workload, case: Case, spec: KernelSpec, reason: str, failed: bool = False) -> Skipped:
    return Skipped(workload.op, workload.phase or "", case.name, spec.name, reason, failed)


def _sentence(exc: Exception) -> str:
    """Errors of compilers and of memory have many lines; a reason has one."""
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"[:300]
