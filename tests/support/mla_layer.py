"""One MLA layer built from a configuration, against its formula written out: what no operator golden can see."""

from __future__ import annotations

import math

import torch
from builtin_kernels import small_table

from k3port.model import config_file
from k3port.model.mla import MlaAttention
from k3port.model.params import ParamReader
from k3port.model.shapes import rank_dims
from k3port.ops.segment import make_segment
from k3port.testing.synthetic import tiny_k3_config

TOKENS = 5


def check_mla_layer(references: bool, decode: bool) -> None:
    """Latents with a mean square near 1e-6, so that the inner epsilon decides; scores of order one; gate; [k, v] rows."""
    config, dtype = config_file.parse_config(tiny_k3_config()), torch.float64
    assert config.mla is not None
    gen = torch.Generator().manual_seed(11)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen, dtype=dtype)

    heads, nope, rope, value, latent, rank, hidden = 4, 16, 8, 16, 32, 24, 64
    w_qa, w_kva, w_gate = randn(rank, hidden), randn(latent + rope, hidden), randn(heads * value, hidden)
    # Only the parts in front of a norm are faint: the others stay of order one.
    w_qa, w_kva[:latent] = w_qa * 1.2e-4, w_kva[:latent] * 1.2e-4
    w_kva[latent:] *= 0.2
    params = {
        "in_proj": torch.cat((w_qa, w_kva, w_gate * 0.2)),
        "q_a_norm": 1 + 0.2 * randn(rank),
        "q_b": randn(heads * (nope + rope), rank) * 0.2,
        "kv_a_norm": 1 + 0.2 * randn(latent),
        "kv_b": randn(heads * (nope + value), latent) * 0.2,
        "o_proj": randn(hidden, heads * value) * 0.1,
    }
    h = randn(TOKENS, hidden)

    # The formula, with every constant written out.
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * weight

    q_a, c, k_r, gate = (h @ params["in_proj"].T).split((rank, latent, rope, heads * value), dim=-1)
    assert 2e-7 < float(c.square().mean()) < 5e-6
    assert 2e-7 < float(q_a.square().mean()) < 5e-6
    q = (norm(q_a, params["q_a_norm"]) @ params["q_b"].T).view(TOKENS, heads, nope + rope)
    kv = (norm(c, params["kv_a_norm"]) @ params["kv_b"].T).view(TOKENS, heads, nope + value)
    expected = torch.empty(TOKENS, heads, value, dtype=dtype)
    for i in range(TOKENS):
        for head in range(heads):
            own = kv[: i + 1, head, :nope] @ q[i, head, :nope]
            shared = k_r[: i + 1] @ q[i, head, nope:]
            weights = torch.softmax((own + shared) / math.sqrt(24), dim=0)
            expected[i, head] = weights @ kv[: i + 1, head, nope:]
    expected = (expected.flatten(1) / (1 + torch.exp(-gate))) @ params["o_proj"].T

    table = small_table(config, dtype, references)
    pad = -params["in_proj"].shape[0] % 16
    padded = {**params, "in_proj": torch.cat((params["in_proj"], torch.zeros(pad, hidden, dtype=dtype)))}
    layer = MlaAttention(config.mla, rank_dims(config), ParamReader(padded), table)
    cache = torch.full((4, 2, latent + rope), 1e4, dtype=dtype)
    pages = [[3, 0, 2]]
    if decode:
        steps = [make_segment("decode", [1], [1], [t], pages, 2) for t in range(TOKENS)]
        y = torch.cat([layer(h[t : t + 1], cache, (steps[t],)) for t in range(TOKENS)])
    else:
        y = layer(h, cache, (make_segment("prefill", [TOKENS], [1], [0], pages, 2),))
    error = float((y - expected).norm() / expected.norm())
    assert error < 1e-13, f"relative error {error:.2e}"
