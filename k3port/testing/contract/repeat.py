"""One kernel, the same call twice: a record that says ``deterministic`` promises the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from k3port.ops.contract import Contract, Sample, cloned, mutated
from k3port.oracle.spec import KernelSpec
from k3port.runtime.binding import load_kernel
from k3port.testing.contract.measure import same_bits
from k3port.testing.contract.reference import as_tuple, build_kernel, sample_phase
from k3port.testing.contract.variants import moved


def repeat_faults(
    spec: KernelSpec,
    contract: Contract,
    sample: Sample,
    dtype: torch.dtype,
    kernels: Iterable[KernelSpec],
    *,
    device: str = "cpu",
) -> tuple[str, ...]:
    """Calls a kernel twice with equal arguments; a sentence for each output and updated argument that differs."""
    function = build_kernel(spec, kernels, sample_phase(contract, sample))
    args = dict(sample.args)
    if spec.pack:
        args |= {name: load_kernel(spec, spec.pack)(cloned(args[name]), dtype) for name in contract.packed}
    found: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        own = cloned(moved(args, device))
        try:
            outputs = as_tuple(function(**own))
        except Exception as exc:
            return (f"called once more, it raised {type(exc).__name__}: {exc}",)
        # Copies: a kernel may give the same memory again.
        values = dict(zip(contract.outputs, outputs, strict=False))
        values |= mutated(contract, own)
        found.append({name: value.detach().cpu().clone() for name, value in values.items()})
    first, second = found
    return tuple(
        f"{name} differs between two equal calls, and its record says deterministic"
        for name, value in first.items()
        if not same_bits(value, second[name])
    )
