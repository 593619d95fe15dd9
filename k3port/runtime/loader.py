"""Reads a checked checkpoint into the model's parameters, layer by layer, each tensor once and in its final form."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from k3port.errors import CapacityError, CheckpointError, UsageError
from k3port.model.shapes import RankDims, rank_dims
from k3port.model.text_tensors import expert_prefix, layer_prefix
from k3port.model.weights import EXPERTS, Param, Piece, embedding_params, expert_columns, head_params, layer_params
from k3port.ops.moe_weights import ExpertMatrix, StoredExperts, keep_stored
from k3port.ops.quant import GROUP_SIZE, SCALE_NAN, Mxfp4Tensor
from k3port.runtime.placement import HOST, Placement, open_placement
from k3port.runtime.preflight import Checkpoint

_TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)

_CHUNK_BYTES = 32 << 20
"""Copies go in steps of about this much, so that a large tensor's source pages are not all in memory at once."""

PackExperts = Callable[[StoredExperts, torch.dtype], object]
"""Turns the stored experts of one layer into what a MoE kernel reads. The result should have ``nbytes``."""


@dataclass(frozen=True)
class Weights:
    """Everything the model reads on one rank.

    Parameters that are used exactly as stored are read-only views of the mapped files: never write to them.
    """

    params: Mapping[str, torch.Tensor | object]
    """By the names of ``model/weights.py``; ``layers.{i}.moe.experts`` is what the pack function returned."""
    bytes_by_kind: Mapping[str, int]
    """``model``, ``float32`` and ``experts``."""
    mapped_bytes: int
    """The part of the sum that stays in the mapped files and can be dropped by the system."""
    notes: tuple[str, ...] = ()
    """Warnings, such as numbers in a padding that should be zero."""


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    pack_experts: PackExperts,
    tp_rank: int = 0,
    tp_size: int = 1,
    placement: Placement | None = None,
) -> Weights:
    """Loads one rank's weights.

    Memory: the result plus at most one layer (what ``pack_experts`` needs beside its result comes on top). On a GPU
    all of that is device memory; of host memory only the pages of the files that are being copied are used.

    Args:
        checkpoint: from :func:`k3port.runtime.preflight.check_checkpoint`.
        dtype: the compute type: float32, bfloat16, or float64 for tests. Parameters of kind ``float32`` ignore it.
        pack_experts: given by the MoE kernel that the plan chose, called once per MoE layer, with experts that lie on
            the device already.
        placement: where the weights go; None: host memory.

    Raises:
        UsageError: ``dtype`` or ``tp_rank`` is none of the legal ones.
        ConfigError: the model cannot be split over ``tp_size`` ranks.
        CheckpointError: a file changed after it was checked, or the scales of experts that are copied hold NaN.
        CapacityError: the memory of the GPU does not suffice.
    """
    if dtype not in COMPUTE_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in COMPUTE_DTYPES)
        raise UsageError(f"cannot compute in {str(dtype).removeprefix('torch.')}", hint=f"compute types: {names}")
    config = checkpoint.config
    dims = rank_dims(config, tp_rank, tp_size, mxfp4=checkpoint.mxfp4)
    loader = _Loader(checkpoint, dtype, placement or open_placement(HOST))
    layer = -1
    try:
        loader.load(embedding_params(dims))
        loader.load(head_params(config, dims))
        if config.tie_embeddings:
            loader.params["lm_head.weight"] = loader.params["embed.weight"]
        for layer in range(config.num_layers):
            loader.load(layer_params(config, layer, dims))
            if config.is_moe(layer):
                loader.load_experts(layer, dims, pack_experts)
            loader.finish_layer()
    except torch.OutOfMemoryError as exc:
        raise CapacityError(
            f"the weights do not fit into the GPU's memory: layer {layer} of {config.num_layers} failed",
            reasons=[str(exc).splitlines()[0]],
            hint="end other programs that use the GPU, or plan for more GPUs: k3port plan",
        ) from exc
    return Weights(loader.params, loader.bytes_by_kind, loader.mapped_bytes, tuple(loader.notes))


def _refuse_nan_scales(names: list[str], stored: StoredExperts, checkpoint: Checkpoint) -> None:
    parts = (("w1", stored.gate), ("w3", stored.up), ("w2", stored.down))
    tensors = [
        f"{name}{part}.weight_scale"
        for part, matrices in parts
        for name, matrix in zip(names, matrices, strict=True)
        if isinstance(matrix, Mxfp4Tensor) and bool((matrix.scale == SCALE_NAN).any())
    ]
    if tensors:
        faults = [
            f"{name} in {checkpoint.tensors[name].file} holds byte {SCALE_NAN}, which means NaN" for name in tensors
        ]
        files = sorted({checkpoint.tensors[name].file for name in tensors})
        raise CheckpointError(
            f"experts in {checkpoint.folder} with values that are no numbers",
            reasons=faults,
            hint=f"download {', '.join(files)} again",
        )


class _Loader:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, placement: Placement) -> None:
        self.checkpoint, self.dtype, self.placement = checkpoint, dtype, placement
        self.params: dict[str, torch.Tensor | object] = {}
        self.bytes_by_kind = {"model": 0, "float32": 0, "experts": 0}
        self.mapped_bytes = 0
        self.notes: list[str] = []
        self._files: dict[str, _MappedFile] = {}

    def load(self, params: list[Param]) -> None:
        for param in params:
            tensor = self._build(param)
            self.params[param.name] = tensor
            self.bytes_by_kind[param.kind] += tensor.nbytes
            self.mapped_bytes += self._mapped_bytes(tensor)

    def load_experts(self, layer: int, dims: RankDims, pack: PackExperts) -> None:
        quantised = layer in self.checkpoint.mxfp4_layers
        prefix, (start, stop) = layer_prefix(layer), expert_columns(dims)
        names = [prefix + expert_prefix(expert) for expert in range(dims.num_experts)]
        stored = StoredExperts(
            gate=[self._expert_rows(name + "w1", quantised, start, stop) for name in names],
            up=[self._expert_rows(name + "w3", quantised, start, stop) for name in names],
            down=[self._expert_columns(name + "w2", quantised, start, stop) for name in names],
        )
        if pack is not keep_stored or not self.placement.on_host:
            # Only where the bytes are read anyway: looking for NaN must not page in a checkpoint that stays mapped.
            _refuse_nan_scales(names, stored, self.checkpoint)
        if not self.placement.on_host:
            stored = StoredExperts(
                gate=self._copied_experts(stored.gate),
                up=self._copied_experts(stored.up),
                down=self._copied_experts(stored.down),
            )
        packed = pack(stored, self.dtype)
        self.params[prefix + EXPERTS] = packed
        self.bytes_by_kind["experts"] += int(getattr(packed, "nbytes", 0))
        if packed is stored:
            for matrix in (*stored.gate, *stored.up, *stored.down):
                parts = (matrix.packed, matrix.scale) if isinstance(matrix, Mxfp4Tensor) else (matrix,)
                self.mapped_bytes += sum(map(self._mapped_bytes, parts))

    def finish_layer(self) -> None:
        """Drops the pages that were read; what stays mapped is read again when it is used."""
        for file in self._files.values():
            file.drop_pages()

    def _build(self, param: Param) -> torch.Tensor:
        dtype = self.dtype if param.kind == "model" else torch.float32
        if len(param.pieces) == 1:
            source = self._piece(param, param.pieces[0])
            same = source.dtype == dtype and source.shape == param.shape and source.is_contiguous()
            if same and self.placement.on_host:
                return source
        result = torch.empty(param.shape, dtype=dtype, device=self.placement.device)
        row = 0
        for piece in param.pieces:
            source = self._piece(param, piece)
            row = piece.row + source.shape[0]
            self._copy(result[piece.row : row], source, self._file(piece.source))
        result[row:] = 0  # alignment rows
        return result

    def _piece(self, param: Param, piece: Piece) -> torch.Tensor:
        tensor = self._view(piece.source)
        if piece.axis == 1:
            return tensor[:, piece.start : piece.stop]
        rows = tensor.reshape(-1, *param.shape[1:])
        if piece.source.endswith(".A_log"):
            self._check_padding(piece.source, rows)
        return rows[piece.start : piece.stop]

    @staticmethod
    def _copy(target: torch.Tensor, source: torch.Tensor, file: _MappedFile) -> None:
        step = max(1, _CHUNK_BYTES // max(1, target[:1].nbytes))
        for start in range(0, target.shape[0], step):
            target[start : start + step].copy_(source[start : start + step])
            file.drop_pages()

    def _copied_experts(self, matrices: Sequence[ExpertMatrix]) -> list[ExpertMatrix]:
        """The same matrices of all experts on the device, one behind the other in one piece of memory per part."""
        if isinstance(matrices[0], Mxfp4Tensor):
            quantised = [m for m in matrices if isinstance(m, Mxfp4Tensor)]
            packed, scale = (self._stacked([getattr(m, part) for m in quantised]) for part in ("packed", "scale"))
            return [Mxfp4Tensor(*parts) for parts in zip(packed, scale, strict=True)]
        return list(self._stacked([m for m in matrices if isinstance(m, torch.Tensor)]))

    def _stacked(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first = tensors[0]
        result = torch.empty(len(tensors), *first.shape, dtype=first.dtype, device=self.placement.device)
        for number, tensor in enumerate(tensors):
            result[number].copy_(tensor)
        return result

    def _check_padding(self, name: str, values: torch.Tensor) -> None:
        assert self.checkpoint.config.kda is not None
        heads = self.checkpoint.config.kda.num_heads
        num_wrong = int(torch.count_nonzero(values[heads:]))
        if num_wrong:
            stored = self.checkpoint.tensors[name]
            self.notes.append(
                f"{stored.stored_name} in {stored.file}: {num_wrong} of the {values.numel() - heads} numbers after its "
                f"{heads} heads are not zero; they are ignored"
            )

    def _expert_rows(self, name: str, quantised: bool, start: int, stop: int) -> ExpertMatrix:
        if quantised:
            return Mxfp4Tensor(
                packed=self._view(name + ".weight_packed")[start:stop],
                scale=self._view(name + ".weight_scale")[start:stop],
            )
        return self._view(name + ".weight")[start:stop]

    def _expert_columns(self, name: str, quantised: bool, start: int, stop: int) -> ExpertMatrix:
        # A slice of all columns is still contiguous and stays a view of the file.
        if quantised:
            return Mxfp4Tensor(
                packed=self._view(name + ".weight_packed")[:, start // 2 : stop // 2].contiguous(),
                scale=self._view(name + ".weight_scale")[:, start // GROUP_SIZE : stop // GROUP_SIZE].contiguous(),
            )
        return self._view(name + ".weight")[:, start:stop].contiguous()

    def _view(self, name: str) -> torch.Tensor:
        """The stored tensor as a view of its file; a copy only where its place in the file is not aligned."""
        stored = self.checkpoint.tensors[name]
        data = self._file(name).data[stored.offset : stored.offset + stored.num_bytes]
        dtype = _TORCH_DTYPES[stored.dtype]
        if stored.offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).reshape(stored.shape)

    def _file(self, name: str) -> _MappedFile:
        file = self.checkpoint.tensors[name].file
        if file not in self._files:
            self._files[file] = _MappedFile(self.checkpoint.folder / file, self.checkpoint.files[file])
        return self._files[file]

    def _mapped_bytes(self, tensor: torch.Tensor) -> int:
        start = tensor.untyped_storage().data_ptr()
        return tensor.nbytes if any(start == file.data.data_ptr() for file in self._files.values()) else 0


class _MappedFile:
    """A whole weight file as read-only uint8. The mapping lives as long as a tensor that views it."""

    def __init__(self, path: Path, expected_bytes: int) -> None:
        try:
            with path.open("rb") as file:
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:
            raise CheckpointError(
                f"cannot read {path}", reasons=[str(exc)], hint="check the file's permissions, or download it again"
            ) from None
        if len(self._mapping) != expected_bytes:
            # Reading past the end of a file that shrank would kill the process.
            raise CheckpointError(
                f"{path} changed after it was checked",
                reasons=[f"{len(self._mapping)} bytes now, {expected_bytes} then"],
                hint="wait until the download is complete, then load again",
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self.data = torch.frombuffer(self._mapping, dtype=torch.uint8)

    def drop_pages(self) -> None:
        """Gives back the memory of pages that were read. Costs little where none were."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)
