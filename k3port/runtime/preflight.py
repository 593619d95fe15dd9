"""Checks a checkpoint folder from its index and file headers alone, and reports every fault at once.

The result, a :class:`Checkpoint`, is the only thing the loader accepts: no weight byte is read before the check.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3port.errors import CheckpointError, ConfigError
from k3port.model.config import ModelConfig
from k3port.model.config_file import load_config
from k3port.model.json_file import BrokenJsonError, is_id, read_json, shown
from k3port.model.text_tensors import TensorSpec, normalise_name
from k3port.model.vision_tensors import is_vision_tensor, vision_tensors
from k3port.runtime.headers import FileHeader, StoredTensor, read_header
from k3port.runtime.tensor_check import Absent, check_tensors

INDEX_NAME = "model.safetensors.index.json"
GENERATION_NAME = "generation_config.json"
OPTIONAL_FILES = (GENERATION_NAME, "tokenizer_config.json", "tiktoken.model")
_OTHER_FORMATS = ("*.gguf", "*.bin", "*.pt", "*.pth", "*.npz")


@dataclass(frozen=True)
class Checkpoint:
    """A folder that passed the check."""

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    """Every stored tensor by normalised name, skipped ones (vision, draft) included."""
    files: Mapping[str, int]
    """Size in bytes of each weight file when it was checked."""
    mxfp4_layers: frozenset[int]
    """MoE layers whose routed experts are MXFP4; the other MoE layers hold plain matrices."""
    notes: tuple[str, ...]
    """What is worth knowing but no fault, such as optional files that are not there."""
    total_bytes: int
    """Tensor bytes of the whole checkpoint."""
    eos_ids: frozenset[int] = frozenset()
    """Ids that end a text, from ``config.json`` and ``generation_config.json``: all inside the vocabulary."""

    @property
    def mxfp4(self) -> bool:
        return bool(self.mxfp4_layers)


@dataclass
class _Findings:
    """What the files say, before names are compared with the configuration."""

    tensors: dict[str, StoredTensor]
    files: dict[str, int]
    absent: Absent
    faults: list[str]
    notes: list[str]


def check_checkpoint(folder: str | Path, *, vision: bool = False, allow_unknown: bool = False) -> Checkpoint:
    """Checks that ``folder`` holds a complete, undamaged checkpoint of the model that its ``config.json`` describes.

    Args:
        folder: with ``config.json``, ``*.safetensors`` and, where there are several, their index.
        vision: require and check the vision tower and projector too. Otherwise they are skipped, present or not.
        allow_unknown: tensors inside a layer that the model does not know become notes instead of faults.

    Raises:
        CheckpointError: the reasons are all faults: files, headers, names, shapes and types.
        ConfigError: ``config.json`` is at fault and nothing else is.
    """
    path = Path(folder)
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}", hint="give the folder that holds config.json and the weights")
    findings = _read_files(path, vision)
    faults = findings.faults
    try:
        config = load_config(path)
        expected_vision = _expected_vision(path, config) if vision else None
    except ConfigError as exc:
        generation_eos_ids(path, None, faults)
        if not faults:
            raise
        raise _error(path, [*faults, exc.message, *exc.reasons]) from None
    report = check_tensors(
        config, findings.tensors, absent=findings.absent, vision=expected_vision, allow_unknown=allow_unknown
    )
    faults += report.faults
    more_eos_ids = generation_eos_ids(path, config.vocab_size, faults)
    if faults:
        raise _error(path, faults)
    optional = (*OPTIONAL_FILES, "preprocessor_config.json") if config.has_vision else OPTIONAL_FILES
    notes = [f"{name} is not there (optional)" for name in optional if not (path / name).exists()]
    return Checkpoint(
        folder=path,
        config=config,
        tensors=findings.tensors,
        files=findings.files,
        mxfp4_layers=frozenset(report.mxfp4_layers),
        notes=(*findings.notes, *report.notes, *notes),
        total_bytes=sum(tensor.num_bytes for tensor in findings.tensors.values()),
        eos_ids=frozenset(config.eos_ids) | more_eos_ids,
    )


def generation_eos_ids(folder: Path, vocab_size: int | None, faults: list[str]) -> frozenset[int]:
    """The ends of text that ``generation_config.json`` names; the file may be absent.

    Args:
        vocab_size: None where the configuration is at fault and does not say.
    """
    try:
        values = read_json(folder / GENERATION_NAME)
    except FileNotFoundError:
        return frozenset()
    except BrokenJsonError as exc:
        faults.append(f"{GENERATION_NAME} {exc}")
        return frozenset()
    if not isinstance(values, dict):
        faults.append(f"{GENERATION_NAME} holds no JSON object")
        return frozenset()
    value = values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [i for i in ids if not is_id(i, vocab_size)]
    if wrong:
        inside = "" if vocab_size is None else f" in 0..{vocab_size - 1}"
        faults.append(
            f"{GENERATION_NAME} has the eos_token_id {shown(value)}: expected a token id{inside} or a list of them"
        )
        return frozenset()
    return frozenset(ids)


def _error(folder: Path, faults: list[str]) -> CheckpointError:
    count = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    return CheckpointError(
        f"the checkpoint in {folder} cannot be used ({count})",
        reasons=faults,
        hint="download the named files again, or point to the folder of a Kimi K3 or Kimi-Linear checkpoint",
    )


def _expected_vision(folder: Path, config: ModelConfig) -> dict[str, TensorSpec]:
    if not config.has_vision:
        raise ConfigError(f"{folder / 'config.json'} has no vision_config", hint="load this checkpoint as a text model")
    values = read_json(folder / "config.json")
    return vision_tensors({**values["vision_config"], "text_hidden_size": config.hidden_size})


def _read_files(folder: Path, vision: bool) -> _Findings:
    faults: list[str] = []
    notes: list[str] = []
    index = _read_index(folder, faults)
    if index is None:
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            others = sorted(p.name for pattern in _OTHER_FORMATS for p in folder.glob(pattern))
            found = f" (found {', '.join(others[:3])}, which k3port does not read)" if others else ""
            faults.append(f"no *.safetensors files{found}")
        elif len(paths) > 1 and not faults:
            notes.append(f"{INDEX_NAME} is not there (optional): all {len(paths)} *.safetensors files are read")
        headers = [read_header(path) for path in paths]
        faults += [fault for header in headers for fault in header.faults]
        absent = Absent(everything=not paths or any(not header.readable for header in headers))
        tensors = _merge([tensor for header in headers for tensor in header.tensors], faults)
        return _Findings(tensors, {header.file: header.num_bytes for header in headers}, absent, faults, notes)
    weight_map, total_size = index
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        by_file.setdefault(file, []).append(name)
    stored: list[StoredTensor] = []
    files: dict[str, int] = {}
    absent_names: set[str] = set()
    for file in sorted(by_file):
        header = read_header(folder / file)
        names = by_file[file]
        only_vision = all(is_vision_tensor(normalise_name(name)) for name in names)
        if header.faults and only_vision and not vision:
            notes += [f"{fault} (vision only: not needed for text)" for fault in header.faults]
            continue
        faults += header.faults
        files[file] = header.num_bytes
        stored += _select(header, names, faults, absent_names)
    tensors = _merge(stored, faults)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    if not faults and not notes and isinstance(total_size, int) and total_size != total:
        notes.append(f"{INDEX_NAME} says total_size {total_size}, the tensors hold {total} bytes")
    return _Findings(tensors, files, Absent(frozenset(absent_names)), faults, notes)


def _read_index(folder: Path, faults: list[str]) -> tuple[dict[str, str], Any] | None:
    """``weight_map`` and ``total_size``, or None where no index can be used (a damaged one is a fault)."""
    path = folder / INDEX_NAME
    try:
        values = read_json(path)
    except FileNotFoundError:
        return None
    except BrokenJsonError as exc:
        faults.append(f"{INDEX_NAME} {exc}")
        return None
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        faults.append(f"{INDEX_NAME} has no weight_map")
        return None
    bad_files = {file for file in set(map(str, weight_map.values())) if Path(file).name != file}
    outside = [name for name, file in weight_map.items() if not isinstance(file, str) or file in bad_files]
    if outside:
        first = f"{outside[0]} in {weight_map[outside[0]]!r}"
        faults.append(f"{INDEX_NAME} names something that is not a file of this folder: {first}")
        for name in outside:
            del weight_map[name]
    metadata = values.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _select(header: FileHeader, names: list[str], faults: list[str], absent: set[str]) -> list[StoredTensor]:
    """The tensors that the index places in this file; those that are not there become faults, once."""
    there = {tensor.stored_name: tensor for tensor in header.tensors}
    selected = []
    for name in names:
        if name in there:
            selected.append(there[name])
            continue
        absent.add(normalise_name(name))
        if header.readable:
            faults.append(f"{INDEX_NAME} places {name} in {header.file}, which does not hold it")
    return selected


def _merge(stored: list[StoredTensor], faults: list[str]) -> dict[str, StoredTensor]:
    """By normalised name; two tensors under one name are a fault."""
    tensors: dict[str, StoredTensor] = {}
    for tensor in stored:
        name = normalise_name(tensor.stored_name)
        first = tensors.setdefault(name, tensor)
        if first is not tensor:
            faults.append(
                f"{name} is stored twice: {first.stored_name} in {first.file} and {tensor.stored_name} in {tensor.file}"
            )
    return tensors
