"""Routed experts on their way to a kernel: who packs them, dense stacks, scales that are no numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded_weights import experts, load, same, stored_tensors

from k3port.errors import CheckpointError
from k3port.ops.moe_weights import DenseExperts, StoredExperts, keep_stored, stack_dense
from k3port.ops.quant import SCALE_NAN, Mxfp4Tensor
from k3port.runtime.loader import load_weights
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import tiny_k3_config, write_checkpoint

BF16, F32 = torch.bfloat16, torch.float32


def test_b62_the_dense_layer_has_no_experts(folders: dict[str, Path]) -> None:
    packed: list[int] = []

    def pack(stored: StoredExperts, dtype: torch.dtype) -> int:
        packed.append(stored.num_experts)
        return 7

    weights = load_weights(check_checkpoint(folders["k3"]), dtype=BF16, pack_experts=pack)
    assert packed == [8, 8, 8]
    assert "layers.0.moe.experts" not in weights.params
    assert weights.params["layers.1.moe.experts"] == 7


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("family", ["k3", "linear"])
@pytest.mark.parametrize("size", [1, 2])
def test_stack_dense_expands_every_expert(folders: dict[str, Path], family: str, dtype: torch.dtype, size: int) -> None:
    checkpoint, stored = check_checkpoint(folders[family]), stored_tensors(folders[family])
    rank = size - 1
    weights = load_weights(checkpoint, dtype=dtype, pack_experts=stack_dense, tp_rank=rank, tp_size=size)
    dense = weights.params["layers.2.moe.experts"]
    assert isinstance(dense, DenseExperts)

    def plain(expert: int, matrix: str) -> torch.Tensor:
        name = f"layers.2.block_sparse_moe.experts.{expert}.{matrix}.weight"
        if name in stored:
            return stored[name].to(dtype)
        return Mxfp4Tensor(stored[name + "_packed"], stored[name + "_scale"]).dequantize(dtype)

    width = dense.down.shape[2]
    own = slice(rank * width, (rank + 1) * width)
    for expert in range(8):
        gate_up = torch.cat([plain(expert, "w1")[own], plain(expert, "w3")[own]])
        assert same(dense.gate_up[expert], gate_up)
        assert same(dense.down[expert], plain(expert, "w2")[:, own])
    assert dense.gate_up.shape[0] == 8
    assert weights.bytes_by_kind["experts"] == 3 * dense.nbytes


def with_nan_scales(folder: Path, *names: str) -> Path:
    """A checkpoint with one byte 255 in each of the named scales."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            if "language_model.model." + name in tensors:
                tensors["language_model.model." + name][-1, -1] = SCALE_NAN

    return write_checkpoint(folder, tiny_k3_config(), edit=edit)


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_b60_a_nan_scale_is_refused_by_name(tmp_path: Path, matrix: str) -> None:
    name = f"layers.2.block_sparse_moe.experts.5.{matrix}.weight_scale"
    checkpoint = check_checkpoint(with_nan_scales(tmp_path / "nan", name))
    packed: list[int] = []

    def pack(stored: StoredExperts, dtype: torch.dtype) -> DenseExperts:
        packed.append(stored.num_experts)
        return stack_dense(stored, dtype)

    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, dtype=BF16, pack_experts=pack)
    file = "model-00003-of-000005.safetensors"
    assert caught.value.reasons == (f"{name} in {file} holds byte 255, which means NaN",)
    assert str(checkpoint.folder) in caught.value.message
    assert file in caught.value.hint
    assert packed == [8]  # layer 1 only: the bad layer was refused before the kernel saw it


def test_b60_all_nan_scales_of_a_layer_are_named(tmp_path: Path) -> None:
    names = {f"layers.3.block_sparse_moe.experts.{part}.weight_scale" for part in ("0.w1", "7.w1", "4.w2")}
    checkpoint = check_checkpoint(with_nan_scales(tmp_path / "nan", *names))
    with pytest.raises(CheckpointError) as caught:
        load_weights(checkpoint, dtype=BF16, pack_experts=stack_dense)
    assert {reason.split()[0] for reason in caught.value.reasons} == names


def test_b60_scales_that_stay_in_the_file_are_not_searched(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = with_nan_scales(tmp_path / "nan", "layers.2.block_sparse_moe.experts.5.w2.weight_scale")
    weights = load_weights(check_checkpoint(folder), dtype=BF16, pack_experts=keep_stored)
    down = experts(weights, 2).down[5]
    assert isinstance(down, Mxfp4Tensor)
    assert down.scale[-1, -1] == SCALE_NAN  # it is there, and nobody looked
    assert weights.mapped_bytes == load(folders["k3"]).mapped_bytes
