"""The embedded checkpoint: its layout, its numbers on record, what it writes, and the recipe's own model on it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

import k3port
from k3port.model.config_file import load_config
from k3port.runtime.preflight import check_checkpoint

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "k3_nano"
FOLDER = ROOT / "k3port" / "assets" / "k3-nano"
MAX_BYTES = 21_000_000


def test_the_checkpoint_is_small_and_complete() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= MAX_BYTES
    checkpoint = check_checkpoint(FOLDER)
    assert checkpoint.mxfp4
    assert not checkpoint.notes


def test_heads_have_the_sizes_of_kimi_k3() -> None:
    """Kernels made for K3 take these sizes: only the number of heads, layers and experts is smaller."""
    config = load_config(FOLDER)
    assert config.family == "kimi-k3"
    assert config.kda is not None
    assert (config.kda.head_dim, config.kda.conv_width, config.kda.gate_lower_bound) == (128, 4, -5.0)
    assert config.mla is not None
    assert (config.mla.kv_lora_rank, config.mla.nope_dim, config.mla.rope_dim, config.mla.v_dim) == (512, 128, 64, 128)
    assert config.mla.output_gate
    assert config.moe is not None
    assert config.moe.latent_norm
    assert config.attn_res_block == 3


def test_the_numbers_on_record_meet_the_targets() -> None:
    results = json.loads((RECIPE / "results.json").read_text())
    bits, xz = results["bits_per_byte"], results["xz_bits_per_byte"]
    assert bits <= 1.5
    assert bits <= 0.9 * xz
    assert results["mxfp4_perplexity_cost"] < 0.02
    assert results["verbatim_share"] < 0.05


def test_documents_show_the_numbers_on_record() -> None:
    subprocess.run([sys.executable, str(RECIPE / "report.py"), "--check"], check=True)


@pytest.fixture(scope="module")
def runtime() -> k3port.Runtime:
    return k3port.load(FOLDER)


def test_it_writes_words(runtime: k3port.Runtime) -> None:
    """Most words that it writes are words of the Python language reference, which an untrained model hardly hits."""
    known = set(re.findall(r"[a-z]{3,}", " ".join(topics.values()).lower()))
    prompts = ["The following example shows how", "If the file does not exist, the function", "You can use the command"]
    params = k3port.SamplingParams(max_tokens=120, temperature=0.7, top_p=0.95, seed=1, ignore_eos=True)
    for answer in runtime.generate(prompts, params):
        words = re.findall(r"[a-z]{3,}", answer.text.lower())
        assert len(words) > 30
        assert sum(word in known for word in words) / len(words) > 0.6, answer.text


COMPARE = """
import sys, json
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import torch
torch.set_num_threads(1)
from pathlib import Path
from evaluate import own_backend
from k3port_backend import load
folder = Path(sys.argv[3])
recipe, runtime = own_backend(folder), load(folder).runtime
generator = torch.Generator().manual_seed(0)
errors = []
with torch.no_grad():
    for length in (1, 64, 65, 200):
        ids = torch.randint(0, 3840, (length,), generator=generator).tolist()
        expected = recipe.model.logits(torch.tensor([ids]), recipe.run)[0]
        errors.append(float((runtime.logits(ids) - expected).norm() / expected.norm()))
print(json.dumps(errors))
"""


def test_the_recipe_and_the_runtime_agree() -> None:
    """The recipe trains with a model of its own; on the exported file both give the same logits."""
    command = [sys.executable, "-c", COMPARE, str(RECIPE), str(ROOT), str(FOLDER)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert max(json.loads(result.stdout)) < 5e-6
