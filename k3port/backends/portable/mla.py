"""Latent attention in Triton: append, expanded prefill, absorbed decode."""

from __future__ import annotations

from k3port.backends.limits import readable_cache, step_tokens
from k3port.backends.portable.base import CACHE, triton_kernel
from k3port.oracle.spec import OpQuery

_SPLITS = 32
"""Parts of a long cache that one request's decode is spread over at most."""


def decode_workspace(query: OpQuery) -> int:
    """Partial outputs and log-sum-exps in float32 for every split."""
    axes = query.axes
    return step_tokens(query) * axes.get("H", 1) * _SPLITS * (axes.get("C", 512) + 1) * 4


KERNELS = (
    triton_kernel(
        "mla_append", "mla_append", "norm and write of latents in one pass", layouts=CACHE, check=readable_cache
    ),
    triton_kernel(
        "mla_attend_expanded",
        "mla_attend",
        "causal attention on keys and values expanded from the paged latents",
        phases=("prefill",),
        layouts=CACHE,
        check=readable_cache,
        numerics="an fp8 cache is expanded to the activation dtype before the products",
    ),
    triton_kernel(
        "mla_attend_absorbed",
        "mla_attend",
        "split-cache attention in latent space, any head count",
        phases=("decode",),
        layouts=CACHE,
        check=readable_cache,
        workspace_bytes=decode_workspace,
        numerics="an fp8 cache is expanded as it is read; queries are not rounded",
    ),
)
