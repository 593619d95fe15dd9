"""Stored layouts that mean the same load the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded_weights import load, same, stored_tensors, tensor

from k3port.errors import CheckpointError
from k3port.model.shapes import kda_in_proj_rows, mla_in_proj_rows, rank_dims
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import EditFile, tiny_k3_config, write_checkpoint

ATTENTION = "language_model.model.layers.0.self_attn."


def reshape(name: str, *shape: int) -> EditFile:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for full in [full for full in tensors if full.endswith(name)]:
            tensors[full] = tensors[full].reshape(shape)

    return edit


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (7,), (32,), (1, 1, 32, 1)])
def test_b57_every_a_log_layout_loads_the_same_heads(
    tmp_path: Path, folders: dict[str, Path], shape: tuple[int, ...]
) -> None:
    count = max(shape)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("A_log")]:
            tensors[name] = tensors[name][:count].reshape(shape)

    folder = write_checkpoint(tmp_path / "a_log", tiny_k3_config(), edit=edit)
    reference = stored_tensors(folders["k3"])["layers.0.self_attn.A_log"][:4]
    assert len(set(reference.tolist())) == 4
    assert same(tensor(load(folder), "layers.0.kda.A_log"), reference)
    for rank in (0, 1):  # the slice is counted in heads, not in the stored length
        value = tensor(load(folder, rank=rank, size=2), "layers.0.kda.A_log")
        assert same(value, reference[2 * rank : 2 * rank + 2])
    assert load(folder).notes == ()


def test_b57_numbers_in_the_padding_are_reported(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if ATTENTION + "A_log" in tensors:
            tensors[ATTENTION + "A_log"][10:12] = 1.0

    folder = write_checkpoint(tmp_path / "a_log", tiny_k3_config(), edit=edit)
    (note,) = load(folder).notes
    assert note == (
        f"{ATTENTION}A_log in model-00001-of-000005.safetensors: 2 of the 28 numbers after its 4 heads are not zero; "
        "they are ignored"
    )


def test_b57_padding_may_be_missing_on_the_other_rank_but_not_a_head(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if ATTENTION + "A_log" in tensors:
            tensors[ATTENTION + "A_log"] = tensors[ATTENTION + "A_log"][:3].clone()

    folder = write_checkpoint(tmp_path / "a_log", tiny_k3_config(), edit=edit)
    with pytest.raises(CheckpointError) as caught:
        load(folder, rank=0, size=2)
    (reason,) = caught.value.reasons
    assert reason.startswith(f"{ATTENTION}A_log in model-00001-of-000005.safetensors: shape [3], expected")


def test_b58_both_conv_ranks_load_the_same(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = write_checkpoint(tmp_path / "conv", tiny_k3_config(), edit=reshape("conv1d.weight", 128, 4))
    assert stored_tensors(folder)["layers.0.self_attn.q_conv1d.weight"].shape == (128, 4)
    for size, rank in ((1, 0), (2, 1)):
        flat, cubic = load(folder, rank=rank, size=size), load(folders["k3"], rank=rank, size=size)
        assert same(tensor(flat, "layers.0.kda.conv"), tensor(cubic, "layers.0.kda.conv"))
    taps = stored_tensors(folders["k3"])["layers.0.self_attn.k_conv1d.weight"]
    assert torch.equal(tensor(load(folder), "layers.0.kda.conv")[128 + 5], taps[5, 0])


def test_b58_g_proj_goes_where_the_layer_type_says(folders: dict[str, Path]) -> None:
    weights, stored = load(folders["k3"]), stored_tensors(folders["k3"])
    dims = rank_dims(check_checkpoint(folders["k3"]).config)
    kda = tensor(weights, "layers.2.kda.in_proj").split(list(kda_in_proj_rows(dims).values()))
    mla = tensor(weights, "layers.3.mla.in_proj").split(list(mla_in_proj_rows(dims).values()))
    assert torch.equal(kda[list(kda_in_proj_rows(dims)).index("g")], stored["layers.2.self_attn.g_proj.weight"])
    assert torch.equal(mla[list(mla_in_proj_rows(dims)).index("g")], stored["layers.3.self_attn.g_proj.weight"])


def test_attn_res_vectors_may_be_flat(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = write_checkpoint(tmp_path / "res", tiny_k3_config(), edit=reshape("res_proj.weight", 64))
    assert same(tensor(load(folder), "layers.1.mlp_res.proj"), tensor(load(folders["k3"]), "layers.1.mlp_res.proj"))
