"""A run on a GPU without one: a device made of labels, on which a tensor that was made on the host is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builtin_kernels import REGISTRY, reference_pins
from foreign_device import DEVICE, ForeignDevice, MixedDevicesError, foreign_copy, is_foreign
from one_thread import one_thread  # noqa: F401
from pretend_gpu import pretend_placement

from k3port.errors import CapacityError, CheckpointError, UsageError
from k3port.model.config_file import load_config
from k3port.model.step import Step
from k3port.ops.catalog import OPS
from k3port.ops.contract import map_tensors, mutated, relative_rms
from k3port.ops.moe_weights import keep_stored, stack_dense
from k3port.ops.quant import Mxfp4Tensor
from k3port.ops.segment import make_segment
from k3port.runtime import loader
from k3port.runtime.loader import load_weights
from k3port.runtime.placement import Placement
from k3port.runtime.preflight import check_checkpoint
from k3port.runtime.request import SamplingParams
from k3port.runtime.runtime import Runtime
from k3port.testing.harness import contract_samples, op_contracts

FOREIGN = Placement(DEVICE, on_host=False, name="labels")
PROMPTS = [list(range(3, 40)), [7, 9, 11]]
FOLDERS = ("tiny_k3_folder", "tiny_linear_folder")


def load(folder: Path, dtype: str, **options: Any) -> Runtime:
    pins = reference_pins(load_config(folder))
    common = {"kv_tokens": 512, "max_requests": 2, "threads": 1, "registry": REGISTRY, "prefill_chunk_tokens": 16}
    return Runtime.load(folder, dtype=dtype, kernels=pins, **{**common, **options})


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForeignDevice]:
    monkeypatch.setattr("k3port.runtime.runtime.open_placement", lambda device, needed=0: FOREIGN)
    with ForeignDevice() as mode:
        yield mode


def tensors(value: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    yield from found


# The label device itself.


def test_the_label_device_refuses_what_a_gpu_refuses() -> None:
    with ForeignDevice() as mode:
        there = torch.arange(6, device=DEVICE)
        assert there.device == DEVICE and torch.arange(6).device.type == "cpu"
        for part in (
            there[2:],
            there.view(2, 3).sum(0),
            torch.zeros_like(there),
            there.new_zeros(2),
            there.chunk(2)[1],
        ):
            assert is_foreign(part)
        assert is_foreign(there.view(2, 3).float().topk(2).values)
        for mixed in (
            lambda: there + torch.arange(6),
            lambda: there[torch.arange(6) > 2],
            lambda: torch.arange(6)[there],
            lambda: torch.cat((there, torch.zeros(1))),
            lambda: there.__setitem__(0, torch.tensor(1)),
            lambda: torch.where(there > 2, torch.tensor(1), there),
            lambda: torch.searchsorted(there, torch.tensor(2)),
        ):
            with pytest.raises(MixedDevicesError):
                mixed()
        back = there.cpu()
        assert not is_foreign(back) and is_foreign(there) and is_foreign(back.to(DEVICE))
        assert is_foreign(there.to(torch.float32)) and is_foreign(there.copy_(back))
        assert (there.tolist(), mode.waits["tolist"], mode.waits["cpu"]) == (list(range(6)), 1, 1)


# The whole model.


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_makes_no_tensor_on_the_host(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, labels: ForeignDevice, folder: str, dtype: str
) -> None:
    place: Path = request.getfixturevalue(folder)
    there = load(place, dtype)
    held = [*there.weights.params.values(), *there.pools.states.layers.values(), *there.pools.pages.layers.values()]
    assert all(is_foreign(tensor) for value in held for tensor in tensors(value))
    assert there.weights.mapped_bytes == 0
    chunked = there.logits(PROMPTS[0], chunk_tokens=5)
    assert chunked.device == DEVICE
    greedy = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=6, temperature=0.9, top_k=50, top_p=0.9, min_p=0.01, seed=3, ignore_eos=True)
    answers = [there.generate(PROMPTS, params) for params in (greedy, drawn)]
    monkeypatch.undo()
    here = load(place, dtype)
    assert torch.equal(chunked.cpu(), here.logits(PROMPTS[0], chunk_tokens=5).cpu())
    for params, given in zip((greedy, drawn), answers, strict=True):
        assert [g.token_ids for g in given] == [g.token_ids for g in here.generate(PROMPTS, params)]


def test_a_number_that_is_not_finite_is_found_there_too(tiny_k3_folder: Path, labels: ForeignDevice) -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.float() @ weight.float().T) * torch.nan

    runtime = load(tiny_k3_folder, "float32", overrides={"logits": broken})
    (answer,) = runtime.generate([PROMPTS[1]], SamplingParams(max_tokens=3))
    assert (answer.finish_reason, answer.token_ids) == ("error", ())
    assert "first in op logits" in answer.error


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("all_reduce", "all_gather")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_make_no_tensor_on_the_host(op: str, dtype: torch.dtype) -> None:
    """All samples of the contract: forms of the op that the small models do not use."""
    for contract in op_contracts(op):
        for sample in contract_samples(contract, dtype):
            plain = map_tensors(dict(sample.args), torch.Tensor.clone)
            expected = contract.reference(**plain)
            args = map_tensors(dict(sample.args), foreign_copy)
            with ForeignDevice():
                result = contract.reference(**args)
            for mine, theirs in zip(tensors([result]), tensors([expected]), strict=True):
                assert is_foreign(mine), sample.name
                assert torch.equal(mine.nan_to_num(), theirs.nan_to_num()), sample.name
            theirs = mutated(contract, plain)
            for path, mine in mutated(contract, args).items():
                assert torch.equal(mine.nan_to_num(), theirs[path].nan_to_num()), sample.name


# Steps.


def a_step() -> Step:
    decode = make_segment("decode", [1, 1], [2, 0], [5, 0], [[3], []], start=0)
    prefill = make_segment("prefill", [3], [1], [0], [[1, 4]], start=2)
    return Step(torch.arange(5), (decode, prefill), torch.tensor([0, 4]))


def test_a_step_goes_over_in_one_transfer(labels: ForeignDevice) -> None:
    step, more = a_step(), (torch.rand(2, dtype=torch.float64), torch.tensor([], dtype=torch.int64))
    placed, extra = FOREIGN.step(step, *more)
    assert sum(labels.waits.values()) == 0
    for mine, theirs in zip(tensors([placed, extra]), tensors([step, more]), strict=True):
        assert is_foreign(mine) and mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.equal(mine.cpu(), theirs)
        assert mine.data_ptr() % 16 == 0 or not mine.numel()
        assert mine.is_contiguous()
    assert [s.phase for s in placed.segments] == ["decode", "prefill"]
    assert placed.segments[1].pages == ((1, 4),) and placed.segments[0].has_padding


def test_on_the_host_a_step_stays_as_it_is() -> None:
    step = a_step()
    here = pretend_placement("cpu")
    assert here.step(step) == (step, ())
    assert (here.peak_bytes(), here.used_bytes()) == (None, None)
    here.release()


def test_a_decode_step_waits_once_for_its_answer(tiny_k3_folder: Path, labels: ForeignDevice) -> None:
    """The runtime's own share: with kernels that do not wait, a step would wait for its answer and nothing else."""
    runtime = load(tiny_k3_folder, "float32", overrides={"sample": lambda logits, p, u: logits.argmax(-1)})
    real = runtime.model.forward
    vocab = runtime.config.vocab_size
    runtime.model.forward = lambda step, state: torch.zeros(  # type: ignore[method-assign]
        step.logit_rows.shape[0], vocab, device=step.token_ids.device
    )
    labels.waits.clear()
    runtime.generate([PROMPTS[1]], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert dict(labels.waits) == {"tolist": 5}
    runtime.model.forward = real  # type: ignore[method-assign]


# Weights.


@pytest.mark.parametrize("folder", FOLDERS)
def test_copied_weights_are_the_mapped_ones(request: pytest.FixtureRequest, folder: str) -> None:
    checkpoint = check_checkpoint(request.getfixturevalue(folder))
    for dtype in (torch.float32, torch.bfloat16):
        for pack in (keep_stored, stack_dense):
            here = load_weights(checkpoint, dtype=dtype, pack_experts=pack)
            there = load_weights(checkpoint, dtype=dtype, pack_experts=pack, placement=pretend_placement("cuda:0"))
            assert there.bytes_by_kind == here.bytes_by_kind
            assert (there.mapped_bytes, there.notes) == (0, here.notes)
            assert there.params.keys() == here.params.keys()
            for name, value in here.params.items():
                for mine, theirs in zip(tensors(there.params[name]), tensors(value), strict=True):
                    assert torch.equal(mine, theirs), name


def test_experts_of_a_layer_lie_in_one_piece(tiny_k3_folder: Path) -> None:
    checkpoint = check_checkpoint(tiny_k3_folder)
    weights = load_weights(
        checkpoint, dtype=torch.bfloat16, pack_experts=keep_stored, placement=pretend_placement("cuda:0")
    )
    (first, *_) = [value for name, value in weights.params.items() if name.endswith("moe.experts")]
    gate = first.gate  # type: ignore[attr-defined]
    assert all(isinstance(matrix, Mxfp4Tensor) for matrix in gate)
    storages = {matrix.packed.untyped_storage().data_ptr() for matrix in gate}
    assert len(storages) == 1


def test_scales_that_are_nan_are_refused_before_they_are_copied(
    tiny_k3_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = check_checkpoint(tiny_k3_folder)
    weights = load_weights(checkpoint, dtype=torch.float32, pack_experts=keep_stored)
    (experts, *_) = [value for name, value in weights.params.items() if name.endswith("moe.experts")]
    some_byte = int(experts.down[2].scale[0, 0])  # type: ignore[attr-defined]
    monkeypatch.setattr(loader, "SCALE_NAN", some_byte)
    load_weights(checkpoint, dtype=torch.float32, pack_experts=keep_stored)
    with pytest.raises(CheckpointError, match="values that are no numbers"):
        load_weights(checkpoint, dtype=torch.float32, pack_experts=keep_stored, placement=pretend_placement("cuda:0"))


def test_a_full_gpu_is_one_clear_error(tiny_k3_folder: Path) -> None:
    def full(stored: Any, dtype: torch.dtype) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore lines")

    with pytest.raises(CapacityError, match="do not fit into the GPU's memory: layer 1 of") as caught:
        load_weights(check_checkpoint(tiny_k3_folder), dtype=torch.float32, pack_experts=full)
    assert caught.value.reasons == ("CUDA out of memory. Tried to allocate 2.00 GiB",)


# Closing.


def test_a_closed_runtime_holds_no_memory_and_says_so(tiny_k3_folder: Path) -> None:
    import gc
    import weakref

    with load(tiny_k3_folder, "float32") as runtime:
        before = runtime.logits([1, 2, 3])
        kept = [weakref.ref(t) for t in tensors(dict(runtime.weights.params))]
        kept += [weakref.ref(t) for t in runtime.pools.pages.layers.values()]
        stream = runtime.stream([[1, 2]], SamplingParams(max_tokens=9, ignore_eos=True))
        next(stream)
        assert all(ref() is not None for ref in kept)
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []
    assert torch.isfinite(before).all()
    for use in (
        lambda: runtime.logits([1]),
        lambda: runtime.generate("x"),
        lambda: runtime.forced(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)),
        lambda: next(stream),
    ):
        with pytest.raises(UsageError, match="the runtime is closed"):
            use()
    runtime.close()


def test_forced_runtimes_share_the_weights(tiny_k3_folder: Path) -> None:
    runtime = load(tiny_k3_folder, "float32")
    config = runtime.config
    assert config.moe is not None
    layers = sum(config.is_moe(layer) for layer in range(config.num_layers))
    ids = torch.arange(config.moe.top_k).expand(layers, 3, -1)
    weights = torch.full(ids.shape, 0.5)
    expected = runtime.forced(ids, weights).logits([1, 2, 3])
    other = runtime.forced(ids, weights)
    runtime.close()
    assert relative_rms(other.logits([1, 2, 3]), expected) == 0
