"""Arguments of an op at production shapes: the published Kimi K3 on one of ``tp`` ranks, as CPU tensors without values.

A call is made from the contract: a sample says what kind of thing each argument is (dtype, None or not, records), the
named axes and the planner's queries say how large it is. Ops whose queries do not name all axes of their contract, or
that are called at several widths, have a line in :data:`WIDTHS`; records have an entry in :data:`RECORDS`. A plugin
adds its own to both.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3port.model.config import ModelConfig
from k3port.model.config_file import parse_config
from k3port.model.shapes import RankDims, rank_dims
from k3port.ops.catalog import OPS, Phase
from k3port.ops.contract import Contract, Sample
from k3port.ops.kda_state import KdaDrafts, KdaParams, KdaState, empty_drafts
from k3port.ops.sample import SamplingTensors
from k3port.ops.segment import MAX_DRAFT, SNAPSHOT_TOKENS, Segment, make_segment
from k3port.oracle.spec import KernelSpec, OpQuery
from k3port.runtime.planner import Workload, model_queries
from k3port.testing.published import published_k3_config

STEP_TOKENS = (300, 1, 32)
"""Rows of a step, for ops without phases: 1 is a constant of a compiled kernel, 32 a multiple of 16, 300 neither.
The first entry of each of these is the main one."""
SAMPLED_ROWS = 8
"""Requests of a step of an op without phases at most: host code that sorts whole vocabularies does so here too."""
PREFILLS = ((5, 257, 64), (300,))
DECODES = (32, 1)
DRAFTS = ((4, 8, 1, 8),)
PAGE_TOKENS = 64

Axes = Mapping[str, int]


class NoProductionCall(ValueError):
    """An op, or one of its arguments, has no production size."""


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        name: what is special about it.
        query: what the oracle was asked.
        main: whether it stands for the others of its phase and width. They differ from it in their number of tokens,
            in absent arguments and in switches: in how arguments are specialised, hardly in the code.
    """

    name: str
    query: OpQuery
    args: Mapping[str, Any]
    main: bool


@dataclass(frozen=True)
class Context:
    """What a builder of a record may need: sizes by axis name, the sample's record, dtypes and the call's segment."""

    axes: Axes
    sample: Any
    dtype: torch.dtype
    state_dtype: torch.dtype
    segment: Segment | None


RecordBuilder = Callable[[Context], Any]


def _widths_of_norms(config: ModelConfig, dims: RankDims) -> Iterator[Axes]:
    for width in dict.fromkeys((dims.hidden, dims.q_lora_rank, dims.kv_lora_rank, dims.latent)):
        if width:
            yield {"D": width}


def _widths_of_mlps(config: ModelConfig, dims: RankDims) -> Iterator[Axes]:
    for width in dict.fromkeys((dims.dense_width, dims.shared_width, dims.expert_width)):
        if width:
            yield {"I": width}


def _patch(config: ModelConfig, dims: RankDims) -> Iterator[Axes]:
    # The contract calls a patch's rows R and its columns W, the query has Y and X.
    _, (_, side) = _published()
    yield {"R": side, "W": side}


def _banks(config: ModelConfig, dims: RankDims) -> Iterator[Axes]:
    # One slot more than finished blocks: the one that this call may write.
    yield {"R": config.num_blocks + 1}


WIDTHS: dict[str, Callable[[ModelConfig, RankDims], Iterator[Axes]]] = {
    "rms_norm": _widths_of_norms,
    "situ_mul": _widths_of_mlps,
    "linear": lambda config, dims: iter(({"O": dims.hidden},)),
    "attn_res": _banks,
    # One convolution over q, k and v.
    "short_conv": lambda config, dims: iter(({"P": 3 * dims.kda_width},)),
    "vision_patch": _patch,
}
"""Sizes that replace or add to those of the op's query, one call each."""


def _kda_params(context: Context) -> KdaParams:
    axes, old = context.axes, context.sample
    channels = axes["H"] * axes["K"]
    return dataclasses.replace(
        old,
        conv=torch.empty(3 * channels, axes["W"], dtype=old.conv.dtype),
        A_log=torch.empty(axes["H"], dtype=old.A_log.dtype),
        dt_bias=torch.empty(channels, dtype=old.dt_bias.dtype),
        o_norm=torch.empty(axes["V"], dtype=old.o_norm.dtype),
        num_heads=axes["H"],
        head_dim=axes["K"],
        lower_bound=_lower_bound(),
    )


def _kda_state(context: Context) -> KdaState:
    axes = context.axes
    state = dataclasses.replace(
        context.sample,
        conv=torch.empty(axes["S"], axes["W"] - 1, 3 * axes["H"] * axes["K"], dtype=context.dtype),
        recurrent=torch.empty(axes["S"], axes["H"], axes["V"], axes["K"], dtype=context.state_dtype),
    )
    return state if state.drafts is None else dataclasses.replace(state, drafts=empty_drafts(state))


def _kda_drafts(context: Context) -> KdaDrafts:
    """The record of a call that has no whole state beside it."""
    axes = context.axes
    conv = torch.empty(axes["S"], 3, 3 * axes["H"] * axes["K"], dtype=context.dtype)
    recurrent = torch.empty(axes["S"], axes["H"], axes["V"], axes["K"], dtype=context.state_dtype, device="meta")
    return empty_drafts(KdaState(conv, recurrent))


def _sampling(context: Context) -> SamplingTensors:
    rows = context.axes["B"]
    tensors = {
        f.name: torch.ones(rows, dtype=value.dtype)
        for f in dataclasses.fields(context.sample)
        if isinstance(value := getattr(context.sample, f.name), torch.Tensor)
    }
    return dataclasses.replace(context.sample, **tensors)


def _segment(context: Context) -> Segment:
    assert context.segment is not None
    return context.segment


RECORDS: dict[type, RecordBuilder] = {
    Segment: _segment,
    KdaParams: _kda_params,
    KdaState: _kda_state,
    KdaDrafts: _kda_drafts,
    SamplingTensors: _sampling,
}
"""How a record of a sample becomes one of production size."""

STATE_ARGUMENTS = frozenset({"state"})
"""Tensor arguments that hold the recurrent state: they have the query's state dtype."""


@functools.cache
def _published() -> tuple[ModelConfig, tuple[int, int]]:
    """The published model, and width and patch side of its vision tower."""
    values = published_k3_config()
    vision = values["vision_config"]
    return parse_config(values), (vision["vt_hidden_size"], vision["patch_size"])


def _lower_bound() -> float | None:
    kda = _published()[0].kda
    return None if kda is None else kda.gate_lower_bound


@functools.cache
def production_queries(tp: int, state_dtype: str = "float32") -> tuple[OpQuery, ...]:
    """What the planner asks for the published model in bfloat16 with MXFP4 experts, one of ``tp`` ranks.

    Raises:
        ConfigError: the model cannot be split over ``tp`` ranks.
    """
    config, vision = _published()
    work = Workload("bfloat16", "mxfp4", state_dtype=state_dtype, tp=tp, vision=vision)
    queries = {query.slot: query for query in model_queries(config, work)}
    # Some ops are called only where drafts are verified.
    verified = model_queries(config, dataclasses.replace(work, query_tokens=MAX_DRAFT))
    return (*queries.values(), *(query for query in verified if query.slot not in queries))


def production_calls(spec: KernelSpec, tp: int) -> Iterator[Call]:
    """The calls that a kernel would get: for every phase and state dtype that it serves, at every width of its op.

    Raises:
        NoProductionCall: an argument has no production size; the message names it and says what to register.
    """
    states = spec.requires.state_dtypes or ("float32",)
    for state in states:
        for query in production_queries(tp, state):
            if query.op == spec.op and (not spec.phases or query.phase in spec.phases):
                if spec.requires.dtypes and query.dtype not in spec.requires.dtypes:
                    query = dataclasses.replace(query, dtype=spec.requires.dtypes[0])
                yield from _calls(query)


def _calls(query: OpQuery) -> Iterator[Call]:
    config, _ = _published()
    widths = WIDTHS.get(query.op, lambda *_: iter(({},)))
    dtype = getattr(torch, query.dtype)
    for contract in _contracts(query.op, query.phase):
        samples = list(contract.samples(dtype, torch.Generator().manual_seed(0)))
        for extra in widths(config, rank_dims(config, 0, query.tp, mxfp4=True)):
            axes = {**query.axes, **extra}
            sized = dataclasses.replace(query, axes=axes)
            seen: set[Any] = set()
            main_forms = _main_forms(samples)
            for sample in samples:
                for place, (name, rows, segment) in enumerate(_steps(query.phase, sample)):
                    form = (name, _form(sample.args))
                    if form not in seen:
                        seen.add(form)
                        args = _arguments(contract, sample, {**axes, **rows}, sized, segment)
                        what = [f"{axis} {size}" for axis, size in extra.items()]
                        main = place == 0 and _switches(sample.args) == main_forms[_kind(sample)]
                        yield Call(", ".join([name, *what, *_said(sample.args)]), sized, args, main)


def _main_forms(samples: list[Sample]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Of each kind of call, the form with the fewest absent arguments."""
    found: dict[tuple[Any, ...], Sample] = {}
    for sample in samples:
        best = found.setdefault(_kind(sample), sample)
        if _absent(sample.args) < _absent(best.args):
            found[_kind(sample)] = sample
    return {kind: _switches(sample.args) for kind, sample in found.items()}


def _kind(sample: Sample) -> tuple[Any, ...]:
    """Prefill, decode, drafts, or a prefill with snapshots; the same for all samples without a segment."""
    segment = _sampled_segment(sample)
    return () if segment is None else (segment.phase, segment.draft, bool(segment.snapshots))


def _sampled_segment(sample: Sample) -> Segment | None:
    return next((value for value in sample.args.values() if isinstance(value, Segment)), None)


def _contracts(op: str, phase: Phase | None) -> Iterator[Contract]:
    for path in OPS[op].contracts:
        module, _, name = path.partition(":")
        contract = getattr(importlib.import_module(module), name)
        if contract.phase is None or contract.phase == phase:
            yield contract


def _form(args: Mapping[str, Any]) -> tuple[Any, ...]:
    """What host code can branch on: absent arguments and switches, in records too. Sizes and numbers are not part."""
    found: list[Any] = []
    for name, value in args.items():
        if value is None or isinstance(value, bool):
            found.append((name, value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, Segment | type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            found.append((name, _form(fields)))
        elif isinstance(value, int):
            found.append((name, min(value, 1)))
    return tuple(found)


def _absent(args: Mapping[str, Any]) -> int:
    return sum(value is None for value in args.values())


def _switches(args: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, value) for name, value in args.items() if value is None or isinstance(value, bool))


def _said(args: Mapping[str, Any]) -> list[str]:
    absent = [f"no {name}" for name, value in args.items() if value is None]
    return absent + [name for name, value in args.items() if value is True]


def _steps(phase: Phase | None, sample: Sample) -> Iterator[tuple[str, Axes, Segment | None]]:
    """The steps that stand for one sample, with the sizes that they decide: T tokens, B requests, S state slots."""
    sampled = _sampled_segment(sample)
    if sampled is None:
        for tokens in STEP_TOKENS:
            yield f"step of {tokens}", {"T": tokens, "B": min(tokens, SAMPLED_ROWS)}, None
        return
    if phase is not None and sampled.phase != phase:
        return
    if sampled.phase == "prefill":
        steps = PREFILLS
    else:
        steps = DRAFTS if sampled.draft else tuple((1,) * requests for requests in DECODES)
    for lengths in steps:
        requests, tokens = len(lengths), sum(lengths)
        pages = -(-max(lengths) // PAGE_TOKENS)
        snapshots = []
        if sampled.snapshots:
            snapshots = [(i, SNAPSHOT_TOKENS, requests + 1 + i) for i, n in enumerate(lengths) if n >= SNAPSHOT_TOKENS]
        segment = make_segment(
            sampled.phase,
            lengths,
            range(1, requests + 1),
            block_tables=[[request * pages + i for i in range(pages)] for request in range(requests)],
            page_size=PAGE_TOKENS,
            draft=sampled.draft,
            snapshots=snapshots,
        )
        kind = "prefill of" if sampled.phase == "prefill" else "drafts of" if sampled.draft else "decode of"
        several = "s" if requests > 1 else ""
        what = f"{requests} request{several}" if sampled.phase == "decode" else " + ".join(map(str, lengths))
        what += ", snapshots" if snapshots else ""
        sizes = {"T": tokens, "B": requests, "S": requests + 1 + len(snapshots), "N": MAX_DRAFT}
        yield f"{kind} {what}", sizes, segment


def _arguments(
    contract: Contract, sample: Sample, axes: Axes, query: OpQuery, segment: Segment | None
) -> dict[str, Any]:
    dtype, state_dtype = (getattr(torch, name) for name in (query.dtype, query.state_dtype or "float32"))
    sizes = {**axes}
    if "H" in axes and "K" in axes:
        sizes.setdefault("P", axes["H"] * axes["K"])
    args: dict[str, Any] = {}
    for name, value in sample.args.items():
        names = contract.inputs.get(name, "")
        where = f"{contract.op}: argument {name}"
        if isinstance(value, torch.Tensor):
            if not names:
                raise NoProductionCall(f"{where} is a tensor without named axes")
            shape = tuple(_size(axis, sizes, where) for axis in names.split())
            kept = state_dtype if name in STATE_ARGUMENTS and value.is_floating_point() else value.dtype
            # Indices must be valid numbers, everything else may hold anything.
            args[name] = (torch.empty if value.is_floating_point() else torch.zeros)(shape, dtype=kept)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            builder = RECORDS.get(type(value))
            if builder is None:
                raise NoProductionCall(
                    f"{where} is a {type(value).__name__}: no production size; add it to production.RECORDS"
                )
            args[name] = builder(Context(sizes, value, dtype, state_dtype, segment))
        else:
            args[name] = value
    if args.get("lower_bound") is not None:
        args["lower_bound"] = _lower_bound()
    if isinstance(args.get("num_blocks"), int) and args["num_blocks"] > 0:
        args["num_blocks"] = axes["R"] - 1
    return args


_AXIS = re.compile(r"(\d*)([A-Za-z]+)([+-]\d+)?")


def _size(axis: str, sizes: Axes, where: str) -> int:
    """``T``, ``3P``, ``W-1``, ``C+R``."""
    if axis.isdecimal():
        return int(axis)
    if axis in sizes:
        return sizes[axis]
    if "+" in axis and not axis.partition("+")[2].isdecimal():
        return sum(_size(part, sizes, where) for part in axis.split("+"))
    match = _AXIS.fullmatch(axis)
    if match is None or match[2] not in sizes:
        raise NoProductionCall(f"{where}: no production size of axis {axis}; add it to production.WIDTHS")
    return int(match[1] or 1) * sizes[match[2]] + int(match[3] or 0)
