"""The built-in checks of ``k3port doctor`` but those of packages: one function of facts each, listed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from k3port.oracle.checks import DoctorCheck, Facts, Result, Status, gib
from k3port.oracle.sources import Finding

_OF_SEVERITY: Mapping[str, Status] = {"info": "info", "warning": "warning", "error": "fail"}


def _python(facts: Facts) -> Iterable[Result]:
    system = facts.system
    yield Result("ok", f"k3port {facts.version}, Python {system.python}, {system.system}")


def _memory(facts: Facts) -> Iterable[Result]:
    yield Result("ok", f"{facts.system.cpus} CPUs, {gib(facts.system.memory_bytes)} memory")


def _shared_memory(facts: Facts) -> Iterable[Result]:
    size = facts.system.shared_memory_bytes
    if size is not None and size < 1 << 30 and facts.detection.gpus:
        text = f"/dev/shm has {size >> 20} MiB; collectives between GPUs of one machine want at least 1 GiB"
        yield Result("warning", text, "docker run --shm-size=16g ...")


def _rdma(facts: Facts) -> Iterable[Result]:
    system = facts.system
    if not system.rdma_devices:
        yield Result("ok", "no RDMA device: between machines, collectives would go through TCP sockets")
    elif not system.rdma_openable:
        text = f"{system.rdma_devices} RDMA device(s), and /dev/infiniband cannot be opened: TCP sockets would be used"
        yield Result("warning", text, "docker run --device=/dev/infiniband --ulimit memlock=-1 ...")
    else:
        yield Result("ok", f"{system.rdma_devices} RDMA device(s): collectives between machines use them")


def _address(facts: Facts) -> Iterable[Result]:
    address = facts.system.address
    if address in ("0.0.0.0", "::", "[::]"):
        text = f"MASTER_ADDR={address} is no address that another machine can reach"
        yield Result("fail", text, "export MASTER_ADDR=$(hostname -i)")
    elif address.startswith("169.254.") or address.lower().lstrip("[").startswith("fe80:"):
        text = f"MASTER_ADDR={address} is a link-local address: other machines would wait for ever"
        yield Result("fail", text, "export MASTER_ADDR=$(hostname -i)")


def _settings(facts: Facts) -> Iterable[Result]:
    if facts.settings_error:
        yield Result("fail", facts.settings_error, "k3port doctor --settings")
        return
    set_here = [row for row in facts.settings if row.kind == "set"]
    listing = ", ".join(f"{row.name} = {row.value}" for row in set_here)
    yield Result("ok", f"set: {listing}" if listing else "all at their defaults")


def _settings_of(*kinds: str) -> Callable[[Facts], Iterable[Result]]:
    """A check that warns of variables of some kinds."""

    def run(facts: Facts) -> Iterable[Result]:
        for row in facts.settings:
            if row.kind in kinds:
                yield Result("warning", f"{row.name}={row.value} {row.effect}", f"unset {row.name}")

    return run


def _result(finding: Finding) -> Result:
    return Result(_OF_SEVERITY[finding.severity], finding.text, finding.remedy)


def _detected(id: str, doc: str) -> DoctorCheck:
    """A check that passes on what detection found under the same id."""

    def run(facts: Facts) -> Iterable[Result]:
        return [_result(finding) for finding in facts.detection.findings if finding.id == id]

    return DoctorCheck(id, "devices", doc, run)


def _found(facts: Facts) -> Iterable[Result]:
    detection = facts.detection
    when = f"looked at {detection.at}"
    if not detection.gpus:
        yield Result("ok", f"no GPU, runs go to the CPU ({when})")
        for reason in detection.why_cpu:
            yield Result("info", reason)
        return
    for vendor in detection.vendors:
        visible = detection.visible.get(vendor, ())
        mine = [gpu for gpu in detection.gpus if gpu.device.vendor == vendor and not gpu.parent]
        kinds = list(dict.fromkeys(f"{gpu.device.name} ({gpu.device.arch})" for gpu in mine))
        usable = len(detection.usable(vendor))
        text = f"{len(mine)} GPU(s) seen, {len(visible)} visible, {usable} usable: {', '.join(kinds)} ({when})"
        yield Result("ok", text)
        for gpu in visible:
            size = f", {gib(gpu.device.memory_bytes)}" if gpu.device.memory_bytes else ""
            by = " and ".join(gpu.sources)
            yield Result("info", f"{gpu.label}{size}, {gpu.device.uuid or 'no UUID'}, from {by}")


def _sources(facts: Facts) -> Iterable[Result]:
    yield from (_result(finding) for finding in facts.detection.findings if finding.id == "devices.sources")
    if facts.detection.gpus:
        for report in facts.detection.reports:
            whole = sum(not gpu.parent for gpu in report.gpus)
            what = f"lists {whole} GPU(s)" if report.state == "ok" else report.state
            yield Result("info", f"{report.source}: {what} ({report.detail})")


def _group(facts: Facts) -> Iterable[Result]:
    profile = facts.profile
    if not facts.here or (facts.tp == 1 and (profile is None or profile.vendor == "cpu")):
        return
    vendor = profile.vendor if profile is not None and profile.vendor != "cpu" else None
    finding = facts.detection.shortage(facts.tp, vendor)
    if finding is not None:
        yield _result(finding)
    elif facts.tp > 1:
        yield Result("ok", f"{facts.tp} GPUs of one architecture are usable together")


def _plugins(facts: Facts) -> Iterable[Result]:
    for problem in facts.plugin_problems:
        yield Result("warning", problem, "pip check")
    listing = ", ".join(facts.plugins) or "none installed"
    yield Result("ok", listing)


def _clash(facts: Facts) -> Iterable[Result]:
    if facts.clash:
        yield Result("fail", facts.clash, "pip uninstall one of the two")


def _profile_file(facts: Facts) -> Iterable[Result]:
    if facts.profiles_error:
        yield Result("fail", facts.profiles_error, "k3port doctor --settings")
    else:
        yield Result("ok", f"{len(facts.profiles)} platforms: {', '.join(facts.profiles)}")


def _profile_kernels(facts: Facts) -> Iterable[Result]:
    for fault in facts.profile_faults:
        yield Result("warning", fault, "k3port kernels list")


def _platform(facts: Facts) -> Iterable[Result]:
    if facts.platform_error:
        yield Result("fail", facts.platform_error, "unset K3PORT_PLATFORM")
    if facts.profile is not None:
        where = "" if facts.here else "; answers come from the profile, nothing of it is on this machine"
        text = f"{facts.profile.name} ({facts.profile.arch}), {facts.platform_source}{where}"
        yield Result("ok" if facts.here else "info", text)
    if len(facts.platform_choices) > 1:
        text = f"the GPUs fit several platforms: {', '.join(facts.platform_choices)}"
        yield Result("warning", text, f"k3port doctor --platform {facts.platform_choices[0]}")


def _declared(facts: Facts) -> Iterable[Result]:
    if facts.profile is None:
        return
    vendor = facts.profile.vendor
    mine = [spec for spec in facts.kernels if not spec.requires.vendors or vendor in spec.requires.vendors]
    built = sum(spec.is_built for spec in mine)
    yield Result("ok", f"{len(mine)} kernels declared for {vendor}, {built} of them built")


def _plan(facts: Facts) -> Iterable[Result]:
    if facts.plan_error:
        yield Result("fail", facts.plan_error, "k3port kernels list")
    plan = facts.plan
    if plan is None:
        return
    gaps = plan.gaps()
    for label, selections in (("runs now", plan.selections), ("would run", plan.would_run)):
        backends = [selection.kernel.partition(".")[0] for selection in selections if selection.kernel]
        counts = ", ".join(f"{backends.count(name)} {name}" for name in dict.fromkeys(backends))
        yield Result("ok", f"{label} on {plan.platform}, TP{plan.tp}: {counts or 'nothing'}")
        for selection in selections:
            if selection.kernel:
                yield Result("info", f"{label}: {selection.slot}: {selection.kernel} ({selection.reason})")
    slow = [s.slot for s in plan.selections if s.kernel.startswith("reference.")]
    if slow and facts.here and facts.profile is not None and facts.profile.vendor != "cpu":
        total = sum(bool(selection.kernel) for selection in plan.selections)
        text = f"{len(slow)} of {total} slots run on reference kernels on {plan.platform}, which are slow"
        yield Result("warning", f"{text}: {', '.join(dict.fromkeys(slow))}", "k3port kernels list")
    if gaps:
        names = ", ".join(dict.fromkeys(selection.slot for selection in gaps))
        text = f"nothing runs yet for {names} on {plan.platform}"
        # A platform that is only looked at is allowed to have gaps; the machine in front of us is not.
        yield Result("fail" if facts.here else "warning", text, f"k3port kernels explain {gaps[0].op}")


def _checkpoint(facts: Facts) -> Iterable[Result]:
    model = facts.model
    if model is None:
        return
    if model.error:
        yield Result("fail", model.error, f"ls {model.path}")
    for fault in model.weight_faults:
        yield Result("fail", fault)
    if model.weights:
        yield Result("ok", model.weights)


def _layers(facts: Facts) -> Iterable[Result]:
    if facts.model is not None and facts.model.layers:
        yield Result("ok", facts.model.layers)


def _stop_ids(facts: Facts) -> Iterable[Result]:
    model = facts.model
    if model is None or model.error:
        return
    every = sorted({id for ids in model.stop_ids.values() for id in ids})
    listing = "; ".join(f"{source} {list(ids)}" for source, ids in model.stop_ids.items())
    if every:
        yield Result("ok", f"text ends at {every} ({listing})")
    else:
        text = "no stop id in config.json, generation_config.json or the tokenizer: text ends only at its limit"
        yield Result("warning", text, "add generation_config.json of the model")


def _model_memory(facts: Facts) -> Iterable[Result]:
    plan = facts.plan
    if facts.model is None or plan is None or plan.memory is None or not plan.memory.capacity_bytes:
        return
    memory = plan.memory
    text = f"{gib(memory.total_bytes)} per rank at TP{plan.tp}, one device offers {gib(memory.capacity_bytes)}"
    if memory.fits:
        yield Result("ok", f"{text}: at most {memory.max_context_tokens} tokens of context")
    else:
        yield Result("fail" if facts.here else "warning", f"{text}: does not fit. {memory.advice}".rstrip())


CHECKS: tuple[DoctorCheck, ...] = (
    DoctorCheck("system.python", "system", "versions of k3port, Python and the system", _python),
    DoctorCheck("system.memory", "system", "CPUs and memory", _memory),
    DoctorCheck("system.shm", "system", "shared memory is large enough for several GPUs", _shared_memory),
    DoctorCheck("system.rdma", "system", "what collectives between machines would use", _rdma),
    DoctorCheck("system.address", "system", "other machines can reach MASTER_ADDR", _address),
    DoctorCheck("settings.values", "settings", "the environment variables of k3port can be read", _settings),
    DoctorCheck("settings.names", "settings", "no name only looks like a setting", _settings_of("unknown", "retired")),
    DoctorCheck(
        "settings.foreign", "settings", "no switch of another program is expected to work", _settings_of("not read")
    ),
    DoctorCheck(
        "settings.owned", "settings", "no variable contradicts the setting that owns it", _settings_of("owned")
    ),
    DoctorCheck("devices.found", "devices", "GPUs that are seen, visible and usable", _found),
    _detected("devices.usable", "GPUs that are seen can compute"),
    _detected("devices.driver", "every GPU on the bus has its driver"),
    DoctorCheck("devices.sources", "devices", "the sources agree on what is there", _sources),
    _detected("devices.visible", "the variables that hide GPUs say one thing"),
    _detected("devices.order", "all tools count the GPUs in one order"),
    _detected("devices.mixed", "the GPUs are of one vendor and one architecture"),
    _detected("devices.torch", "the installed PyTorch is built for these GPUs and their driver"),
    DoctorCheck("devices.group", "devices", "the GPUs that are asked for can work together", _group),
    DoctorCheck("plugins.load", "plugins", "installed plugins load", _plugins),
    DoctorCheck("plugins.names", "plugins", "no two plugins own one kernel name", _clash),
    DoctorCheck("profiles.file", "profiles", "platform files can be read", _profile_file),
    DoctorCheck("profiles.kernels", "profiles", "every kernel that a profile names exists", _profile_kernels),
    DoctorCheck("profiles.platform", "profiles", "the platform that is looked at", _platform),
    DoctorCheck("kernels.declared", "kernels", "kernels that are declared and built for the platform", _declared),
    DoctorCheck("kernels.plan", "kernels", "every operation has a kernel", _plan),
    DoctorCheck("model.checkpoint", "model", "the checkpoint is complete", _checkpoint),
    DoctorCheck("model.layers", "model", "what the model is made of", _layers),
    DoctorCheck("model.memory", "model", "the model fits on the platform", _model_memory),
    DoctorCheck("model.stop-ids", "model", "the model knows where its text ends", _stop_ids),
)
"""The built-in checks, without those of packages."""
