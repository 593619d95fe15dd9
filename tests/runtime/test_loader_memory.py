"""Memory of loaded weights: as planned, mapped where used as stored, never more than one layer beside the result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded_weights import experts, load, tensor

import k3port
from k3port.model.weights import runtime_bytes
from k3port.ops.moe_weights import StoredExperts, keep_stored, stack_dense
from k3port.ops.quant import Mxfp4Tensor
from k3port.runtime.loader import load_weights
from k3port.runtime.preflight import check_checkpoint
from k3port.testing.synthetic import tiny_k3_config, write_checkpoint

ROOT = Path(k3port.__file__).parents[1]
BF16, F32 = torch.bfloat16, torch.float32


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


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    values = tiny_k3_config()
    values["tie_word_embeddings"] = True
    folder = write_checkpoint(tmp_path / "tied", values)
    weights = load(folder, F32)
    assert weights.params["lm_head.weight"] is weights.params["embed.weight"]
    assert weights.bytes_by_kind == runtime_bytes(check_checkpoint(folder).config, 1, 4)


MEASURE = """
import ctypes
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
    checkpoint,
    dtype=getattr(torch, dtype),
    pack_experts=globals()[pack],
    tp_rank=int(tp_size) - 1,
    tp_size=int(tp_size),
)
peak = status("VmHWM")
# What the allocator only keeps for later is not held by the loader.
if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
    libc.malloc_trim(0)
final = sum(weights.bytes_by_kind.values())
print(json.dumps({"peak": peak - before, "now": status("VmRSS") - before, "final": final,
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
