"""What a run does before it loads weights: check the checkpoint and the machine, make the plan. Without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from k3port.errors import CapacityError, K3Error, PlanError, TokenizerError, UsageError
from k3port.oracle.detect import Detection, detect
from k3port.oracle.exclude import excluded_kernels
from k3port.oracle.host import require_host
from k3port.oracle.packages import assume_packages
from k3port.oracle.predicates import LEAVE
from k3port.oracle.profile import Profile
from k3port.oracle.spec import Plan, Selection, Target
from k3port.oracle.visibility import VARIABLES
from k3port.plugins import Registry, default_registry
from k3port.runtime.choice import HOST, device_memory, idle_gpus, recognised, torch_device
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
    device: str = HOST
    """Where it runs, as torch names it."""
    note: str = ""
    """Why a GPU of this machine is left idle, where no platform was asked for."""


@dataclass(frozen=True)
class _Question:
    """A run on any platform; :meth:`on` answers for one."""

    checkpoint: Checkpoint
    registry: Registry
    dtype: str | None
    pins: Mapping[str, str]
    saved: Plan | None
    kv_tokens: int
    max_requests: int
    prefill_chunk_tokens: int
    allow_reference: bool

    def on(self, profile: Profile, detection: Detection | None) -> tuple[Plan, str]:
        """The plan for a platform, and the device to run it on.

        Args:
            detection: this machine, where the platform is a GPU.
        """
        target = target_for(profile, self.registry, self.pins, None, here=True, allow_reference=self.allow_reference)
        device = HOST
        if detection is not None:
            device = torch_device(profile, detection)
            memory = device_memory(device, profile, detection)
            target = replace(target, device=replace(target.device, memory_bytes=memory))
        plan = self._plan(profile, target, detection, self.pins)
        if self.saved is not None:
            plan = self._plan(profile, target, detection, saved_pins(self.saved, plan))
            require_same(self.saved, plan)
        if gaps := plan.gaps():
            raise _no_kernels(profile, gaps)
        if plan.memory is not None and not plan.memory.fits:
            raise CapacityError(
                f"the model does not fit on {profile.name} like this",
                reasons=plan.memory.advice.split("; "),
                hint=f"k3port plan --platform {profile.name} shows the arithmetic",
            )
        return plan, device

    def _plan(self, profile: Profile, target: Target, detection: Detection | None, pins: Mapping[str, str]) -> Plan:
        checkpoint = self.checkpoint
        work = Workload(
            self.dtype or profile.activations,
            "mxfp4" if checkpoint.mxfp4 else checkpoint.config.dtype,
            rounds=ROUNDS[get_settings().activations or profile.settings.get("activations", "bf16")],
        )
        return make_plan(
            checkpoint.config,
            work,
            target,
            self.registry.kernels,
            pins=pins,
            context_tokens=-(-self.kv_tokens // self.max_requests),
            concurrency=self.max_requests,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            usable_share=profile.usable_share,
            gpus_per_node=profile.gpus_per_node,
            # On a GPU the error names all slots that have no kernel, those that only composites call among them.
            allow_gaps=profile.vendor != "cpu",
            detection=detection,
        )


def prepare(
    model: str | Path,
    *,
    platform: str | None,
    dtype: str | None = None,
    pins: Mapping[str, str] | None = None,
    saved: Plan | None = None,
    registry: Registry | None = None,
    profiles: Sequence[Path] = (),
    kv_tokens: int = DEFAULT_CONTEXT,
    max_requests: int = DEFAULT_CONCURRENCY,
    prefill_chunk_tokens: int = 1024,
    need_text: bool = False,
    allow_reference: bool = False,
) -> Prepared:
    """The checks and the plan of a run: ``run``, ``run --dry-run`` and :meth:`k3port.Runtime.load` all start here.

    Args:
        platform: None takes this machine's GPU where it is recognised and can run the model, else the CPU; the note
            of the result says why a GPU is left idle.
        pins: kernel name by op or ``op@phase``.
        saved: a plan whose kernels this run must use, and that must be for this model, platform and version.
        registry: kernels to choose from; None takes the built-in ones and installed plugins.
        profiles: platform files beside the built-in one.
        kv_tokens: size of the latent cache over all requests.
        need_text: refuse a checkpoint without a tokenizer, which could take token ids only.
        allow_reference: whether references may run on a GPU where no faster kernel is built.

    Raises:
        K3Error: the subclass says what: ConfigError, CheckpointError, TokenizerError, PlanError, UsageError.
    """
    registry = default_registry() if registry is None else registry
    profile = find_profile(platform or HOST, profiles, registry=registry)
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
    question = _Question(
        checkpoint, registry, dtype, pins or {}, saved, kv_tokens, max_requests, prefill_chunk_tokens, allow_reference
    )
    why = ""
    # A glance that costs nothing says whether there is a GPU at all.
    if platform is None and any(device.vendor != "cpu" for device in registry.devices):
        detection = detect_here(registry)
        gpu, why = recognised(registry, detection, profiles)
        if gpu is not None:
            try:
                plan, device = question.on(gpu, detection)
                return Prepared(checkpoint, plan, registry, gpu, tokenizer, device)
            except (PlanError, CapacityError) as exc:
                why = _why_not(gpu, exc)
        why = idle_gpus(registry.devices, why)
        detection = None
    plan, device = question.on(profile, detection)
    return Prepared(checkpoint, plan, registry, profile, tokenizer, device, why)


def _why_not(profile: Profile, error: K3Error) -> str:
    """Why the recognised GPU is not taken, with the way to take it where there is one."""
    if LEAVE in error.hint:
        return f"{error.message}; --platform {profile.name} {LEAVE} runs there, with references"
    return "; ".join((error.message, *error.reasons[:1]))


def _no_kernels(profile: Profile, gaps: Sequence[Selection]) -> PlanError:
    """The error for slots that no built kernel fills, and what would let the run go on."""
    slots = list(dict.fromkeys(gap.slot for gap in gaps))
    # Kernels of another vendor are the least of the news.
    reasons = [f"{g.slot}: {r.kernel}: {r.code} {r.detail}" for g in gaps for r in g.rejected if r.code != "VENDOR"]
    helped = all(any(r.code == "REFERENCE" for r in gap.rejected) for gap in gaps)
    return PlanError(
        f"no kernel for {profile.name} is built for {', '.join(slots)}",
        reasons=list(dict.fromkeys(reasons)) or [f"{slot}: no kernel is registered" for slot in slots],
        hint=f"{LEAVE} runs slow references there; --platform cpu runs on the CPU"
        if helped
        else f"choose another dtype, or --platform cpu; k3port plan --platform {profile.name} shows every reason",
    )


def target_for(
    profile: Profile,
    registry: Registry,
    pins: Mapping[str, str],
    packages: str | None,
    *,
    here: bool,
    allow_reference: bool = True,
) -> Target:
    """The platform with the package versions to assume, less the kernels that settings exclude.

    Args:
        packages: ``profile``, ``host`` or a file; None: K3PORT_PACKAGES, or else the host's where the platform is
            this machine.
        allow_reference: whether references may run on a GPU.

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
        allow_reference=allow_reference,
    )


def detect_here(registry: Registry) -> Detection:
    """A thorough look at this machine's devices, without a GPU context."""
    return detect(Path("/"), environ=get_environment(VARIABLES), probes=registry.probes)
