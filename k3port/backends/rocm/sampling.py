"""Sampling from AITER."""

from __future__ import annotations

from k3port.backends.limits import TRITON_AMD
from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, Requires

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="rocm.aiter_sample",
        op="sample",
        load="",
        doc="aiter.ops.sampling.top_k_top_p_sampling_from_probs",
        requires=Requires(
            vendors=("amd",),
            archs=TRITON_AMD,
            packages=("amd-aiter>=0.1.20",),
            symbols=("aiter.ops.sampling:top_k_top_p_sampling_from_probs",),
        ),
        # Behind the portable kernel, which keeps the ids of seeded requests.
        priority=PRIORITY_PORTABLE - 10,
        # It has no generator per request, so a request's ids depend on its neighbours.
        deterministic=False,
        numerics="the same distribution as the reference, other random numbers: seeded requests give other ids",
        source="AITER e4048607 (2026-08-22)",
    ),
)
