"""Loaded parameters against the stored tensors: values bit for bit, slices of every rank, memory."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import k3port
from k3port.errors import CheckpointError, ConfigError, UsageError
from k3port.model.shapes import kda_in_proj_rows, mla_in_proj_rows, rank_dims
from k3port.model.text_tensors import normalise_name
from k3port.model.weights import runtime_bytes, runtime_params
from k3port.ops.moe_weights import DenseExperts, StoredExperts, keep_stored, stack_dense
from k3port.ops.quant import Mxfp4Tensor
from k3port.runtime.loader import Weights, load_weights
from k3port.runtime.preflight import Checkpoint, check_checkpoint
from k3port.testing.synthetic import EditFile, tiny_k3_config, tiny_kimi_linear_config, write_checkpoint

ROOT = Path(k3port.__file__).parents[1]
PARITY = ROOT.parent / "shared" / "parity"
ATTENTION = "language_model.model.layers.0.self_attn."
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def wide_k3() -> dict[str, Any]:
    """16 KDA and 16 MLA heads, 16 groups of expert width: splits over 16 ranks."""
    values = tiny_k3_config()
    text = values["text_config"]
    text |= {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 160}
    text |= {"moe_intermediate_size": 512, "num_experts": 3, "vocab_size": 144}
    text["linear_attn_config"] |= {"num_heads": 16, "head_dim": 8}
    return values


def wide_kimi_linear() -> dict[str, Any]:
    values = tiny_kimi_linear_config()
    values |= {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 160}
    values |= {"moe_intermediate_size": 48, "num_experts": 3, "vocab_size": 144}
    values["linear_attn_config"] |= {"num_heads": 16, "head_dim": 8}
    return values


FAMILIES = {
    "k3": tiny_k3_config,
    "linear": tiny_kimi_linear_config,
    "wide-k3": wide_k3,
    "wide-linear": wide_kimi_linear,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("loader")
    return {name: write_checkpoint(base / name, make()) for name, make in FAMILIES.items()}


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By normalised name, read by another library."""
    files = sorted(folder.glob("*.safetensors"))
    return {normalise_name(name): tensor for file in files for name, tensor in load_file(file).items()}


def load(folder: Path, dtype: torch.dtype = BF16, rank: int = 0, size: int = 1) -> Weights:
    return load_weights(check_checkpoint(folder), dtype=dtype, pack_experts=keep_stored, tp_rank=rank, tp_size=size)


def tensor(weights: Weights, name: str) -> torch.Tensor:
    value = weights.params[name]
    assert isinstance(value, torch.Tensor)
    return value


def experts(weights: Weights, layer: int) -> StoredExperts:
    value = weights.params[f"layers.{layer}.moe.experts"]
    assert isinstance(value, StoredExperts)
    return value


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, dtype and shape included."""
    return actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(actual, expected)


def whole_model(stored: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every parameter of an unsplit model, written out by hand from the stored names."""
    expected = {
        "embed.weight": stored["embed_tokens.weight"].to(dtype),
        "lm_head.weight": stored["lm_head.weight"].to(dtype),
        "norm.weight": stored["norm.weight"].to(dtype),
    }
    if "output_attn_res_norm.weight" in stored:
        expected["output_attn_res.norm"] = stored["output_attn_res_norm.weight"].to(dtype)
        expected["output_attn_res.proj"] = stored["output_attn_res_proj.weight"][0].to(dtype)
    for layer in range(4):
        prefix = f"layers.{layer}."
        s = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix) and ".experts." not in n}
        p: dict[str, torch.Tensor] = {
            "input_norm": s["input_layernorm.weight"].to(dtype),
            "post_norm": s["post_attention_layernorm.weight"].to(dtype),
        }
        if "mlp_res_norm.weight" in s:
            p["attn_res.norm"] = s["self_attention_res_norm.weight"].to(dtype)
            p["attn_res.proj"] = s["self_attention_res_proj.weight"].flatten().to(dtype)
            p["mlp_res.norm"] = s["mlp_res_norm.weight"].to(dtype)
            p["mlp_res.proj"] = s["mlp_res_proj.weight"].flatten().to(dtype)
        a = {n.removeprefix("self_attn."): t for n, t in s.items() if n.startswith("self_attn.")}
        full_gate = "g_proj.weight" in a
        if layer < 3:
            order = ["q", "k", "v", "g", "f_a", "b"] if full_gate else ["q", "k", "v", "f_a", "g_a", "b"]
            merged = torch.cat([a[f"{part}_proj.weight"] for part in order])
            p["kda.in_proj"] = torch.cat([merged, merged.new_zeros(-len(merged) % 16, 64)]).to(dtype)
            p["kda.conv"] = torch.cat([a[f"{part}_conv1d.weight"].squeeze(1) for part in "qkv"]).float()
            p["kda.f_b"] = a["f_b_proj.weight"].to(dtype)
            if not full_gate:
                p["kda.g_b"] = a["g_b_proj.weight"].to(dtype)
            heads = a["b_proj.weight"].shape[0]
            p["kda.A_log"] = a["A_log"].flatten()[:heads]
            p["kda.dt_bias"] = a["dt_bias"]
            p["kda.o_norm"] = a["o_norm.weight"].float()
            p["kda.o_proj"] = a["o_proj.weight"].to(dtype)
        else:
            order = ["q_a_proj", "kv_a_proj_with_mqa", "g_proj"] if full_gate else ["q_proj", "kv_a_proj_with_mqa"]
            merged = torch.cat([a[f"{part}.weight"] for part in order])
            p["mla.in_proj"] = torch.cat([merged, merged.new_zeros(-len(merged) % 16, 64)]).to(dtype)
            if full_gate:
                p["mla.q_a_norm"] = a["q_a_layernorm.weight"].to(dtype)
                p["mla.q_b"] = a["q_b_proj.weight"].to(dtype)
            p["mla.kv_a_norm"] = a["kv_a_layernorm.weight"].to(dtype)
            p["mla.kv_b"] = a["kv_b_proj.weight"].to(dtype)
            p["mla.o_proj"] = a["o_proj.weight"].to(dtype)
        if layer == 0:
            p["mlp.gate_up"] = torch.cat([s["mlp.gate_proj.weight"], s["mlp.up_proj.weight"]]).to(dtype)
            p["mlp.down"] = s["mlp.down_proj.weight"].to(dtype)
        else:
            m = {n.removeprefix("block_sparse_moe."): t for n, t in s.items() if n.startswith("block_sparse_moe.")}
            p["moe.router"] = m["gate.weight"].float()
            p["moe.correction_bias"] = m["gate.e_score_correction_bias"].float()
            if "routed_expert_norm.weight" in m:
                p["moe.latent_down"] = m["routed_expert_down_proj.weight"].to(dtype)
                p["moe.latent_norm"] = m["routed_expert_norm.weight"].to(dtype)
                p["moe.latent_up"] = m["routed_expert_up_proj.weight"].to(dtype)
            halves = [m[f"shared_experts.{half}_proj.weight"] for half in ("gate", "up")]
            p["moe.shared_gate_up"] = torch.cat(halves).to(dtype)
            p["moe.shared_down"] = m["shared_experts.down_proj.weight"].to(dtype)
        expected |= {prefix + name: value for name, value in p.items()}
    return expected


# --- values --------------------------------------------------------------------------------------------------------


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
    folder = PARITY / name
    if not folder.is_dir():
        pytest.skip(f"parity checkpoint not found in {folder}")
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


# --- layouts that mean the same ------------------------------------------------------------------------------------


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


def test_b62_the_dense_layer_has_no_experts(folders: dict[str, Path]) -> None:
    packed: list[int] = []

    def pack(stored: StoredExperts, dtype: torch.dtype) -> int:
        packed.append(stored.num_experts)
        return 7

    weights = load_weights(check_checkpoint(folders["k3"]), dtype=BF16, pack_experts=pack)
    assert packed == [8, 8, 8]
    assert "layers.0.moe.experts" not in weights.params
    assert weights.params["layers.1.moe.experts"] == 7


# --- ranks ---------------------------------------------------------------------------------------------------------


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


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "size"),
    [("k3", 1), ("linear", 1), *((family, size) for family in ("wide-k3", "wide-linear") for size in (1, 2, 4, 8, 16))],
)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_b36_a_plan_equals_what_is_loaded(folders: dict[str, Path], family: str, size: int, dtype: torch.dtype) -> None:
    checkpoint = check_checkpoint(folders[family])
    weights = load_weights(checkpoint, dtype=dtype, pack_experts=keep_stored, tp_rank=size - 1, tp_size=size)
    planned = runtime_bytes(checkpoint.config, size, dtype.itemsize, mxfp4=checkpoint.mxfp4)
    assert dict(weights.bytes_by_kind) == planned
    actual = sum(v.nbytes for v in weights.params.values() if isinstance(v, torch.Tensor | StoredExperts))
    assert sum(planned.values()) == actual


def test_what_is_used_as_stored_stays_in_the_file(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(folders["k3"], tmp_path / "mapped"))
    checkpoint = check_checkpoint(folder)
    weights = load_weights(checkpoint, dtype=BF16, pack_experts=keep_stored)

    def changes_with_the_file(value: torch.Tensor, source: str) -> bool:
        stored = checkpoint.tensors[source]
        before = value.clone()
        with (folder / stored.file).open("r+b") as file:
            file.seek(stored.offset)
            file.write(bytes(255 - byte for byte in (folder / stored.file).read_bytes()[stored.offset :][:2]))
        return not torch.equal(value.view(torch.uint8), before.view(torch.uint8))

    assert changes_with_the_file(tensor(weights, "embed.weight"), "embed_tokens.weight")
    assert changes_with_the_file(tensor(weights, "layers.0.input_norm"), "layers.0.input_layernorm.weight")
    assert changes_with_the_file(tensor(weights, "layers.0.kda.A_log"), "layers.0.self_attn.A_log")
    assert changes_with_the_file(tensor(weights, "layers.1.mlp_res.proj"), "layers.1.mlp_res_proj.weight")
    gate = experts(weights, 1).gate[0]
    assert isinstance(gate, Mxfp4Tensor)
    assert changes_with_the_file(gate.packed, "layers.1.block_sparse_moe.experts.0.w1.weight_packed")
    assert not changes_with_the_file(tensor(weights, "layers.0.mlp.gate_up"), "layers.0.mlp.gate_proj.weight")
    assert not changes_with_the_file(tensor(weights, "layers.1.moe.router"), "layers.1.block_sparse_moe.gate.weight")


def test_mapped_bytes_count_single_piece_parameters_and_kept_experts(folders: dict[str, Path]) -> None:
    weights = load(folders["k3"], BF16)
    merged = ("in_proj", "conv", "gate_up", "router")
    copied = sum(v.nbytes for n, v in weights.params.items() if isinstance(v, torch.Tensor) and n.endswith(merged))
    assert weights.mapped_bytes == sum(weights.bytes_by_kind.values()) - copied
    dense = load_weights(check_checkpoint(folders["k3"]), dtype=BF16, pack_experts=stack_dense)
    assert dense.mapped_bytes == weights.mapped_bytes - weights.bytes_by_kind["experts"]
    islands = load(folders["k3"], F32)
    assert islands.mapped_bytes == weights.bytes_by_kind["experts"] + sum(
        value.nbytes
        for name, value in islands.params.items()
        if isinstance(value, torch.Tensor) and name.endswith(("A_log", "dt_bias", "o_norm", "correction_bias"))
    )


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


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    values = tiny_k3_config()
    values["tie_word_embeddings"] = True
    folder = write_checkpoint(tmp_path / "tied", values)
    weights = load(folder, F32)
    assert weights.params["lm_head.weight"] is weights.params["embed.weight"]
    assert weights.bytes_by_kind == runtime_bytes(check_checkpoint(folder).config, 1, 4)


def test_a_file_that_changed_after_the_check_is_not_read(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(folders["k3"], tmp_path / "changed"))
    checkpoint = check_checkpoint(folder)
    path = folder / "model-00003-of-000005.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4096])
    with pytest.raises(CheckpointError, match="changed after it was checked"):
        load_weights(checkpoint, dtype=BF16, pack_experts=keep_stored)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        load_weights(checkpoint, dtype=BF16, pack_experts=keep_stored)


def test_unaligned_files_load_the_same(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = Path(shutil.copytree(folders["k3"], tmp_path / "unaligned"))
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        odd = data[8 : 8 + length].rstrip() + b" "
        odd += b" " * (1 - len(odd) % 2)
        path.write_bytes(struct.pack("<Q", len(odd)) + odd + data[8 + length :])
    checkpoint: Checkpoint = check_checkpoint(folder)
    assert checkpoint.tensors["norm.weight"].offset % 2 == 1
    aligned, unaligned = load(folders["k3"], BF16), load(folder, BF16)
    for name, value in aligned.params.items():
        if isinstance(value, torch.Tensor):
            assert same(tensor(unaligned, name), value), name
    assert unaligned.mapped_bytes == aligned.bytes_by_kind["experts"]  # bytes need no alignment


MEASURE = """
import json, sys, torch
from k3port.ops.moe_weights import keep_stored, stack_dense
from k3port.runtime.loader import load_weights
from k3port.runtime.preflight import check_checkpoint

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

torch.set_num_threads(1)
folder, dtype, pack, tp_size = sys.argv[1:]
warm = torch.ones(1 << 20).bfloat16().double().float()  # code and buffers of torch itself
del warm
checkpoint = check_checkpoint(folder)
before = status("VmRSS")
weights = load_weights(
    checkpoint, dtype=getattr(torch, dtype), pack_experts=globals()[pack], tp_rank=int(tp_size) - 1, tp_size=int(tp_size)
)
final = sum(weights.bytes_by_kind.values())
print(json.dumps({"peak": status("VmHWM") - before, "now": status("VmRSS") - before, "final": final,
                  "mapped": weights.mapped_bytes}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """About 300 MB: four layers of 44 to 66 MB (three of them MoE), and a head of 67 MB."""
    values = tiny_k3_config()
    text = values["text_config"]
    text |= {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 1024}
    text |= {"routed_expert_hidden_size": 512, "num_experts": 48, "num_attention_heads": 8, "num_key_value_heads": 8}
    text |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
    text["linear_attn_config"] |= {"num_heads": 8, "head_dim": 128}
    folder = write_checkpoint(tmp_path_factory.mktemp("large") / "k3", values)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("dtype", "pack", "tp_size"),
    [
        ("bfloat16", "keep_stored", 1),
        ("float32", "keep_stored", 1),
        ("bfloat16", "stack_dense", 1),
        ("float32", "stack_dense", 1),
        ("bfloat16", "stack_dense", 2),
    ],
)
def test_peak_memory_is_the_result_and_one_layer(large: Path, dtype: str, pack: str, tp_size: int) -> None:
    arguments = [sys.executable, "-c", MEASURE, str(large), dtype, pack, str(tp_size)]
    result = subprocess.run(arguments, check=True, cwd=ROOT, capture_output=True, text=True)
    measured = json.loads(result.stdout)
    layer_bytes = max(file.stat().st_size for file in large.glob("model-0000[1-4]*.safetensors"))
    own = measured["final"] - measured["mapped"]
    print(f"{dtype} {pack} tp {tp_size}: {measured}, one layer {layer_bytes}")
    slack = 16 << 20
    assert measured["peak"] <= own + layer_bytes + slack
    # Nothing that was only read stays behind; the allocator keeps some of what expanding an expert took.
    assert measured["now"] <= own + 2 * slack
    assert layer_bytes < 0.4 * measured["final"]  # else the bound would prove nothing
