"""The contract harness must see every kind of fault: otherwise its green says nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from k3port.ops.catalog import OPS
from k3port.ops.contract import DEFAULT_TOLERANCE, Contract, Cost, Invariant, Sample
from k3port.ops.segment import Segment, make_segment
from k3port.oracle.spec import KernelSpec
from k3port.plugins import make_registry
from k3port.testing.harness import (
    build_kernel,
    check_invariant,
    check_sample,
    contract_samples,
    expect,
    op_contracts,
    poisoned_memory,
    sample_phase,
    sample_query,
    sealed_table,
)

KERNELS = make_registry(entry_points=False).kernels
Fault = Callable[..., Any]


def scale_add(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * weight``, and the count of rows; the rows of ``store`` that have one in ``x`` are overwritten."""
    y = x * weight
    store[: x.shape[0]] = y.to(store.dtype)
    return y, torch.full((1,), x.shape[0], dtype=torch.int64)


def _samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    args = {
        "x": torch.randn(5, 64, generator=gen).to(dtype),
        "weight": torch.randn(64, generator=gen).to(dtype),
        "store": torch.full((8, 64), 1e4).to(dtype),
    }
    yield Sample("five rows", args)


CONTRACT = Contract(
    op="linear",
    inputs={"x": "T D", "weight": "D", "store": "S D"},
    outputs={"y": "T D", "count": "1"},
    mutates=("store",),
    reference=scale_add,
    samples=_samples,
    cost=lambda axes, itemsize: Cost(1, 1),
)


def correct(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y = torch.empty_like(x)
    torch.mul(x, weight, out=y)
    store[:5] = y
    return y, torch.tensor([5])


def wrong_by_a_little(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight * 1.02, store)
    store[:5] = x * weight
    return y, count


def one_wrong_element(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight, store)
    y[3, 7] += 0.05 * y.abs().max()
    return y, count


def unwritten(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight, store)
    partial = x.new_empty(x.shape)
    partial[:4] = y[:4]
    return partial, count


def unwritten_integers(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, _ = correct(x, weight, store)
    return y, torch.empty(1, dtype=torch.int64)


def wrong_integer(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight, store)
    return y, count + 1


def changes_an_input(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    result = correct(x, weight, store)
    weight[0] = 0
    return result


def writes_beside_an_input(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    result = correct(x, weight, store)
    weight.as_strided((1,), (1,), weight.storage_offset() + weight.numel()).fill_(7)
    return result


def gives_nan(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight, store)
    y[0, 0] = torch.nan
    return y, count


def gives_infinity(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight, store)
    y[0, 0] = torch.inf
    return y, count


def wrong_store(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    """The error is far below the RMS of the store, whose other rows hold 1e4."""
    result = correct(x, weight, store)
    store[2, 3] += 0.5
    return result


def touches_other_rows(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    result = correct(x, weight, store)
    store[7, 0] = 10001
    return result


def wrong_shape(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight, store)
    return y[:4], count


def wrong_dtype(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    y, count = correct(x, weight, store)
    return y.double(), count


def one_output(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    return correct(x, weight, store)[0]


def ignores_strides(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
    """Reads the rows as if they lay one behind the other."""
    dense = torch.as_strided(x, x.shape, (x.shape[1], 1), x.storage_offset())
    return correct(dense.nan_to_num(), weight, store)


MODULE = ModuleType("harness_kernels")
MODULE.__dict__.update({name: value for name, value in list(globals().items()) if callable(value)})


@pytest.fixture(autouse=True)
def planted_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)


def spec(name: str, **fields: Any) -> KernelSpec:
    return KernelSpec(f"test.{name}", "linear", f"harness_kernels:{name}", "planted", **fields)


def report(name: str, dtype: torch.dtype = torch.float32, strided: bool = False) -> Any:
    sample = contract_samples(CONTRACT, dtype)[0]
    return check_sample(spec(name), CONTRACT, sample, dtype, KERNELS, variant="strided" if strided else "plain")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_a_correct_kernel_passes(dtype: torch.dtype, strided: bool) -> None:
    result = report("correct", dtype, strided)
    result.check()
    assert result.ok
    assert [o.name for o in result.outputs] == ["y", "count", "store"]
    assert all(o.ok and o.relative_rms <= o.tolerance for o in result.outputs)
    assert (result.kernel, result.op, result.phase) == ("test.correct", "linear", None)
    assert result.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        ("wrong_by_a_little", "y: relative RMS error 2.00e-02"),
        ("one_wrong_element", "y: relative RMS error"),
        ("unwritten", "y: 64 of 320 numbers were never written"),
        ("unwritten_integers", "count: 1 of 1 numbers differ"),
        ("wrong_integer", "count: 1 of 1 numbers differ"),
        ("changes_an_input", "weight was changed"),
        ("writes_beside_an_input", "weight: 1 elements outside it were overwritten, the first one 1 after its last"),
        ("gives_nan", "y: 1 of 320 numbers are not finite"),
        ("gives_infinity", "y: 1 of 320 numbers are not finite"),
        ("wrong_store", "store: relative RMS error"),
        ("touches_other_rows", "store: rows that the op must not touch changed"),
        ("wrong_shape", "y is (4, 64) torch.float32, expected (5, 64) torch.float32"),
        ("wrong_dtype", "y is (5, 64) torch.float64, expected (5, 64) torch.float32"),
        ("one_output", "1 outputs, the contract has ['y', 'count']"),
    ],
)
def test_a_planted_fault_is_seen(kernel: str, fault: str) -> None:
    result = report(kernel)
    assert not result.ok
    assert any(f.startswith(fault) for f in result.faults), result.faults
    assert len(result.faults) == 1, "one fault, one sentence"
    with pytest.raises(AssertionError, match=f"test.{kernel}, float32, sample 'five rows'"):
        result.check()


@pytest.mark.parametrize("kernel", ["wrong_by_a_little", "one_wrong_element", "unwritten", "wrong_store"])
def test_bfloat16_tolerances_still_see_it(kernel: str) -> None:
    assert not report(kernel, torch.bfloat16).ok


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("factor", "ok"), [(0.5, True), (2.0, False)])
@pytest.mark.parametrize("output", ["y", "store"])
def test_the_bound_lies_between_half_and_twice_the_tolerance(
    dtype: torch.dtype, factor: float, ok: bool, output: str
) -> None:
    def off(x: torch.Tensor, weight: torch.Tensor, store: torch.Tensor) -> Any:
        y, count = correct(x, weight, store)
        wrong = (x.double() * weight.double() * (1 + factor * DEFAULT_TOLERANCE[dtype])).to(dtype)
        if output == "y":
            return wrong, count
        store[:5] = wrong
        return y, count

    MODULE.__dict__["off"] = off
    result = report("off", dtype)
    assert result.ok == ok, result.outputs
    assert all(fault.startswith(f"{output}: relative RMS error") for fault in result.faults)


def test_a_kernel_that_ignores_strides_fails_only_on_strided_rows() -> None:
    assert report("ignores_strides").ok
    assert not report("ignores_strides", strided=True).ok


def test_a_reference_that_goes_through_a_table_is_refused() -> None:
    from k3port.ops.table import OpTable

    table = OpTable({"linear": lambda x, weight, store: scale_add(x, weight, store)})
    contract = Contract(**{**vars(CONTRACT), "reference": lambda x, weight, store: table.linear(x, weight, store)})
    with pytest.raises(AssertionError, match="table was read"):
        expect(contract, contract_samples(contract, torch.float32)[0], torch.float32)
    with sealed_table(), pytest.raises(AssertionError, match="table was read"):
        _ = table.linear
    assert table.linear is not None


def test_the_float64_reference_leaves_the_sample_alone() -> None:
    sample = contract_samples(CONTRACT, torch.float64)[0]
    before = sample.args["store"].clone()
    expect(CONTRACT, sample, torch.float64)
    assert torch.equal(sample.args["store"], before)


def test_memory_is_poisoned_and_restored() -> None:
    with poisoned_memory():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(2)).isnan().all()
        assert torch.ones(2).new_empty(4).isnan().all()
        assert torch.empty_strided((2,), (1,)).isnan().all()
        assert (torch.empty(2, dtype=torch.int32) == 2**31 - 1).all()
        assert torch.empty(2, dtype=torch.bool).shape == (2,)
    assert torch.empty.__name__ == "empty"
    assert torch.Tensor.new_empty.__name__ == "new_empty"


def test_invariants_send_other_phases_to_the_reference() -> None:
    calls: list[str] = []

    def reference(x: torch.Tensor, segment: Segment) -> torch.Tensor:
        calls.append(f"reference {segment.phase}")
        return x

    def check(function: Callable[..., Any], dtype: torch.dtype, gen: torch.Generator) -> None:
        for phase in ("prefill", "decode"):
            assert function(torch.ones(1), segment=make_segment(phase, [1], [1])).sum() == 1

    inputs = {"x": "T", "segment": ""}
    contract = Contract(**{**vars(CONTRACT), "inputs": inputs, "reference": reference})
    MODULE.__dict__["step"] = lambda x, segment: calls.append(f"kernel {segment.phase}") or x
    MODULE.__dict__["broken"] = lambda x, segment: x * 2
    invariant = Invariant("phases", check)
    assert check_invariant(spec("step", phases=("decode",)), contract, invariant, torch.float32, KERNELS)
    assert calls == ["reference prefill", "kernel decode"]
    with pytest.raises(AssertionError):
        check_invariant(spec("broken"), contract, invariant, torch.float32, KERNELS)
    only_prefill = Invariant("prefill", lambda f, d, g: f(torch.ones(1), make_segment("prefill", [1], [1])))
    assert not check_invariant(spec("step", phases=("decode",)), contract, only_prefill, torch.float32, KERNELS)


def test_composites_are_built_from_reference_parts() -> None:
    names: dict[str, str] = {}

    def factory(**parts: Any) -> Any:
        names.update({part: function.__module__ for part, function in parts.items()})
        return lambda: None

    MODULE.__dict__["factory"] = factory
    composite = KernelSpec("test.kda", "kda", "harness_kernels:factory", "", parts=OPS["kda"].parts)
    build_kernel(composite, KERNELS, "decode")
    assert set(names) == {"short_conv", "kda_core", "gated_norm"}
    assert all(module.startswith("k3port.ops.") for module in names.values())


def test_queries_describe_the_sample() -> None:
    (experts,) = op_contracts("moe_experts")
    sample = contract_samples(experts, torch.bfloat16)[0]
    query = sample_query(experts, sample, torch.bfloat16)
    assert (query.op, query.phase, query.dtype, query.weight_format) == ("moe_experts", None, "bfloat16", "mxfp4")
    assert query.axes == {"T": 1, "L": 64, "X": 3, "E": 6, "I": 96}
    decode = op_contracts("mla_attend")[1]
    assert sample_phase(decode, contract_samples(decode, torch.float32)[0]) == "decode"
    assert decode.tolerance[torch.float32] < 10 * DEFAULT_TOLERANCE[torch.float32]
