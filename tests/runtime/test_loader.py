"""Loaded parameters against the stored tensors, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loaded_weights import FAMILIES, experts, load, same, stored_tensors, tensor, whole_model
from shared_data import shared

from k3port.errors import UsageError
from k3port.model.weights import runtime_params
from k3port.ops.quant import Mxfp4Tensor
from k3port.runtime.preflight import check_checkpoint

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", [BF16, F32, F64])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_an_unsplit_model(folders: dict[str, Path], family: str, dtype: torch.dtype) -> None:
    weights, stored = load(folders[family], dtype), stored_tensors(folders[family])
    expected = whole_model(stored, dtype)
    names = {f"layers.{layer}.moe.experts" for layer in (1, 2, 3)}
    assert set(weights.params) == {*expected, *names}
    for name, value in expected.items():
        assert same(tensor(weights, name), value), name
    assert weights.notes == ()
    for layer in (1, 2, 3):
        for expert in range(experts(weights, layer).num_experts):
            prefix = f"layers.{layer}.block_sparse_moe.experts.{expert}."
            loaded = experts(weights, layer)
            for matrix, part in (("w1", loaded.gate), ("w3", loaded.up), ("w2", loaded.down)):
                value = part[expert]
                if "k3" in family:
                    assert isinstance(value, Mxfp4Tensor)
                    assert same(value.packed, stored[prefix + matrix + ".weight_packed"])
                    assert same(value.scale, stored[prefix + matrix + ".weight_scale"])
                else:
                    assert isinstance(value, torch.Tensor)
                    assert same(value, stored[prefix + matrix + ".weight"])


def test_float32_islands_keep_every_bit(folders: dict[str, Path]) -> None:
    weights, stored = load(folders["k3"], BF16), stored_tensors(folders["k3"])
    bias = tensor(weights, "layers.1.moe.correction_bias")
    assert bias[0].item() == pytest.approx(0.0999342, abs=5e-8)  # bfloat16 would make it 0.0999 or 0.1001
    assert not torch.equal(bias, bias.bfloat16().float())
    assert torch.equal(bias, stored["layers.1.block_sparse_moe.gate.e_score_correction_bias"])
    for name in ("kda.conv", "kda.A_log", "kda.dt_bias", "kda.o_norm"):
        value = tensor(weights, f"layers.0.{name}")
        assert value.dtype == F32
        assert not torch.equal(value, value.bfloat16().float()), name
    assert tensor(load(folders["linear"], BF16), "layers.0.kda.conv").dtype == F32  # stored as BF16


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_official_layout_checkpoints_load(name: str, dtype: torch.dtype) -> None:
    folder = shared(f"parity/{name}")
    weights, stored = load(folder, dtype), stored_tensors(folder)
    config = check_checkpoint(folder).config
    for param in runtime_params(config):
        value = tensor(weights, param.name)
        assert value.dtype == (dtype if param.kind == "model" else F32)
        assert tuple(value.shape) == param.shape
        assert torch.isfinite(value).all()
    for layer in range(config.num_layers):
        source = stored[f"layers.{layer}.self_attn.o_proj.weight"].to(dtype)
        kind = "kda" if config.is_kda(layer) else "mla"
        assert same(tensor(weights, f"layers.{layer}.{kind}.o_proj"), source)
    assert same(tensor(weights, "layers.0.kda.A_log"), stored["layers.0.self_attn.A_log"].flatten()[:2])


def test_float16_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="cannot compute in float16"):
        load(folders["k3"], torch.float16)
