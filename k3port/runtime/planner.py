"""From a model config to the queries of the oracle, and to a plan. Without torch: plans can be made anywhere."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from k3port import __version__
from k3port.errors import PlanError
from k3port.model.config import ModelConfig
from k3port.model.shapes import rank_dims
from k3port.ops.catalog import OPS
from k3port.oracle.detect import Detection
from k3port.oracle.resolve import resolve
from k3port.oracle.spec import KernelSpec, OpQuery, Plan, Selection, Target
from k3port.runtime.groups import Group, local_experts, require_legal
from k3port.runtime.memory import plan_memory
from k3port.runtime.terms import PAGE_TOKENS, Serving, Storage

DEFAULT_CONTEXT = 32768
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True)
class Workload:
    """How a model is to be run: what the oracle asks kernels about, beside the model's own sizes.

    Attributes:
        dtype: name of the activation dtype.
        weight_format: how the routed experts are stored: ``mxfp4``, ``bfloat16`` or ``float32``.
        kv_dtype: dtype of the latent cache; empty: the activation dtype.
        state_dtype: dtype of the recurrent state.
        query_tokens: 1 + drafts per request that a decode step verifies.
        graph: whether decode steps are captured into graphs.
        rounds: roundings that are allowed: of expert activations ``mxfp8`` or ``mxfp4``, of MLA queries ``fp8_query``,
            of what ranks send each other ``int8_messages``.
        vision: width of the vision tower and side of its patches, where images are to be read too.
    """

    dtype: str
    weight_format: str = "bfloat16"
    kv_dtype: str = ""
    state_dtype: str = "float32"
    tp: int = 1
    ep: int = 1
    pp: int = 1
    nodes: int = 1
    query_tokens: int = 1
    graph: bool = False
    deterministic: bool = False
    rounds: frozenset[str] = frozenset()
    vision: tuple[int, int] | None = None

    @property
    def group(self) -> Group:
        return Group(self.tp, self.ep, self.pp)

    @property
    def storage(self) -> Storage:
        return Storage(self.dtype, self.weight_format, self.kv_dtype or self.dtype, self.state_dtype)


_KV_OPS = frozenset({"mla", "mla_append", "mla_attend"})
_STATE_OPS = frozenset({"kda", "kda_core", "kda_commit"})
_EXPERT_OPS = frozenset({"moe", "moe_experts"})
_ROUNDING_OPS = _EXPERT_OPS | _KV_OPS | {"all_reduce"}


def model_queries(config: ModelConfig, work: Workload) -> list[OpQuery]:
    """One query per op and phase that the model calls, and per fine op that a composite of them may call.

    Raises:
        ConfigError: the model cannot be split over ``tp`` ranks.
    """
    direct = _direct_axes(config, work)
    queries: dict[str, OpQuery] = {}
    for op, axes in direct.items():
        for part in (op, *OPS[op].parts):
            for phase in OPS[part].phases:
                query = OpQuery(
                    op=part,
                    phase=phase,
                    axes=axes,
                    dtype=work.dtype,
                    weight_format=work.weight_format if part in _EXPERT_OPS else "",
                    kv_dtype=(work.kv_dtype or work.dtype) if part in _KV_OPS else "",
                    state_dtype=work.state_dtype if part in _STATE_OPS else "",
                    tp=work.tp,
                    ep=work.ep,
                    nodes=work.nodes,
                    query_tokens=work.query_tokens,
                    graph=work.graph,
                    deterministic=work.deterministic,
                    rounds=work.rounds if part in _ROUNDING_OPS else frozenset(),
                    direct=part in direct,
                )
                if part == op or part not in direct:
                    queries.setdefault(query.slot, query)
    return list(queries.values())


def _direct_axes(config: ModelConfig, work: Workload) -> dict[str, Mapping[str, int]]:
    """The ops that the model itself calls, with their sizes per rank. ``E`` counts the experts of all ranks."""
    tp = work.tp
    dims = rank_dims(config, 0, tp, mxfp4=work.weight_format == "mxfp4")
    hidden = {"D": config.hidden_size}
    ops: dict[str, Mapping[str, int]] = {
        "embed": {**hidden, "V": dims.vocab},
        "linear": hidden,
        "rms_norm": hidden,
        "logits": {**hidden, "V": dims.vocab},
        "all_reduce": {**hidden, "ranks": tp},
        "all_gather": {"V": dims.vocab, "ranks": tp},
        "sample": {"V": config.vocab_size},
        "dense_mlp": {**hidden, "I": dims.dense_width or dims.shared_width},
        # An ordinary residual stream has no blocks: add and norm.
        "attn_res": {**hidden, "R": config.num_blocks},
    }
    if config.kda is not None:
        ops["kda"] = {
            "H": dims.kda_heads,
            "K": dims.kda_head_dim,
            "V": dims.kda_head_dim,
            "W": dims.conv_width,
            "bounded": int(config.kda.gate_lower_bound is not None),
        }
        if work.query_tokens > 1:
            ops["kda_commit"] = ops["kda"]
    if config.mla is not None:
        ops["mla"] = {
            "H": dims.mla_heads,
            "C": dims.kv_lora_rank,
            "N": dims.nope_dim,
            "R": dims.rope_dim,
            "V": dims.v_dim,
            "page": PAGE_TOKENS,
        }
    if config.moe is not None:
        ops["moe"] = {
            **hidden,
            "E": dims.num_experts,
            "X": config.moe.top_k,
            "I": local_experts(config, work.group)[1],
            "L": dims.latent,
        }
    if work.vision is not None:
        width, side = work.vision
        ops["vision_patch"] = {"D": width, "C": 3, "Y": side, "X": side}
    return ops


def make_plan(
    config: ModelConfig,
    work: Workload,
    target: Target,
    kernels: Iterable[KernelSpec],
    *,
    pins: Mapping[str, str] | None = None,
    context_tokens: int = DEFAULT_CONTEXT,
    concurrency: int = DEFAULT_CONCURRENCY,
    prefill_chunk_tokens: int = 1024,
    snapshots: bool = False,
    usable_share: float = 1.0,
    gpus_per_node: int = 0,
    vision: int = 0,
    allow_gaps: bool = False,
    detection: Detection | None = None,
) -> Plan:
    """The one way to a plan: for a run, a dry run, and for questions about platforms that are not here.

    Args:
        pins: kernel name by slot or op.
        context_tokens: longest prompt and answer of one request.
        concurrency: requests at once.
        prefill_chunk_tokens: most prompt tokens of one step.
        snapshots: verify drafts with one recurrent state per token instead of replaying from one.
        usable_share: the part of a device's memory that driver, libraries and fragmentation leave.
        gpus_per_node: 0: as many as the target's device says.
        vision: bytes of the vision tower where it is loaded too.
        allow_gaps: slots that no kernel fits stay empty instead of failing the plan.
        detection: this machine, where the plan is to run on it: it must show enough devices.

    Raises:
        ConfigError: the model cannot be split this way.
        PlanError: a slot has no kernel, a pin cannot be kept, or fewer devices are visible than asked for.
        UsageError: a pin names an unknown op or kernel.
    """
    group = work.group
    require_legal(config, group, mxfp4=work.weight_format == "mxfp4")
    if detection is not None and (shortage := detection.shortage(group.gpus, target.device.vendor)) is not None:
        raise PlanError(shortage.text, hint=shortage.remedy)
    specs = list(kernels)
    queries = model_queries(config, work)
    plan = resolve(queries, specs, target, pins=pins, allow_gaps=allow_gaps)
    per_node = gpus_per_node or target.device.count
    memory = plan_memory(
        config,
        group,
        Serving(context_tokens, concurrency, prefill_chunk_tokens, work.query_tokens, snapshots, work.graph),
        work.storage,
        device_bytes=target.device.memory_bytes,
        usable_share=usable_share,
        gpus_per_node=per_node,
        chosen=_chosen((*plan.selections, *plan.would_run), queries, specs),
        vision=vision,
    )
    return replace(
        plan,
        pp=work.pp,
        memory=memory,
        digests={"k3port": __version__, "model": model_digest(config)},
        warnings=(*plan.warnings, *_warnings(plan, group, per_node), *_slow(plan, specs, target)),
    )


def _chosen(
    selections: Iterable[Selection], queries: Iterable[OpQuery], specs: Iterable[KernelSpec]
) -> list[tuple[KernelSpec, OpQuery]]:
    by_slot, by_name = {q.slot: q for q in queries}, {s.name: s for s in specs}
    return [(by_name[s.kernel], replace(by_slot[s.slot], tokens=s.tokens)) for s in selections if s.kernel]


def _warnings(plan: Plan, group: Group, per_node: int) -> list[str]:
    warnings = []
    missing, now = ({s.slot: None for s in plan.gaps(would=would)} for would in (True, False))
    if missing:
        warnings.append(f"no kernel fits, built or declared: {', '.join(missing)}")
    if unbuilt := [slot for slot in now if slot not in missing]:
        warnings.append(f"no kernel that fits is built in this version: {', '.join(unbuilt)}")
    if group.tp > per_node:
        warnings.append(f"tp {group.tp} reaches over nodes of {per_node}: every layer waits for the network twice")
    return warnings


def _slow(plan: Plan, specs: Iterable[KernelSpec], target: Target) -> list[str]:
    """One sentence that names the ops that run on references on a GPU, or nothing."""
    slow = {spec.name for spec in specs if spec.needs_leave(target)}
    if ops := sorted({s.op for s in plan.selections if s.kernel in slow}):
        return [f"{', '.join(ops)} run on references on {plan.platform}: right, and far slower than kernels"]
    return []


def model_digest(config: ModelConfig) -> str:
    """What tells two models apart for a plan: every switch and size of the config."""
    values = dataclasses.asdict(config)
    values["kda_layers"] = sorted(config.kda_layers)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def saved_pins(saved: Plan, current: Plan) -> dict[str, str]:
    """Kernels of a saved plan as pins for a new one of the same model and platform.

    A slot with several token windows is not pinned: its kernels are compared by :func:`require_same` instead.

    Raises:
        PlanError: the saved plan is for something else; every difference is named.
    """
    differences = [
        f"{what}: the plan has {theirs}, this is {ours}"
        for what, theirs, ours in (
            ("platform", saved.platform, current.platform),
            ("architecture", saved.device.arch, current.device.arch),
            ("activations", saved.dtype, current.dtype),
            ("ranks", (saved.tp, saved.ep, saved.pp), (current.tp, current.ep, current.pp)),
            *(
                (f"digest of {name}", saved.digests.get(name, "absent"), digest)
                for name, digest in current.digests.items()
            ),
        )
        if theirs != ours
    ]
    if differences:
        raise PlanError(
            "the saved plan is for something else", reasons=differences, hint="make a new one: k3port plan --save FILE"
        )
    slots: dict[str, set[str]] = {}
    for selection in saved.selections:
        slots.setdefault(selection.slot, set()).add(selection.kernel)
    return {slot: next(iter(names)) for slot, names in slots.items() if len(names) == 1 and "" not in names}


def require_same(saved: Plan, current: Plan) -> None:
    """Raises:
    PlanError: a kernel that the saved plan runs is not the one that would run here.
    """
    mine, theirs = ([(s.slot, s.tokens, s.kernel) for s in p.selections] for p in (current, saved))
    if mine != theirs:
        lines = [line for line in saved.diff(current) if not line.startswith(("memory ", "would run"))]
        raise PlanError("the saved plan cannot be kept here", reasons=lines, hint="k3port plan --compare shows more")
