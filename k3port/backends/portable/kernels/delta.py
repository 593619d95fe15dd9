"""One step of the delta rule on a tile of the state, for the kernels that take it token by token."""

from __future__ import annotations

import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import rounded


@triton.jit
def _add(a0, a1, a2, b0, b1, b2):  # type: ignore[no-untyped-def]
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def unit(x):  # type: ignore[no-untyped-def]
    """``x / sqrt(sum(x²) + 1e-6)``."""
    return x * tl.rsqrt(tl.sum(rounded(x * x), axis=0) + 1e-6)


@triton.jit
def unit_pair(q, k):  # type: ignore[no-untyped-def]
    """``q`` and ``k`` over ``sqrt(sum(x²) + 1e-6)``, and the product of the two.

    One reduction for three sums: across warps each costs two barriers.
    """
    qq, kk, kq = tl.reduce((rounded(q * q), rounded(k * k), rounded(k * q)), 0, _add)
    q_scale = tl.rsqrt(qq + 1e-6)
    k_scale = tl.rsqrt(kk + 1e-6)
    return q * q_scale, k * k_scale, kq * (q_scale * k_scale)


@triton.jit
def delta_step(s, q, k, kq, v, decay, beta):  # type: ignore[no-untyped-def]
    """One step on a float32 state tile ``[V, K]``: the next state, the output and the written row u.

    ``o = S' q`` with ``S' = S + u kᵀ`` is taken as ``S q + u kq``: both sums over the keys read the same tile.

    Args:
        kq: the product of k and q.
    """
    s *= decay[None, :]
    u = beta * (v - tl.sum(s * k[None, :], axis=1))
    o = tl.sum(s * q[None, :], axis=1) + u * kq
    return s + u[:, None] * k[None, :], o, u


@triton.jit
def delta_rows(s, q, k, kq, v, decay, beta, mine):  # type: ignore[no-untyped-def]
    """:func:`delta_step` of some rows of a head from all of its values.

    Each row takes its value out of ``v`` in the sum that it needs anyway: taken before, by rows, every lane of a warp
    would have to compute the values of all of the warp's rows.

    Args:
        mine: ``[V, K]``, where the number of the row is that of the column.
    """
    s *= decay[None, :]
    u = beta * tl.sum(tl.where(mine, v[None, :], 0.0) - s * k[None, :], axis=1)
    o = tl.sum(s * q[None, :], axis=1) + u * kq
    return s + u[:, None] * k[None, :], o, u
