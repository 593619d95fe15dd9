"""What ``plan`` and ``kernels`` ask about: a model, a platform and how the one runs on the other. Without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import click

from k3port.cli.inputs import embedded_checkpoint
from k3port.cli.options import ALLOW_REFERENCE, CONTEXT, COUNT, INPUT, INPUT_FILE, MAX_DRAFTS, MODEL, TEXT, parse_pins
from k3port.errors import K3Error, UsageError
from k3port.model.config import ModelConfig
from k3port.model.config_file import K3_MODEL_TYPE, load_config
from k3port.oracle.host import is_here
from k3port.oracle.profile import Profile
from k3port.oracle.spec import MemoryPlan, Plan, Target
from k3port.plugins import Registry, default_registry
from k3port.runtime.groups import Group, candidate_groups, choose_group
from k3port.runtime.memory import plan_memory
from k3port.runtime.planner import DEFAULT_CONCURRENCY, DEFAULT_CONTEXT, Workload, make_plan
from k3port.runtime.platforms import find_profile
from k3port.runtime.prepare import DTYPES, ROUNDS, detect_here, target_for
from k3port.runtime.terms import Serving, item_bytes, vision_bytes
from k3port.settings import get_settings, merge_pins

profiles_option = click.option(
    "--profiles", multiple=True, type=INPUT_FILE, metavar="FILE", help="A file with own platforms."
)
_MODEL = [
    click.option(
        "--model", type=MODEL, metavar="PATH", help="Checkpoint folder or config.json. Default: the embedded model."
    ),
    click.option("--platform", type=TEXT, metavar="NAME", help="Profile of platforms.yaml. Default: cpu."),
    profiles_option,
    ALLOW_REFERENCE,
    click.option("--dtype", type=click.Choice(DTYPES), help="Activation type. Default: the platform's."),
    click.option(
        "--kv-dtype", type=TEXT, metavar="TYPE", help="Type of the latent cache; fp8 is the platform's own flavour."
    ),
    click.option(
        "--activations", type=click.Choice(tuple(ROUNDS)), help="What expert kernels may round activations to."
    ),
    click.option(
        "--state-dtype", type=click.Choice(("float32", "bfloat16")), help="Type of KDA states. Default: float32."
    ),
    click.option("--fp8-queries", is_flag=True, help="Let MLA kernels round queries to the type of an fp8 cache."),
    click.option("--tp", type=COUNT, metavar="N", help="Ranks that split every matrix."),
    click.option("--ep", type=COUNT, metavar="N", help="Ranks that share whole routed experts."),
    click.option("--pp", type=COUNT, metavar="N", help="Stages of consecutive layers."),
    click.option(
        "--draft-tokens", type=click.IntRange(0, MAX_DRAFTS), default=0, metavar="N", help="Drafts verified per step."
    ),
    click.option("--graphs/--no-graphs", default=None, help="Capture decode steps. Default: on GPUs."),
    click.option("--deterministic", is_flag=True, help="Only kernels that give the same bits each time."),
    click.option("--packages", type=INPUT, metavar="WHICH", help="Versions to assume: profile, host, or a file."),
    click.option("--kernel", "kernels", multiple=True, metavar="OP[@PHASE]=NAME", help="Pin a kernel."),
]
_SIZE = [
    click.option("--gpus", type=COUNT, metavar="N", help="Devices in all."),
    click.option("--nodes", type=COUNT, metavar="N", help="Whole nodes instead of --gpus."),
    click.option(
        "--context", type=CONTEXT, default=DEFAULT_CONTEXT, show_default=True, metavar="TOKENS",
        help="Longest prompt and answer of one request.",
    ),
    click.option(
        "--concurrency", type=COUNT, default=DEFAULT_CONCURRENCY, show_default=True, metavar="N",
        help="Requests at once.",
    ),
    click.option("--snapshots", is_flag=True, help="Verify drafts with one KDA state per token instead of replaying."),
]  # fmt: skip

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose a model, a platform and how the one runs on the other."""
    return reduce(lambda f, option: option(f), reversed(_MODEL), function)


def size_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that only matter for memory."""
    return reduce(lambda f, option: option(f), reversed(_SIZE), function)


@dataclass(frozen=True)
class ModelInput:
    """A model as its ``config.json`` describes it; no weight is looked at."""

    name: str
    config: ModelConfig
    weight_format: str
    vision: int = 0
    """Bytes of the vision tower, 0 without one."""
    patches: tuple[int, int] | None = None
    """Width of the vision tower and side of its patches."""


def read_model(path: str | None) -> ModelInput:
    """A checkpoint folder or a ``config.json``; None is the embedded model.

    Raises:
        K3Error: the file is absent, broken, or describes a model that k3port does not run.
    """
    if path == "":
        raise UsageError("--model is empty", hint="give a config.json or the folder that holds one")
    place = embedded_checkpoint() if path is None else Path(path)
    file = place / "config.json" if place.is_dir() else place
    config = load_config(file)
    values = json.loads(file.read_text(encoding="utf-8"))
    # The same holder that the reader of the config used: a Kimi-Linear file may carry a stray key of that name.
    text = values["text_config"] if values["model_type"] == K3_MODEL_TYPE else values
    quantised = text.get("quantization_config") or values.get("quantization_config")
    vision = values.get("vision_config")
    return ModelInput(
        name=file.resolve().parent.name if file.name == "config.json" else file.stem,
        config=config,
        weight_format="mxfp4" if quantised and config.moe is not None else config.dtype,
        vision=vision_bytes(vision, config.hidden_size) if vision else 0,
        patches=(vision["vt_hidden_size"], vision["patch_size"]) if vision else None,
    )


@dataclass(frozen=True)
class Question:
    """One model on one platform; :meth:`plan` answers it."""

    model: ModelInput
    profile: Profile
    target: Target
    work: Workload
    registry: Registry
    pins: Mapping[str, str]
    context_tokens: int = DEFAULT_CONTEXT
    concurrency: int = DEFAULT_CONCURRENCY
    snapshots: bool = False

    def plan(self) -> Plan:
        """The plan, slots without a kernel left empty.

        Raises:
            PlanError: a pin cannot be kept, or no combination agrees on layouts.
        """
        return make_plan(
            self.model.config,
            self.work,
            self.target,
            self.registry.kernels,
            pins=self.pins,
            context_tokens=self.context_tokens,
            concurrency=self.concurrency,
            snapshots=self.snapshots,
            usable_share=self.profile.usable_share,
            gpus_per_node=self.profile.gpus_per_node,
            vision=self.model.vision,
            allow_gaps=True,
        )

    def memory(self) -> MemoryPlan:
        """Memory alone, for where no plan exists: without what kernels add."""
        return _memory(self.model, self.profile, self.work, self._serving())

    def _serving(self) -> Serving:
        work = self.work
        return Serving(
            self.context_tokens,
            self.concurrency,
            query_tokens=work.query_tokens,
            snapshots=self.snapshots,
            graphs=work.graph,
        )


def _memory(model: ModelInput, profile: Profile, work: Workload, serving: Serving) -> MemoryPlan:
    return plan_memory(
        model.config,
        work.group,
        serving,
        work.storage,
        device_bytes=profile.memory_bytes,
        usable_share=profile.usable_share,
        gpus_per_node=profile.gpus_per_node,
        vision=model.vision,
    )


def ask(given: Mapping[str, Any], platform: str | None = None) -> Question:
    """The question that the options of a command put.

    Args:
        given: values by parameter name; sizes may be absent.
        platform: instead of ``--platform``.

    Raises:
        K3Error: an option, the model or the platform is at fault.
    """
    settings = get_settings()
    name = platform or given["platform"] or settings.platform or "cpu"
    profile = find_profile(name, given.get("profiles") or ())
    model = read_model(given["model"])
    graphs = profile.vendor != "cpu" if given["graphs"] is None else given["graphs"]
    work = Workload(
        dtype=given["dtype"] or profile.activations,
        weight_format=model.weight_format,
        kv_dtype=_kv_dtype(given["kv_dtype"], profile),
        state_dtype=given.get("state_dtype") or "float32",
        query_tokens=1 + given["draft_tokens"],
        graph=graphs,
        deterministic=given["deterministic"],
        rounds=ROUNDS[given["activations"] or settings.activations or profile.settings.get("activations", "bf16")]
        | (frozenset({"fp8_query"}) if given.get("fp8_queries") else frozenset()),
        vision=model.patches,
    )
    registry = default_registry()
    pins = merge_pins(settings.kernels, parse_pins(given["kernels"]))
    # A glance says whether the vendor is here at all; only then is the thorough look worth its time.
    here = is_here(profile, registry.devices)
    if here and profile.vendor != "cpu":
        here = is_here(profile, detect_here(registry).devices)
    question = Question(
        model=model,
        profile=profile,
        target=target_for(
            profile,
            registry,
            pins,
            given.get("packages"),
            here=here,
            # doctor asks without the option: it looks at the machine, and says what runs on references.
            allow_reference=given.get("allow_reference", True),
        ),
        work=work,
        registry=registry,
        pins=pins,
        context_tokens=given.get("context") or DEFAULT_CONTEXT,
        concurrency=given.get("concurrency") or DEFAULT_CONCURRENCY,
        snapshots=bool(given.get("snapshots")),
    )
    group = _group(question, given)
    nodes = -(-group.tp // profile.gpus_per_node)
    return replace(question, work=replace(work, tp=group.tp, ep=group.ep, pp=group.pp, nodes=nodes))


def _kv_dtype(name: str | None, profile: Profile) -> str:
    if name is None:
        return ""
    if name == "fp8":
        if profile.fp8 == "none":
            raise UsageError(f"{profile.name} has no 8-bit floats", hint="--kv-dtype bfloat16")
        return f"float8_{profile.fp8}"
    try:
        item_bytes(name)
    except K3Error as exc:
        raise UsageError(f"--kv-dtype: {exc.message}", hint=exc.hint) from None
    return name


def _group(question: Question, given: Mapping[str, Any]) -> Group:
    """The group that the options ask for; without any, the smallest one in a node that holds the model.

    Raises:
        UsageError: both --gpus and --nodes.
        ConfigError: the sizes do not go together.
    """
    profile, model = question.profile, question.model
    tp, ep, pp = given["tp"], given["ep"], given["pp"]
    gpus, nodes = given.get("gpus"), given.get("nodes")
    mxfp4 = model.weight_format == "mxfp4"
    if gpus and nodes and gpus != nodes * profile.gpus_per_node:
        raise UsageError(f"--gpus {gpus} and --nodes {nodes} of {profile.gpus_per_node}", hint="give one of them")
    gpus = gpus or (nodes and nodes * profile.gpus_per_node)
    if gpus:
        return choose_group(
            model.config, tp=tp, ep=ep, pp=pp, gpus=gpus, mxfp4=mxfp4, gpus_per_node=profile.gpus_per_node
        )
    if tp or ep or pp:
        return Group(tp or 1, ep or 1, pp or 1)
    widest = Group()
    for group in candidate_groups(model.config, profile.gpus_per_node, profile.gpus_per_node, mxfp4=mxfp4):
        if group.pp == 1 and group.ep == 1:
            widest = group
            work = replace(question.work, tp=group.tp)
            if _memory(model, profile, work, question._serving()).fits:
                return group
    return widest
