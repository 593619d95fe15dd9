"""Compares the tensors of a checkpoint with what its configuration calls for. Pure: no file is touched here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from k3port.model.config import ModelConfig
from k3port.model.shapes import EXPERT_GROUP
from k3port.model.text_tensors import (
    EXPERT_MATRICES,
    TensorSpec,
    expert_prefix,
    expert_tensors,
    head_tensors,
    layer_prefix,
    layer_tensors,
)
from k3port.model.vision_tensors import is_vision_tensor
from k3port.runtime.headers import StoredTensor

_LAYER = re.compile(r"layers\.(0|[1-9]\d*)\.(.+)")
_EXPERT = re.compile(r"block_sparse_moe\.experts\.(0|[1-9]\d*)\.(.+)")
# Buffers that are computed, and the extra tensors of draft and multi-token-prediction heads.
_SKIPPED = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(enorm|hnorm|eh_proj|shared_head)(\.|$)|confidence_head\b)"
)
_QUANTISED = re.compile(
    r"\.(weight_packed|weight_scale|weight_shape|weight_zero_point|weight_global_scale|input_scale|input_global_scale"
    r"|weight_scale_inv|qweight|qzeros|scales|g_idx)$"
)
_SHOWN = 8


@dataclass
class TensorReport:
    """What a comparison found."""

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mxfp4_layers: set[int] = field(default_factory=set)
    """MoE layers whose routed experts are MXFP4; the other MoE layers hold plain matrices."""


@dataclass(frozen=True)
class Absent:
    """Names that cannot be looked at because their file is damaged: they are not reported as missing as well."""

    names: frozenset[str] = frozenset()
    everything: bool = False
    """An unreadable file of unknown content: any tensor might be in it."""

    def __contains__(self, name: str) -> bool:
        return self.everything or name in self.names


def check_tensors(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    *,
    absent: Absent | None = None,
    vision: Mapping[str, TensorSpec] | None = None,
    allow_unknown: bool = False,
) -> TensorReport:
    """Compares stored tensors with the configuration, in time linear in their number.

    Args:
        tensors: by normalised name.
        absent: names to leave out of the "missing" faults.
        vision: the vision tensors to require; None: whatever there is of them is skipped.
        allow_unknown: report an unknown tensor inside a layer as a note, not as a fault.
    """
    absent = absent or Absent()
    report = TensorReport()
    foreign = _foreign_sentence(config, tensors, absent)
    if foreign:
        report.faults.append(foreign)
        return report
    layers: list[dict[str, StoredTensor]] = [{} for _ in range(config.num_layers)]
    experts: list[dict[tuple[int, str], StoredTensor]] = [{} for _ in range(config.num_layers)]
    outside: dict[str, StoredTensor] = {}
    seen_vision: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            layer, inner = int(match[1]), match[2]
            if layer >= config.num_layers:
                continue  # draft layers
            if expert := _EXPERT.fullmatch(inner):
                experts[layer][int(expert[1]), expert[2]] = tensor
            else:
                layers[layer][inner] = tensor
        elif is_vision_tensor(name):
            seen_vision[name] = tensor
        else:
            outside[name] = tensor
    for layer in range(config.num_layers):
        prefix = layer_prefix(layer)
        _compare(report, prefix, layer_tensors(config, layer), layers[layer], absent, allow_unknown)
        _check_experts(report, config, layer, experts[layer], absent, allow_unknown)
    _check_outside(report, config, outside, absent)
    if vision is not None:
        _compare(report, "", vision, seen_vision, absent, allow_unknown)
    return report


def _foreign_sentence(config: ModelConfig, tensors: Mapping[str, StoredTensor], absent: Absent) -> str:
    """One sentence when no tensor can belong to this architecture, instead of a fault per tensor."""
    if config.kda is not None:
        signature = ("self_attn.A_log", "self_attn.dt_bias", "self_attn.f_a_proj.weight", "self_attn.q_conv1d.weight")
    else:
        signature = ("self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight")
    if absent.everything or any(name.endswith(signature) for name in (*tensors, *absent.names)):
        return ""
    if not tensors:
        return "" if absent.names else "the files hold no tensors"
    first = ", ".join(sorted(tensor.stored_name for tensor in tensors.values())[:3])
    return (
        f"none of the {len(tensors)} tensors belongs to Kimi K3 or Kimi-Linear (no {signature[0]} in any layer): "
        f"these are the weights of another model, or an export with other names (first names: {first})"
    )


def _compare(
    report: TensorReport,
    prefix: str,
    table: Mapping[str, TensorSpec],
    found: Mapping[str, StoredTensor],
    absent: Absent,
    allow_unknown: bool,
) -> None:
    quantised = {_QUANTISED.sub("", name) for name in found if _QUANTISED.search(name)}
    for name, spec in table.items():
        tensor = found.get(name)
        if tensor is not None:
            report.faults += _form_faults(tensor, spec)
        elif spec.required and prefix + name not in absent and name.removesuffix(".weight") not in quantised:
            report.faults.append(f"{prefix}{name} is missing")
    for module in sorted(quantised):
        names = ", ".join(sorted(t.stored_name for n, t in found.items() if _QUANTISED.sub("", n) == module))
        report.faults.append(f"{prefix}{module} is stored quantised ({names}): only routed experts may be")
    for name, tensor in found.items():
        if name not in table and not _QUANTISED.search(name) and not _SKIPPED.search(name):
            _unknown(report, f"{tensor.stored_name} in {tensor.file} is not a tensor of this model", allow_unknown)


def _check_outside(
    report: TensorReport, config: ModelConfig, found: Mapping[str, StoredTensor], absent: Absent
) -> None:
    table = head_tensors(config)
    misplaced = [tensor for name, tensor in found.items() if name.startswith("layers.")]
    report.faults += [f"{tensor.stored_name} in {tensor.file} has no valid layer number" for tensor in misplaced]
    others = [
        tensor.stored_name
        for name, tensor in found.items()
        if name not in table
        and not name.startswith("layers.")
        and not _QUANTISED.search(name)
        and not _SKIPPED.search(name)
    ]
    if others:
        report.notes.append(f"{len(others)} tensors outside the model are ignored: {_listed(sorted(others))}")
    if config.tie_embeddings and "lm_head.weight" in found:
        report.faults.append(
            f"{found['lm_head.weight'].stored_name} in {found['lm_head.weight'].file} is stored, but "
            "tie_word_embeddings is true: set it to false to use the stored head, or remove the tensor"
        )
    known = {name: tensor for name, tensor in found.items() if name in table or _QUANTISED.search(name)}
    _compare(report, "", table, known, absent, allow_unknown=False)
    if not config.tie_embeddings and "lm_head.weight" not in found and "lm_head.weight is missing" in report.faults:
        position = report.faults.index("lm_head.weight is missing")
        report.faults[position] += " (tie_word_embeddings is false, so it is not shared with embed_tokens)"


def _check_experts(
    report: TensorReport,
    config: ModelConfig,
    layer: int,
    found: Mapping[tuple[int, str], StoredTensor],
    absent: Absent,
    allow_unknown: bool,
) -> None:
    prefix = layer_prefix(layer)
    if not config.is_moe(layer) or config.moe is None:
        if found:
            first = next(iter(found.values())).stored_name
            text = f"layer {layer} is dense but holds {len(found)} routed expert tensors, {first} first"
            _unknown(report, text, allow_unknown)
        return
    num_experts = config.moe.num_experts
    if not found and not absent.names and not absent.everything:
        first = _listed(map(str, range(min(num_experts, _SHOWN + 1))))
        report.faults.append(f"layer {layer} lacks routed experts {first} ({num_experts} of {num_experts})")
        return
    packed, plain = expert_tensors(config, True), expert_tensors(config, False)
    has_packed = any(name in packed for _, name in found)
    if has_packed:
        report.mxfp4_layers.add(layer)
        for what, width in (("width", config.moe.width), ("input width", config.moe.latent_dim or config.hidden_size)):
            if width % EXPERT_GROUP:
                text = (
                    f"layer {layer} stores MXFP4 experts, but their {what} {width} is not a multiple of {EXPERT_GROUP}"
                )
                report.faults.append(text)
    beyond: set[int] = set()
    for (expert, name), tensor in found.items():
        spec = packed.get(name) or plain.get(name)
        if expert >= num_experts:
            beyond.add(expert)
        elif spec is None:
            _unknown(report, f"{tensor.stored_name} in {tensor.file} is not a tensor of this model", allow_unknown)
        else:
            report.faults += _form_faults(tensor, spec)
    if beyond:
        experts = _listed(map(str, sorted(beyond)))
        text = f"layer {layer} holds experts that do not exist: {experts} (the configuration has {num_experts})"
        _unknown(report, text, allow_unknown)
    missing_experts: list[int] = []
    plain_names: list[str] = []
    for expert in range(num_experts):
        faults: list[str] = []
        num_missing = 0
        for matrix in EXPERT_MATRICES:
            module = f"{prefix}{expert_prefix(expert)}{matrix}"
            present = [
                kind for kind in ("weight_packed", "weight_scale", "weight") if (expert, f"{matrix}.{kind}") in found
            ]
            if "weight" in present and len(present) > 1:
                faults.append(f"{module} has both weight and {present[0]}: one module, two forms")
            elif present == ["weight"]:
                plain_names.append(module)
            elif len(present) == 1:
                other = "weight_scale" if present[0] == "weight_packed" else "weight_packed"
                if f"{module}.{other}" not in absent:
                    faults.append(f"{module} has {present[0]} without {other}")
            elif not present and not any(
                f"{module}.{kind}" in absent for kind in ("weight_packed", "weight_scale", "weight")
            ):
                num_missing += 1
                faults.append(f"{module}.{'weight_packed' if has_packed else 'weight'} is missing")
        if num_missing == len(EXPERT_MATRICES):
            missing_experts.append(expert)
        else:
            report.faults += faults
    if missing_experts:
        listed = _listed(map(str, missing_experts))
        report.faults.append(f"layer {layer} lacks routed experts {listed} ({len(missing_experts)} of {num_experts})")
    if has_packed and plain_names:
        report.faults.append(
            f"layer {layer} mixes MXFP4 and plain experts: {len(plain_names)} plain matrices, {plain_names[0]} first"
        )


def _form_faults(tensor: StoredTensor, spec: TensorSpec) -> list[str]:
    faults = []
    where = f"{tensor.stored_name} in {tensor.file}"
    if not spec.accepts_shape(tensor.shape):
        faults.append(f"{where}: shape {list(tensor.shape)}, expected {spec.expected_shape()}")
    if tensor.dtype not in spec.dtypes:
        faults.append(f"{where}: dtype {tensor.dtype}, expected {' or '.join(spec.dtypes)}")
    return faults


def _unknown(report: TensorReport, text: str, allowed: bool) -> None:
    (report.notes if allowed else report.faults).append(text)


def _listed(names: Iterable[str]) -> str:
    items = list(names)
    return ", ".join(items[:_SHOWN]) + (" ..." if len(items) > _SHOWN else "")
