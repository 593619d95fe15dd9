"""What each rank of a split model holds: together the ranks are the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded_weights import experts, load, same, stored_tensors, tensor, whole_model

from k3port.errors import ConfigError
from k3port.model.shapes import kda_in_proj_rows, mla_in_proj_rows, rank_dims
from k3port.ops.moe_weights import StoredExperts, keep_stored
from k3port.ops.quant import Mxfp4Tensor
from k3port.runtime.loader import Weights, load_weights
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import tiny_k3_config, write_checkpoint

BF16, F32 = torch.bfloat16, torch.float32


def parts_of(weights: Weights, name: str, rows: dict[str, int]) -> dict[str, torch.Tensor]:
    value = tensor(weights, name)
    assert value.shape[0] == sum(rows.values())
    return dict(zip(rows, value.split(list(rows.values())), strict=True))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("family", ["wide-k3", "wide-linear"])
def test_all_ranks_together_are_the_whole_model(
    folders: dict[str, Path], family: str, size: int, dtype: torch.dtype
) -> None:
    checkpoint = check_checkpoint(folders[family])
    stored = stored_tensors(folders[family])
    whole = whole_model(stored, dtype)
    ranks = [
        load_weights(checkpoint, dtype=dtype, pack_experts=keep_stored, tp_rank=rank, tp_size=size)
        for rank in range(size)
    ]
    dims = rank_dims(checkpoint.config, 0, size, mxfp4=checkpoint.mxfp4)
    checked: set[str] = set()

    def joined(name: str, axis: int = 0) -> torch.Tensor:
        return torch.cat([tensor(weights, name) for weights in ranks], dim=axis)

    for name in whole:
        short = name.split(".", 2)[2] if name.startswith("layers.") else name
        source = name.removesuffix(short) + "self_attn."
        if short in ("kda.in_proj", "mla.in_proj"):
            rows = kda_in_proj_rows(dims) if short == "kda.in_proj" else mla_in_proj_rows(dims)
            split = [parts_of(weights, name, rows) for weights in ranks]
            assert sum(rows.values()) % 16 == 0
            for part in rows:
                pieces = [parts[part] for parts in split]
                if part == "pad":
                    assert all(not piece.any() for piece in pieces)
                    continue
                stored_name = {"kv_a": "kv_a_proj_with_mqa"}.get(part, f"{part}_proj")
                expected = stored[f"{source}{stored_name}.weight"].to(dtype)
                if part in ("f_a", "g_a", "q_a", "kv_a"):
                    assert all(same(piece, expected) for piece in pieces), (name, part)
                else:
                    assert same(torch.cat(pieces), expected), (name, part)
        elif short == "kda.conv":
            streams = [tensor(weights, name).chunk(3) for weights in ranks]
            for index, stream in enumerate("qkv"):
                expected = stored[f"{source}{stream}_conv1d.weight"].squeeze(1).float()
                assert same(torch.cat([stream[index] for stream in streams]), expected)
        elif short.endswith("gate_up"):
            halves = [tensor(weights, name).chunk(2) for weights in ranks]
            assert same(torch.cat([h[0] for h in halves] + [h[1] for h in halves]), whole[name])
        elif short in ("kda.o_proj", "mla.o_proj", "mlp.down", "moe.shared_down"):
            assert same(joined(name, axis=1), whole[name]), name
            assert all(tensor(weights, name).is_contiguous() for weights in ranks)
        elif short.endswith(("f_b", "g_b", "q_b", "kv_b", "A_log", "dt_bias")) or name in (
            "embed.weight",
            "lm_head.weight",
        ):
            assert same(joined(name), whole[name]), name
        else:
            assert all(same(tensor(weights, name), whole[name]) for weights in ranks), name
        checked.add(name)
    for layer in (1, 2, 3):
        for expert in range(3):
            check_expert_slices([experts(weights, layer) for weights in ranks], stored, layer, expert)
    assert checked == set(whole)
    assert set(ranks[-1].params) == {*whole, *(f"layers.{layer}.moe.experts" for layer in (1, 2, 3))}


def check_expert_slices(ranks: list[StoredExperts], stored: dict[str, torch.Tensor], layer: int, expert: int) -> None:
    prefix = f"layers.{layer}.block_sparse_moe.experts.{expert}."
    for matrix, axis in (("w1", 0), ("w3", 0), ("w2", 1)):
        slices = [{"w1": r.gate, "w3": r.up, "w2": r.down}[matrix][expert] for r in ranks]
        if isinstance(slices[0], Mxfp4Tensor):
            packed = torch.cat([s.packed for s in slices if isinstance(s, Mxfp4Tensor)], dim=axis)
            scale = torch.cat([s.scale for s in slices if isinstance(s, Mxfp4Tensor)], dim=axis)
            assert same(packed, stored[f"{prefix}{matrix}.weight_packed"])
            assert same(scale, stored[f"{prefix}{matrix}.weight_scale"])
        else:
            plain = torch.cat([s for s in slices if isinstance(s, torch.Tensor)], dim=axis)
            assert same(plain, stored[f"{prefix}{matrix}.weight"])
        width = ranks[0].width
        assert slices[0].shape == ((ranks[0].latent, width) if axis else (width, ranks[0].latent))


def test_tp2_of_tiny_k3_as_the_specification_lists_it(folders: dict[str, Path]) -> None:
    weights, stored = load(folders["k3"], rank=1, size=2), stored_tensors(folders["k3"])
    assert tensor(weights, "layers.0.kda.in_proj").shape == (304, 64)
    assert not tensor(weights, "layers.0.kda.in_proj")[290:].any()
    assert tensor(weights, "layers.0.kda.in_proj")[289].any()
    assert same(tensor(weights, "layers.0.kda.A_log"), stored["layers.0.self_attn.A_log"][2:4])
    assert tensor(weights, "layers.0.mlp.gate_up").shape == (96, 64)
    assert tensor(weights, "layers.1.moe.shared_gate_up").shape == (128, 64)
    assert tensor(weights, "embed.weight").shape == (64, 64)
    down = experts(weights, 1).down[0]
    assert isinstance(down, Mxfp4Tensor)
    assert down.packed.shape == (32, 16)
    assert down.scale.shape == (32, 1)
    # Dequantising the slice gives the slice of the dequantised matrix.
    name = "layers.1.block_sparse_moe.experts.0.w2.weight"
    full = Mxfp4Tensor(stored[name + "_packed"], stored[name + "_scale"]).dequantize(F32)
    assert torch.equal(down.dequantize(F32), full[:, 32:])


def test_tp4_needs_plain_experts(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="expert width 64 / 4 = 16 is not a multiple of 32"):
        load(folders["k3"], rank=0, size=4)
    folder = write_checkpoint(tmp_path / "plain", tiny_k3_config(), mxfp4=False)
    assert experts(load(folder, rank=3, size=4), 1).width == 16
