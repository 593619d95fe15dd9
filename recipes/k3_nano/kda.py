"""Kimi Delta Attention: token recurrence, a chunked float32 form, and the call of the FLA Triton kernel.

Shapes: q, k, f ``[B, T, nh, D]``, v ``[B, T, nh, D]``, beta ``[B, T, nh]``, state ``[B, nh, D_value, D_key]``.
Source of the formulas: flash-linear-attention ``fla/ops/kda`` (recurrence and WY chunk form).
"""

from __future__ import annotations

import torch

LOWER_BOUND = -5.0
CHUNK = 16


def bounded_gate(f: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor) -> torch.Tensor:
    """Log decay ``L * sigmoid(exp(A_log) * (f + dt_bias))`` in float32, one A_log per head."""
    heads, dim = f.shape[-2:]
    z = f.float() + dt_bias.float().view(heads, dim)
    return LOWER_BOUND * torch.sigmoid(a_log.float()[:heads].exp().unsqueeze(-1) * z)


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last axis in float32 (the epsilon is added to the sum)."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrence(q, k, v, g, beta, state):
    """Reference, one token after the other. Inputs float32, q already scaled; returns o and the final state."""
    outputs = []
    for t in range(q.shape[1]):
        kt, qt = k[:, t], q[:, t]
        state = state * g[:, t].exp().unsqueeze(-2)
        read = torch.einsum("bhvk,bhk->bhv", state, kt)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - read)
        state = state + u.unsqueeze(-1) * kt.unsqueeze(-2)
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, qt))
    return torch.stack(outputs, dim=1), state


def chunked(q, k, v, g, beta, state):
    """The same as :func:`recurrence` in chunks of 16 tokens (WY form), float32.

    The cumulative log decay inside a chunk is anchored at its middle: with a gate bounded by -5 each exponent stays
    within 8 * 5 = 40, so e^40 times e^40 still fits float32.
    """
    tokens = q.shape[1]
    pad = -tokens % CHUNK
    if pad:
        q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)) for x in (q, k, v, g))
        beta = torch.nn.functional.pad(beta, (0, 0, 0, pad))

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, CHUNK)).transpose(2, 3)  # [B, n, nh, 16, ...]

    q, k, v, g, beta = split(q), split(k), split(v), split(g), split(beta)
    total = g.cumsum(-2)
    anchor = total[..., CHUNK // 2 - 1 : CHUNK // 2, :]
    k_up, k_down, q_up = k * (total - anchor).exp(), k * (anchor - total).exp(), q * (total - anchor).exp()
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril(-1)
    zero = torch.zeros((), device=q.device)
    inner = torch.where(lower, k_up @ k_down.mT, zero) * beta.unsqueeze(-1)
    attention = torch.where(lower | torch.eye(CHUNK, dtype=torch.bool, device=q.device), q_up @ k_down.mT, zero)
    k_read, q_read = k * total.exp(), q * total.exp()
    right = torch.cat((beta.unsqueeze(-1) * k_read, beta.unsqueeze(-1) * v), dim=-1)
    eye = torch.eye(CHUNK, device=q.device)
    w, u = torch.linalg.solve_triangular(inner + eye, right, upper=False, unitriangular=True).chunk(2, dim=-1)
    end = total[..., -1:, :]
    k_write = k * (end - total).exp()
    outputs = []
    for n in range(q.shape[1]):
        delta = u[:, n] - w[:, n] @ state.mT
        outputs.append(q_read[:, n] @ state.mT + attention[:, n] @ delta)
        state = state * end[:, n].exp() + delta.mT @ k_write[:, n]
    out = torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)
    return out[:, :tokens], state


def kda(q, k, v, f, beta_logits, a_log, dt_bias, state=None, mode: str = "chunk"):
    """Attention output ``[B, T, nh, D]`` (dtype of v) and the final state (``None`` on the training path).

    ``mode``: ``fla`` (Triton kernel, training), ``chunk`` or ``recurrent`` (float32 PyTorch).
    """
    if mode == "fla":
        from fla.ops.kda import chunk_kda

        out, _ = chunk_kda(
            q,
            k,
            v,
            f,
            beta_logits,
            A_log=a_log,
            dt_bias=dt_bias,
            scale=q.shape[-1] ** -0.5,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=LOWER_BOUND,
        )
        return out, None
    batch, tokens, heads, dim = q.shape
    if state is None:
        state = torch.zeros(batch, heads, v.shape[-1], dim, device=q.device)
    g = bounded_gate(f, a_log, dt_bias)
    run = chunked if mode == "chunk" and tokens > 1 else recurrence
    out, state = run(l2_normalise(q) * dim**-0.5, l2_normalise(k), v.float(), g, beta_logits.float().sigmoid(), state)
    return out.to(v.dtype), state
