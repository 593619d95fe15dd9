"""Generation: batches, chunks, seeds, ends, and what happens when a number goes bad."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from k3port.errors import CapacityError, UsageError
from k3port.ops.contract import relative_rms
from k3port.ops.moe import RouterParams, moe_route
from k3port.runtime.request import GREEDY, SamplingParams
from k3port.runtime.runtime import Runtime

PROMPTS = [[1, 5, 9, 2, 77, 100], [3], list(range(40, 110)), [7, 7, 7]]


@pytest.fixture(scope="module", params=["tiny_k3_folder", "tiny_linear_folder"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return Runtime.load(request.getfixturevalue(request.param), kv_tokens=2048)


@pytest.fixture(scope="module")
def k3(tiny_k3_folder: Path) -> Runtime:
    return Runtime.load(tiny_k3_folder, kv_tokens=1024)


def greedy(n: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **fields)


def test_a_ragged_batch_equals_single_runs(runtime: Runtime):
    batch = runtime.generate(PROMPTS, greedy(12))
    singles = [runtime.generate([prompt], greedy(12))[0] for prompt in PROMPTS]
    assert [g.token_ids for g in batch] == [g.token_ids for g in singles]
    assert all(len(g.token_ids) == 12 and g.finish_reason == "length" for g in batch)


def test_greedy_follows_the_one_shot_logits(runtime: Runtime):
    """Prefill and decode agree with one prefill of the whole sequence, at every step."""
    prompt = PROMPTS[0]
    answer = list(runtime.generate([prompt], greedy(10))[0].token_ids)
    logits = runtime.logits([*prompt, *answer])
    assert logits.argmax(-1).tolist()[len(prompt) - 1 : -1] == answer


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunked_prefill_equals_one_shot(runtime: Runtime, chunk: int):
    ids = list(range(1, 100))
    whole, parts = runtime.logits(ids), runtime.logits(ids, chunk_tokens=chunk)
    assert relative_rms(parts, whole) < 5e-6
    assert torch.allclose(whole, parts, atol=2e-4)
    small = Runtime.load(runtime.checkpoint.folder, prefill_chunk_tokens=chunk)
    expected = [g.token_ids for g in runtime.generate(PROMPTS, greedy(6))]
    assert [g.token_ids for g in small.generate(PROMPTS, greedy(6))] == expected


def test_more_requests_than_slots_wait_their_turn(tiny_k3_folder: Path):
    few = Runtime.load(tiny_k3_folder, max_requests=2, kv_tokens=256)
    many = Runtime.load(tiny_k3_folder)
    prompts = [[i, i + 1, i + 2] for i in range(9)]
    assert [g.token_ids for g in few.generate(prompts, greedy(5))] == [
        g.token_ids for g in many.generate(prompts, greedy(5))
    ]
    assert few.pools.states.num_free == 2
    assert few.pools.pages.num_free == few.pools.pages.num_pages


def test_one_seed_gives_one_answer_alone_or_in_a_batch(runtime: Runtime):
    params = [SamplingParams(max_tokens=12, seed=i, ignore_eos=True, top_p=0.9, top_k=40) for i in range(4)]
    batch = runtime.generate(PROMPTS, params)
    again = [runtime.generate([p], s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert [g.token_ids for g in batch] == [g.token_ids for g in again]
    other = runtime.generate([PROMPTS[0]], SamplingParams(max_tokens=12, seed=99, ignore_eos=True))[0]
    assert other.token_ids != batch[0].token_ids


def test_a_drawn_seed_is_reported_and_repeats_the_answer(runtime: Runtime):
    first = runtime.generate([PROMPTS[0]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    second = runtime.generate([PROMPTS[0]], SamplingParams(max_tokens=8, seed=first.seed, ignore_eos=True))[0]
    assert first.token_ids == second.token_ids


def forced_token(token: int) -> Callable[..., torch.Tensor]:
    """A logits kernel that always wants one token."""

    def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(x.shape[0], weight.shape[0])
        scores[:, token] = 10.0
        return scores

    return logits


def test_b59_every_known_end_stops(tiny_k3_folder: Path, tmp_path: Path):
    """The config's turn end, the generation config's and the request's own: each ends with ``stop``."""
    folder = shutil.copytree(tiny_k3_folder, tmp_path / "ckpt")
    (folder / "generation_config.json").write_text('{"eos_token_id": [120, 121]}')
    ends = Runtime.load(folder).stop_ids
    assert ends == {126, 120, 121}
    for token in (126, 120, 121, 64):
        runtime = Runtime.load(folder, overrides={"logits": forced_token(token)})
        result = runtime.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=5, stop_ids=(64,)))[0]
        assert (result.finish_reason, result.token_ids) == ("stop", ())
    result = Runtime.load(folder, overrides={"logits": forced_token(126)}).generate([[1, 2]], greedy(3))[0]
    assert (result.finish_reason, result.token_ids) == ("length", (126, 126, 126))


def test_the_context_limit_ends_with_length(tiny_k3_folder: Path):
    runtime = Runtime.load(tiny_k3_folder, kv_tokens=64)
    result = runtime.generate([list(range(60))], greedy(50))[0]
    assert (result.finish_reason, len(result.token_ids)) == ("length", 4)


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ([[]], UsageError, "prompt is empty"),
        ([[1, 128]], UsageError, "not in 0..127"),
        ([[1, -1]], UsageError, "not in 0..127"),
        ([["a"]], UsageError, "position 0 holds a str"),
        (None, UsageError, "cannot use a NoneType"),
        (b"abc", UsageError, "cannot use a bytes"),
        ([[1.5]], UsageError, "position 0 holds a float"),
        ([[True]], UsageError, "position 0 holds a bool"),
        ([3, "text"], UsageError, "cannot use a int"),
        ("some text", UsageError, "has no tokenizer"),
        ([list(range(100)) * 11], CapacityError, "1100 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(k3: Runtime, prompt: Any, error: type, text: str):
    with pytest.raises(error, match=text):
        k3.stream(prompt, greedy(2))
    assert k3.pools.states.num_free == 8
    assert k3._engine.idle


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"temperature": None}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": 10**30}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"stop_ids": "ab"}, "stop_ids"),
        ({"stop_ids": 5}, "stop_ids"),
    ],
)
def test_sampling_parameters_are_checked(fields: dict[str, Any], name: str):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**fields)
    assert any(name in reason for reason in caught.value.reasons)
    assert caught.value.hint
    assert "0" * 30 not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_requests", 0),
        ("kv_tokens", 10**25),
        ("kv_tokens", "many"),
        ("prefill_chunk_tokens", 1.5),
        ("threads", 0),
        ("threads", -3),
        ("threads", 10**9),
        ("overrides", {"nosuch": len}),
        ("kernels", ["linear"]),
    ],
)
def test_load_checks_its_arguments_first(tiny_k3_folder: Path, name: str, value: Any):
    with pytest.raises(UsageError, match=name) as caught:
        Runtime.load(tiny_k3_folder, **{name: value})
    assert caught.value.hint


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [GREEDY, GREEDY], [1], "greedy"])
def test_parameters_of_another_type_or_number_are_refused(k3: Runtime, params: Any):
    with pytest.raises(UsageError, match=r"sampling parameters|cannot use"):
        k3.generate([[1, 2]], params)


def test_numpy_and_torch_numbers_are_ids(k3: Runtime):
    import numpy as np

    expected = k3.generate([[3, 4]], greedy(4))[0].token_ids
    for prompt in (np.array([3, 4]), torch.tensor([3, 4]), [np.int64(3), 4], (3, 4)):
        assert k3.generate(prompt, greedy(4))[0].token_ids == expected


def test_open_streams_stay_apart(k3: Runtime):
    """Tokens go to the stream that asked, whichever stream is asked for its next one; closing one leaves the others."""
    prompts = [[1, 5, 9], [7] * 30, [99]]
    expected = [k3.generate([p], greedy(8))[0].token_ids for p in prompts]
    streams = [k3.stream([p], greedy(8)) for p in prompts]
    doomed = k3.stream([[4, 4]], greedy(50))
    got: list[list[int]] = [[] for _ in prompts]
    next(doomed)
    for turn in range(8):
        for tokens, stream in zip(got, streams, strict=True):
            tokens.append(next(stream).token_id)
        if turn == 3:
            doomed.close()
            assert k3.generate([prompts[1]], greedy(8))[0].token_ids == expected[1]
    assert [tuple(tokens) for tokens in got] == expected
    assert all(next(stream, None) is None for stream in streams)
    assert k3._engine.idle
    assert k3.pools.states.num_free == 8
    assert k3.pools.pages.num_free == k3.pools.pages.num_pages


def test_logits_without_a_free_slot_take_nothing(tiny_k3_folder: Path):
    runtime = Runtime.load(tiny_k3_folder, max_requests=1, kv_tokens=512)
    stream = runtime.stream([[1, 2]], greedy(9))
    next(stream)
    free = runtime.pools.pages.num_free
    with pytest.raises(CapacityError, match="state slots"):
        runtime.logits([1, 2, 3])
    assert runtime.pools.pages.num_free == free
    stream.close()
    assert runtime.logits([1, 2, 3]).shape == (3, 128)
    assert (runtime.pools.states.num_free, runtime.pools.pages.num_free) == (1, 8)


def test_a_failing_kernel_ends_every_running_request(tiny_k3_folder: Path):
    calls = {"bad": False}

    def embed(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        if calls["bad"]:
            raise RuntimeError("the device is gone")
        return weight[ids]

    runtime = Runtime.load(tiny_k3_folder, overrides={"embed": embed})
    first, second = runtime.stream([[1, 2]], greedy(9)), runtime.stream([[3]], greedy(9))
    next(first), next(second)
    calls["bad"] = True
    with pytest.raises(RuntimeError, match="gone"):
        list(first)
    rest = list(second)
    assert rest[-1].finish_reason == "error"
    assert "RuntimeError" in rest[-1].error
    calls["bad"] = False
    assert runtime.pools.states.num_free == 8
    assert len(runtime.generate([[1, 2]], greedy(3))[0].token_ids) == 3


def test_forced_routing_can_be_used_again(k3: Runtime):
    ids = [1, 5, 9, 2]
    experts = torch.tensor([0, 1]).repeat(3, len(ids), 1)
    forced = k3.forced(experts, torch.full(experts.shape, 0.5))
    first = forced.logits(ids)
    assert torch.equal(first, forced.logits(ids))
    assert torch.allclose(first, forced.logits(ids, chunk_tokens=2), atol=1e-5)
    assert not torch.allclose(first, k3.logits(ids))
    with pytest.raises(UsageError, match="replayed routing has 4 tokens"):
        forced.logits([*ids, 3])


def test_closing_a_stream_early_gives_everything_back(k3: Runtime):
    stream = k3.stream(PROMPTS, greedy(50))
    next(stream)
    stream.close()
    assert k3._engine.idle
    assert k3.pools.states.num_free == 8
    k3.stream(PROMPTS, greedy(5))  # never started: must leave nothing queued
    assert k3._engine.idle
    assert len(k3.generate([[1, 2]], greedy(3))[0].token_ids) == 3


def test_a_released_slot_is_clean(k3: Runtime):
    k3.generate(PROMPTS, greedy(3))
    for state in k3.pools.states.layers.values():
        assert not state.recurrent[1:].any()
        assert not state.conv.any()


def poisoned_router(tokens: int | None = None) -> dict[str, Callable[..., Any]]:
    """A router whose weights are NaN: in every call, or in calls of that many tokens."""

    def bad(h: torch.Tensor, router: RouterParams) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = moe_route(h, router)
        return ids, weights * torch.nan if tokens in (None, h.shape[0]) else weights

    return {"moe_route": bad}


def test_bad_numbers_end_the_request_and_name_the_op(tiny_k3_folder: Path):
    runtime = Runtime.load(tiny_k3_folder, overrides=poisoned_router())
    result = runtime.generate([[1, 5, 9]], greedy(5))[0]
    assert result.finish_reason == "error"
    assert result.token_ids == ()
    assert "moe_route" in result.error
    assert "layer 1" in result.error
    assert "prefill" in result.error


def test_bad_numbers_in_decode_only_are_found_by_the_repeat(tiny_k3_folder: Path):
    runtime = Runtime.load(tiny_k3_folder, overrides=poisoned_router(tokens=1))
    result = runtime.generate([[1, 5, 9]], greedy(5))[0]
    assert (result.finish_reason, len(result.token_ids)) == ("error", 1)
    assert "moe_route" in result.error
    assert "decode" in result.error


def test_bad_numbers_of_one_request_leave_the_others_alone(tiny_k3_folder: Path):
    clean = Runtime.load(tiny_k3_folder)

    def bad_embed(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        return torch.where((ids == 99).unsqueeze(-1), torch.nan, weight[ids])

    runtime = Runtime.load(tiny_k3_folder, overrides={"embed": bad_embed})
    good, bad, also_good = runtime.generate([[1, 2, 3], [4, 99, 5], [6]], greedy(6))
    assert bad.finish_reason == "error"
    assert "embed" in bad.error
    expected = clean.generate([[1, 2, 3], [6]], greedy(6))
    assert [good.token_ids, also_good.token_ids] == [g.token_ids for g in expected]
    # The slots that held the bad state serve the next requests.
    assert [g.token_ids for g in runtime.generate([[1, 2, 3], [6]], greedy(6))] == [g.token_ids for g in expected]


def test_no_prompts_give_no_answers(k3: Runtime):
    assert k3.generate([], GREEDY) == []


def test_greedy_is_a_named_preset():
    assert GREEDY.temperature == 0
