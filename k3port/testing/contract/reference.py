"""What a contract says about one call: its samples, the oracle's query for it, and the reference's answer."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from k3port.ops.catalog import OPS, Phase
from k3port.ops.contract import Contract, Sample, cloned, mutated, resolve_path, upcast
from k3port.ops.kda_state import KdaParams
from k3port.ops.moe import RouterParams
from k3port.ops.moe_weights import StoredExperts
from k3port.ops.table import OpTable
from k3port.oracle.spec import KernelSpec, OpQuery
from k3port.runtime.binding import load_kernel
from k3port.testing.contract.measure import plain_error

Op = Callable[..., Any]

DTYPES: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SEED = 20260


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Expected:
    """The reference's answer in float64, and what the sample's own dtype makes of it.

    Attributes:
        forms: shape and dtype of each output in the sample's dtype.
        plain: error of the reference in that dtype, by name of output or updated argument.
    """

    outputs: tuple[torch.Tensor, ...]
    updated: Mapping[str, torch.Tensor]
    forms: tuple[tuple[torch.Size, torch.dtype], ...]
    plain: Mapping[str, float]


def op_contracts(op: str) -> tuple[Contract, ...]:
    """The contracts of an op: one, or one per phase."""
    paths = (path.partition(":") for path in OPS[op].contracts)
    return tuple(getattr(importlib.import_module(module), name) for module, _, name in paths)


def contract_samples(contract: Contract, dtype: torch.dtype) -> list[Sample]:
    """All samples with their usual random numbers; in float64 every floating tensor is float64."""
    samples = contract.samples(dtype, torch.Generator().manual_seed(SEED))
    if dtype != torch.float64:
        return list(samples)
    return [dataclasses.replace(s, args=upcast(s.args)) for s in samples]


def sample_phase(contract: Contract, sample: Sample) -> Phase | None:
    """The phase that a sample belongs to; None for ops without phases."""
    if not OPS[contract.op].phased:
        return None
    return contract.phase or sample.args["segment"].phase


_STATE_FIELDS = {"kda_core": "state", "kda": "state.recurrent", "kda_commit": "state.recurrent"}
"""Where an op keeps the recurrent state; its dtype is chosen apart from that of the activations."""


def sample_query(contract: Contract, sample: Sample, dtype: torch.dtype) -> OpQuery:
    """What the oracle would be asked for a call like this sample."""
    axes: dict[str, int] = {}
    weight_format = ""
    for name, spec in contract.inputs.items():
        value, names = sample.args[name], spec.split()
        if isinstance(value, torch.Tensor) and len(names) == value.dim():
            axes |= {axis: size for axis, size in zip(names, value.shape, strict=True) if axis.isidentifier()}
        elif isinstance(value, StoredExperts):
            axes |= {"E": value.num_experts, "I": value.width, "L": value.latent}
            weight_format = "mxfp4" if value.is_mxfp4 else "bfloat16"
        elif isinstance(value, RouterParams):
            axes |= {"E": value.weight.shape[0], "X": value.top_k}
        elif isinstance(value, KdaParams):
            axes["bounded"] = int(value.lower_bound is not None)
    if "lower_bound" in sample.args:
        axes["bounded"] = int(sample.args["lower_bound"] is not None)
    if contract.op == "situ_mul":
        axes["I"] = sample.args["gate_up"].shape[-1] // 2
    state = _STATE_FIELDS.get(contract.op)
    state_dtype = ""
    if state is not None and dtype != torch.float64:
        state_dtype = dtype_name(resolve_path(sample.args, state).dtype)
    segment = sample.args.get("segment")
    longest = max(segment.lengths, default=1) if segment is not None and segment.phase == "decode" else 1
    return OpQuery(
        contract.op,
        sample_phase(contract, sample),
        axes,
        dtype_name(dtype),
        weight_format,
        state_dtype=state_dtype,
        query_tokens=max(longest, 1),
    )


def fitted(contract: Contract, sample: Sample, spec: KernelSpec) -> Sample:
    """The sample with the recurrent state in a dtype that the kernel keeps; the same sample where it takes this one."""
    path, allowed = _STATE_FIELDS.get(contract.op), spec.requires.state_dtypes
    if path is None or not allowed:
        return sample
    state = resolve_path(sample.args, path)
    if state.dtype == torch.float64 or dtype_name(state.dtype) in allowed:
        return sample
    narrow = state.to(getattr(torch, allowed[0]))
    head, _, field = path.partition(".")
    value = dataclasses.replace(sample.args[head], **{field: narrow}) if field else narrow
    return dataclasses.replace(sample, args={**sample.args, head: value})


def build_kernel(spec: KernelSpec, kernels: Iterable[KernelSpec], phase: Phase | None = None) -> Op:
    """Imports a kernel; a composite is built from the reference kernels of its parts.

    Args:
        kernels: where the parts are looked up.
    """
    function = load_kernel(spec)
    if not spec.parts:
        return function
    phase = phase or (spec.phases[0] if spec.phases else None)
    known = tuple(kernels)

    def reference(part: str) -> KernelSpec:
        wanted = phase if OPS[part].phased else None
        found = (k for k in known if k.op == part and k.is_reference)
        return next(k for k in found if wanted is None or not k.phases or wanted in k.phases)

    return function(**{part: build_kernel(reference(part), known, phase) for part in spec.parts})


@contextmanager
def sealed_table() -> Iterator[None]:
    """Reading any slot of any table raises: a reference must not go through dispatch."""

    def refuse(self: OpTable, name: str) -> Any:
        raise AssertionError(f"the ops table was read ({name})")

    with mock.patch.object(OpTable, "__getattribute__", refuse):
        yield


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    """The outputs of an op that returns nothing, one tensor, or several."""
    return () if result is None else tuple(result) if isinstance(result, tuple | list) else (result,)


def expect(contract: Contract, sample: Sample, dtype: torch.dtype) -> Expected:
    """Runs the reference on the CPU, in float64 for the numbers and in ``dtype`` for shapes, types and plain errors."""
    narrow_args = cloned(sample.args)
    with sealed_table():
        wide = upcast(sample.args)
        outputs = as_tuple(contract.reference(**wide))
        narrow = as_tuple(contract.reference(**narrow_args))
    updated, in_dtype = mutated(contract, wide), mutated(contract, narrow_args)
    plain = {n: plain_error(a, b) for n, a, b in zip(contract.outputs, narrow, outputs, strict=False)}
    plain |= {path: plain_error(in_dtype[path], wanted) for path, wanted in updated.items()}
    return Expected(outputs, updated, tuple((t.shape, t.dtype) for t in narrow), plain)
