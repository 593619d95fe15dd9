"""What a run does before it loads weights: check the checkpoint and the machine, make the plan. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3port.errors import CapacityError, TokenizerError, UsageError
from k3port.oracle.detect import Detection, detect
from k3port.oracle.exclude import excluded_kernels
from k3port.oracle.host import require_host
from k3port.oracle.packages import assume_packages
from k3port.oracle.profile import Profile
from k3port.oracle.spec import Plan, Target
from k3port.oracle.visibility import VARIABLES
from k3port.plugins import Registry, default_registry
from k3port.runtime.planner import DEFAULT_CONCURRENCY, DEFAULT_CONTEXT, Workload, make_plan, require_same, saved_pins
from k3port.runtime.platforms import find_profile
from k3port.runtime.preflight import Checkpoint, check_checkpoint
from k3port.settings import get_environment, get_settings
from k3port.text.loading import TextTokenizer, load_tokenizer

DTYPES = ("float32", "bfloat16", "float64")
ROUNDS = {"bf16": frozenset[str](), "mxfp8": frozenset({"mxfp8"}), "mxfp4": frozenset({"mxfp4"})}
"""What expert kernels may round activations to, by the name of the setting."""


@dataclass(frozen=True)
class Prepared:
    """What a run would use."""

    checkpoint: Checkpoint
    plan: Plan
    registry: Registry
    profile: Profile
    tokenizer: TextTokenizer | None = None
    """None: the checkpoint has none, and takes token ids only."""


def prepare(
    model: str | Path,
    *,
    platform: str,
    dtype: str | None = None,
    pins: Mapping[str, str] | None = None,
    saved: Plan | None = None,
    registry: Registry | None = None,
    profiles: Sequence[Path] = (),
    kv_tokens: int = DEFAULT_CONTEXT,
    max_requests: int = DEFAULT_CONCURRENCY,
    prefill_chunk_tokens: int = 1024,
    need_text: bool = False,
) -> Prepared:
    """The checks and the plan of a run: ``run``, ``run --dry-run`` and :meth:`k3port.Runtime.load` all start here.

    Args:
        pins: kernel name by op or ``op@phase``.
        saved: a plan whose kernels this run must use, and that must be for this model, platform and version.
        registry: kernels to choose from; None takes the built-in ones and installed plugins.
        profiles: platform files beside the built-in one.
        kv_tokens: size of the latent cache over all requests.
        need_text: refuse a checkpoint without a tokenizer, which could take token ids only.

    Raises:
        K3Error: the subclass says what: ConfigError, CheckpointError, TokenizerError, PlanError, UsageError.
    """
    registry = default_registry() if registry is None else registry
    profile = find_profile(platform, profiles, registry=registry)
    name = dtype or profile.activations
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}", hint=f"dtypes: {', '.join(DTYPES)}")
    if saved is not None and pins:
        raise UsageError("both a saved plan and pinned kernels", hint="give one of them")
    detection = None
    if profile.vendor != "cpu":
        detection = detect_here(registry)
        require_host(profile, detection.devices)
    checkpoint = check_checkpoint(model)
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size)
    if tokenizer is None and need_text:
        raise TokenizerError(
            f"{checkpoint.folder} has no tokenizer (tiktoken.model or tokenizer.json)",
            hint="fetch the tokenizer files of the model, or use the library with token ids",
        )
    work = Workload(
        name,
        "mxfp4" if checkpoint.mxfp4 else checkpoint.config.dtype,
        rounds=ROUNDS[get_settings().activations or profile.settings.get("activations", "bf16")],
    )
    target = target_for(profile, registry, pins or {}, None, here=True)

    def plan_with(pins: Mapping[str, str] | None) -> Plan:
        return make_plan(
            checkpoint.config,
            work,
            target,
            registry.kernels,
            pins=pins,
            context_tokens=-(-kv_tokens // max_requests),
            concurrency=max_requests,
            prefill_chunk_tokens=prefill_chunk_tokens,
            usable_share=profile.usable_share,
            gpus_per_node=profile.gpus_per_node,
            detection=detection,
        )

    plan = plan_with(pins)
    if saved is not None:
        plan = plan_with(saved_pins(saved, plan))
        require_same(saved, plan)
    if plan.memory is not None and not plan.memory.fits:
        raise CapacityError(
            f"the model does not fit on {profile.name} like this",
            reasons=plan.memory.advice.split("; "),
            hint=f"k3port plan --platform {profile.name} shows the arithmetic",
        )
    return Prepared(checkpoint, plan, registry, profile, tokenizer)


def target_for(
    profile: Profile, registry: Registry, pins: Mapping[str, str], packages: str | None, *, here: bool
) -> Target:
    """The platform with the package versions to assume, less the kernels that settings exclude.

    Args:
        packages: ``profile``, ``host`` or a file; None: K3PORT_PACKAGES, or else the host's where the platform is
            this machine.

    Raises:
        UsageError: the file cannot be read, or a setting names no kernel or a pinned one.
    """
    settings = get_settings()
    assumed = assume_packages(packages or settings.packages, profile, registry.kernels, here=here)
    names = [spec.name for spec in registry.kernels]
    return profile.target(
        assumed.versions,
        assumed.source,
        missing_symbols=assumed.missing_symbols,
        disabled=excluded_kernels(settings.disable, names, pins),
    )


def detect_here(registry: Registry) -> Detection:
    """A thorough look at this machine's devices, without a GPU context."""
    return detect(Path("/"), environ=get_environment(VARIABLES), probes=registry.probes)
