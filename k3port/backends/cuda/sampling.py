"""Sampling from FlashInfer."""

from __future__ import annotations

from k3port.backends.limits import AMPERE_AND_LATER
from k3port.oracle.spec import PRIORITY_PORTABLE, KernelSpec, Requires

KERNELS: tuple[KernelSpec, ...] = (
    KernelSpec(
        name="cuda.flashinfer_sample",
        op="sample",
        load="",
        doc="top_k_top_p_sampling_from_logits",
        requires=Requires(
            vendors=("nvidia",),
            archs=AMPERE_AND_LATER,
            packages=("flashinfer-python>=0.6",),
            runtime=("cuda>=12.0",),
        ),
        # Behind the portable kernel, which keeps the ids of seeded requests.
        priority=PRIORITY_PORTABLE - 10,
        # It draws from a generator of the whole batch, so a request's ids depend on its neighbours.
        deterministic=False,
        numerics="the same distribution as the reference, other random numbers: seeded requests give other ids",
        source="FlashInfer 0.7.4",
    ),
)
