"""Whole checkpoints against the official code: logits of every position, depth, states, greedy answers, batches, splits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_parity import (
    CHECKPOINTS,
    LENGTHS,
    POSITION_BOUND,
    SHORT_LENGTHS,
    STATE_LENGTH,
    bounded,
    check_depth,
    check_greedy,
    check_logits,
    check_routing,
    check_states,
    expected,
)
from model_runs import DEFAULT, REFERENCE, cached_runtime, run
from shared_data import shared, shared_tensors

from k3port.model.step import Step
from k3port.ops.contract import relative_rms
from k3port.ops.segment import make_segment
from k3port.runtime.pools import PAGE_TOKENS
from k3port.runtime.request import SamplingParams
from k3port.runtime.runtime import Runtime

each_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS)
GREEDY_16 = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
SPLIT_BOUND = 5e-6
"""Splits and batches change the order of sums only; a kernel's error times the depth."""


def runtime_of(checkpoint: str, dtype: str = "float32", plan: str = DEFAULT) -> Runtime:
    return cached_runtime(shared(f"parity/{checkpoint}"), dtype, plan)


@each_checkpoint
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_default_plan(checkpoint: str, length: int, dtype: str) -> None:
    runtime, data = runtime_of(checkpoint, dtype), expected(checkpoint, length)
    result = run(runtime, data["input_ids"].tolist())
    check_logits(result.logits, data["logits"], f"{length} tokens")
    assert result.logits.argmax(dim=-1)[-1] == data["greedy_ids"][0]
    assert float((result.logits - data["logits"]).abs().max()) < 6e-4
    check_depth(result, data)
    check_routing(result, data)
    assert ("attn_out" in data) == (length in (2, 5)), "sublayer outputs are kept for two short prompts"


@each_checkpoint
@pytest.mark.parametrize("length", [*SHORT_LENGTHS, 63])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reference_plan(checkpoint: str, length: int, dtype: str) -> None:
    runtime, data = runtime_of(checkpoint, dtype, REFERENCE), expected(checkpoint, length)
    assert all(s.kernel.startswith("reference.") for s in runtime.plan.selections)
    result = run(runtime, data["input_ids"].tolist())
    check_logits(result.logits, data["logits"], f"{length} tokens")
    check_depth(result, data)
    check_routing(result, data)


@each_checkpoint
@pytest.mark.parametrize("plan", [DEFAULT, REFERENCE])
def test_states_after_a_prompt(checkpoint: str, plan: str) -> None:
    data = expected(checkpoint, STATE_LENGTH)
    for dtype in ("float32", "float64"):
        runtime = runtime_of(checkpoint, dtype, plan)
        result = run(runtime, data["input_ids"].tolist())
        check_states(result, data, runtime.config)
        # And when the prompt came in pieces that fit no chunk grid, the last by single tokens.
        result = run(runtime, data["input_ids"].tolist(), [17, 30, 15, 1, 1, 1])
        check_states(result, data, runtime.config)


@each_checkpoint
@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_decoding_with_the_cache(checkpoint: str, length: int) -> None:
    check_greedy(runtime_of(checkpoint), expected(checkpoint, length))


@each_checkpoint
def test_greedy_decoding_of_the_reference_plan(checkpoint: str) -> None:
    check_greedy(runtime_of(checkpoint, plan=REFERENCE), expected(checkpoint, 5))


@each_checkpoint
def test_generate_all_prompts_at_once(checkpoint: str) -> None:
    """Continuous batching of prompts of all lengths: every answer is the one that the prompt gets alone."""
    runtime = runtime_of(checkpoint)
    data = [expected(checkpoint, length) for length in LENGTHS]
    answers = runtime.generate([d["input_ids"].tolist() for d in data], GREEDY_16)
    for answer, d, length in zip(answers, data, LENGTHS, strict=True):
        assert list(answer.token_ids) == d["greedy_ids"].tolist(), f"prompt of {length} tokens"
        assert answer.prompt_tokens == length
    assert runtime.pools.states.num_free == runtime.pools.states.num_slots - 1, "all memory came back"


@each_checkpoint
@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_chunked_prefill(checkpoint: str, chunk: int) -> None:
    """Any chunk size: the same logits as in one piece (with chunk 1, prefill steps of one token)."""
    runtime, data = runtime_of(checkpoint), expected(checkpoint, 130)
    ids = data["input_ids"].tolist()
    parts, whole = runtime.logits(ids, chunk_tokens=chunk), runtime.logits(ids)
    check_logits(parts, data["logits"], f"chunks of {chunk}")
    bounded(parts, whole, SPLIT_BOUND, f"chunks of {chunk} against one piece")


@each_checkpoint
@pytest.mark.parametrize("prompt", [1, 64, 129])
def test_prefill_then_decode(checkpoint: str, prompt: int) -> None:
    runtime, data = runtime_of(checkpoint), expected(checkpoint, 130)
    ids = data["input_ids"].tolist()
    result = run(runtime, ids, [prompt, *([1] * (130 - prompt))])
    check_logits(result.logits, data["logits"], f"prefill of {prompt}, then decode")
    bounded(result.logits, runtime.logits(ids), SPLIT_BOUND, "against one prefill")
    exact = runtime_of(checkpoint, "float64")
    pieces = run(exact, ids, [prompt, *([1] * (130 - prompt))]).logits
    assert relative_rms(pieces, exact.logits(ids)) < 1e-12


def ragged_logits(runtime: Runtime, prompts: list[list[int]]) -> list[torch.Tensor]:
    """All prompts in one prefill step; logits of all positions, per prompt."""
    pools, lengths = runtime.pools, [len(ids) for ids in prompts]
    slots = [pools.states.allocate() for _ in prompts]
    pages = [pools.pages.allocate(-(-n // PAGE_TOKENS)) for n in lengths]
    try:
        segment = make_segment("prefill", lengths, slots, [0] * len(prompts), pages, PAGE_TOKENS)
        flat = torch.tensor([i for ids in prompts for i in ids])
        step = Step(flat, (segment,), torch.arange(len(flat)))
        return list(runtime.model.forward(step, pools.model_state).split(lengths))
    finally:
        for slot, taken in zip(slots, pages, strict=True):
            pools.states.release(slot)
            pools.pages.release(taken)


@each_checkpoint
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_ragged_batch(checkpoint: str, dtype: str) -> None:
    """The official left-padded batch: the last logits of each row, and every row equal to its single run."""
    runtime = runtime_of(checkpoint, dtype)
    batch = shared_tensors(f"parity/{checkpoint}/expected/batch_ragged.safetensors")
    prompts = [ids[-n:].tolist() for ids, n in zip(batch["input_ids"], batch["lengths"].tolist(), strict=True)]
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(p) for p in prompts]
    assert len({len(p) for p in prompts}) > 1
    for order in ([0, 1, 2, 3], [3, 0, 2, 1]):
        rows = ragged_logits(runtime, [prompts[i] for i in order])
        for i, logits in zip(order, rows, strict=True):
            bounded(logits[-1], batch["last_logits"][i], POSITION_BOUND, f"row {i}")
            alone = runtime.logits(prompts[i])
            assert relative_rms(logits, alone) < (SPLIT_BOUND if dtype == "float32" else 1e-12)


@each_checkpoint
def test_forced_routing(checkpoint: str) -> None:
    """Replaying the recorded choices changes nothing here; replaying other ones does."""
    runtime, data = runtime_of(checkpoint), expected(checkpoint, 64)
    ids = data["input_ids"].tolist()
    logits = runtime.forced(data["router_idx"], data["router_weights"]).logits(ids)
    check_logits(logits, data["logits"], "forced")
    in_chunks = runtime.forced(data["router_idx"], data["router_weights"]).logits(ids, chunk_tokens=10)
    check_logits(in_chunks, data["logits"], "forced in chunks")
    other = (data["router_idx"] + 1) % 8
    assert relative_rms(runtime.forced(other, data["router_weights"]).logits(ids), data["logits"]) > 0.1


@each_checkpoint
@pytest.mark.parametrize("length", [5, 63, 64, 65, 130, 200])
def test_bfloat16_with_forced_routing(checkpoint: str, length: int) -> None:
    """Rounding of activations, with near ties of the router out of the way."""
    runtime, data = runtime_of(checkpoint, "bfloat16"), expected(checkpoint, length)
    logits = runtime.forced(data["router_idx"], data["router_weights"]).logits(data["input_ids"].tolist())
    assert logits.dtype == torch.float32
    error = relative_rms(logits, data["logits"])
    assert 1e-3 < error < 5e-2, error
    assert float((logits - data["logits"]).abs().max()) < 1.5
    top = data["logits"].topk(2, dim=-1).values
    clear = top[:, 0] - top[:, 1] > 2 * (logits - data["logits"]).abs().amax(dim=-1)
    assert torch.equal(logits.argmax(dim=-1)[clear], data["logits"].argmax(dim=-1)[clear])
    assert clear.any()


@each_checkpoint
def test_bfloat16_decode_follows_prefill(checkpoint: str) -> None:
    """The absorbed and the expanded form, chunk and step kernels: apart by rounding only."""
    runtime, data = runtime_of(checkpoint, "bfloat16"), expected(checkpoint, 65)
    forced = runtime.forced(data["router_idx"], data["router_weights"])
    steps = run(forced, data["input_ids"].tolist(), [33, *([1] * 32)])
    assert relative_rms(steps.logits, data["logits"]) < 5e-2


@each_checkpoint
def test_the_checkpoints_are_what_the_readme_says(checkpoint: str) -> None:
    config = runtime_of(checkpoint).config
    assert config.hidden_size == 96
    assert sorted(config.kda_layers) == [0, 1, 3]
    assert config.num_layers == (6 if checkpoint == "tiny-k3" else 4)
    assert (config.attn_res_block, config.activation.kind) == (
        (2, "situ") if checkpoint == "tiny-k3" else (None, "silu")
    )
    assert isinstance(shared(f"parity/{checkpoint}"), Path)
