"""Trainable k3-nano: the text backbone of Kimi K3 at toy size, in plain PyTorch.

Parameter names are checkpoint names without the ``language_model.`` prefix, except that routed experts are stacked:
``...block_sparse_moe.experts.w1`` is ``[E, I, L]`` (w2 ``[E, L, I]``), which the exporter splits.
Notation in shapes: B batch, T tokens, H hidden, P = heads * 128, E experts, I expert width, L latent width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from kda import kda
from mxfp4 import straight_through

State = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are k3-nano itself."""

    vocab: int = 4096
    hidden: int = 192
    layers: int = 7
    kda_layers: tuple[int, ...] = (1, 2, 3, 5, 6)  # 1-based
    heads: int = 4
    head_dim: int = 128
    conv: int = 4
    q_rank: int = 96
    kv_rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    dense: int = 768
    experts: int = 24
    top_k: int = 4
    expert_width: int = 128
    latent: int = 128
    shared: int = 2
    block: int = 3
    eps: float = 1e-5
    eps_mla: float = 1e-6
    beta: float = 4.0
    linear_beta: float = 25.0


@dataclass
class Run:
    """How to compute: KDA mode, fake quantisation of experts, experts one by one, activation dtype, compiled pieces."""

    mode: str = "chunk"
    quantise: bool = False
    sparse: bool = False
    dtype: torch.dtype = torch.float32
    compiled: dict[str, Callable] = field(default_factory=dict)

    def call(self, function: Callable, *args):
        """Run ``function`` or its compiled twin."""
        return self.compiled.get(function.__name__, function)(*args)


def compile_pieces(run: Run, skip: tuple[str, ...] = ()) -> None:
    """``torch.compile`` of the pieces between the KDA kernels: small graphs that layers share."""
    torch._dynamo.config.cache_size_limit = 64
    for function in (rms_norm, mix_norm, kda_inputs, kda_output, mla_train, mlp, moe, head_loss, quantise_experts):
        if function.__name__ not in skip:
            run.compiled[function.__name__] = torch.compile(function, dynamic=False)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` with the weight cast to the activation dtype."""
    return F.linear(x, weight.to(x.dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm: float32 statistics, normalised value rounded to x.dtype, then times the weight."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * weight.to(x.dtype)


def mix_norm(sources: tuple[torch.Tensor, ...], gamma, proj, weight, eps: float) -> torch.Tensor:
    """Attention Residuals over ``sources`` (each ``[B, T, H]``, the last is the running sum), then RMSNorm."""
    scale = gamma.float() * proj.float()[0]
    values = [s.float() for s in sources]
    scores = [(v * scale).sum(-1) * torch.rsqrt(v.square().mean(-1) + eps) for v in values]
    # Written out: Inductor (torch 2.11, CUDA) loses the gradient of stack -> softmax -> unbind.
    top = scores[0].detach()
    for score in scores[1:]:
        top = torch.maximum(top, score.detach())
    parts = [torch.exp(score - top) for score in scores]
    total = sum(parts)
    mixed = sum((part / total).unsqueeze(-1) * v for part, v in zip(parts, values, strict=True))
    return rms_norm(mixed.to(sources[-1].dtype), weight, eps)


def short_conv(x: torch.Tensor, taps: torch.Tensor, tail: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution of width W and SiLU: x ``[B, T, P]``, taps ``[P, 1, W]``, tail ``[B, W-1, P]``."""
    full = torch.cat((tail, x), dim=1).float()
    width, tokens = taps.shape[-1], x.shape[1]
    y = sum(taps[:, 0, j].float() * full[:, j : j + tokens] for j in range(width))
    return F.silu(y).to(x.dtype)


def kda_inputs(h, wq, wk, wv, cq, ck, cv, fa, fb, wb, wg, tail_q, tail_k, tail_v):
    """Projections and convolutions of a KDA layer; also the raw streams that the convolution caches keep."""
    raw = linear(h, wq), linear(h, wk), linear(h, wv)
    q, k, v = (short_conv(x, c, t) for x, c, t in zip(raw, (cq, ck, cv), (tail_q, tail_k, tail_v), strict=True))
    f = linear(linear(h, fa), fb)
    return q, k, v, f, linear(h, wb), linear(h, wg), raw


def kda_output(o, gate, norm, weight, eps: float):
    """Per-head RMSNorm (float32 weight ``[D]``) times sigmoid gate, then the output projection."""
    y = o.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * norm.float()
    y = y.flatten(-2) * torch.sigmoid(gate.float())
    return linear(y.to(o.dtype), weight)


def mla_project(h, qa, qan, qb, kva, kvan, rank: int, eps: float):
    """Queries ``[B, T, nh * 192]`` and the cache row ``[B, T, 512 + 64]`` (normalised latent, shared key part)."""
    q = linear(rms_norm(linear(h, qa), qan, eps), qb)
    latent = linear(h, kva)
    return q, torch.cat((rms_norm(latent[..., :rank], kvan, eps), latent[..., rank:]), dim=-1)


def mla_attend(h, q, cache, kvb, wg, wo, heads: int, nope: int, value: int, rank: int):
    """Expanded attention of the last T positions over all cached ones, gate and output projection."""
    batch, tokens = h.shape[:2]
    kv = linear(cache[..., :rank], kvb).view(batch, -1, heads, nope + value)
    shared = cache[..., None, rank:].expand(-1, -1, heads, -1)
    k = torch.cat((kv[..., :nope], shared), dim=-1).transpose(1, 2)
    q = q.view(batch, tokens, heads, -1).transpose(1, 2)
    v = F.pad(kv[..., nope:], (0, q.shape[-1] - value)).transpose(1, 2)
    if tokens == k.shape[2]:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mask = torch.ones(tokens, k.shape[2], dtype=torch.bool, device=h.device).tril(k.shape[2] - tokens)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    o = o[..., :value].transpose(1, 2).flatten(-2)
    return linear(o * torch.sigmoid(linear(h, wg)), wo)


def mla_train(h, qa, qan, qb, kva, kvan, kvb, wg, wo, heads, nope, value, rank, eps):
    """Whole MLA layer without cache."""
    q, cache = mla_project(h, qa, qan, qb, kva, kvan, rank, eps)
    return mla_attend(h, q, cache, kvb, wg, wo, heads, nope, value, rank)


def situ(a: torch.Tensor, b: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """SiTU-GLU ``beta tanh(a/beta) sigmoid(a) * lambda tanh(b/lambda)`` in float32, rounded to the input dtype."""
    x, y = a.float(), b.float()
    return (beta * torch.tanh(x / beta) * torch.sigmoid(x) * (linear_beta * torch.tanh(y / linear_beta))).to(a.dtype)


def mlp(h, gate, up, down, beta: float, linear_beta: float):
    """Dense MLP."""
    return linear(situ(linear(h, gate), linear(h, up), beta, linear_beta), down)


def moe(h, router, bias, down, norm, up, sg, su, sd, w1, w2, w3, top_k: int, eps: float, beta: float, lbeta: float):
    """Latent mixture of experts; also the number of tokens per expert ``[E]``.

    All experts run on every token as one wide MLP and unchosen ones get weight zero: at this size the extra
    arithmetic costs less than sorting tokens.
    """
    experts, width, latent = w1.shape
    scores = torch.sigmoid(F.linear(h.float(), router.to(torch.bfloat16).float()))
    chosen = (scores.detach() + bias).topk(top_k, dim=-1).indices
    picked = scores.gather(-1, chosen)
    picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    weights = torch.zeros_like(scores).scatter(-1, chosen, picked)
    d = linear(h, down)
    act = situ(linear(d, w1.flatten(0, 1)), linear(d, w3.flatten(0, 1)), beta, lbeta)
    act = (act.unflatten(-1, (experts, width)).float() * weights.unsqueeze(-1)).to(h.dtype).flatten(-2)
    m = linear(act, w2.transpose(0, 1).reshape(latent, experts * width))
    out = linear(rms_norm(m, norm, eps), up) + mlp(h, sg, su, sd, beta, lbeta)
    return out, (weights > 0).flatten(0, -2).sum(0)


def moe_sparse(h, router, bias, down, norm, up, sg, su, sd, w1, w2, w3, top_k, eps, beta, lbeta):
    """The same as :func:`moe`, expert by expert on the tokens that chose it (faster on a CPU)."""
    scores = torch.sigmoid(F.linear(h.float(), router.to(torch.bfloat16).float()))
    chosen = (scores + bias).topk(top_k, dim=-1).indices
    picked = scores.gather(-1, chosen)
    weights = torch.zeros_like(scores).scatter(-1, chosen, picked / (picked.sum(-1, keepdim=True) + 1e-20))
    weights = weights.flatten(0, -2)
    d = linear(h, down).flatten(0, -2)
    total = torch.zeros_like(d, dtype=torch.float32)
    for e in range(w1.shape[0]):
        rows = weights[:, e].nonzero().squeeze(-1)
        y = mlp(d[rows], w1[e], w3[e], w2[e], beta, lbeta)
        total.index_add_(0, rows, y.float() * weights[rows, e, None])
    m = rms_norm(total.to(h.dtype).view(*h.shape[:-1], -1), norm, eps)
    return linear(m, up) + mlp(h, sg, su, sd, beta, lbeta), (weights > 0).sum(0)


def head_loss(h, weight, targets):
    """Sum of next-token negative log likelihoods (nats)."""
    logits = linear(h, weight).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


def quantise_experts(w1, w2, w3):
    """MXFP4 values of the three expert stacks, gradients straight through."""
    return straight_through(w1), straight_through(w2), straight_through(w3)


class K3Nano(nn.Module):
    """The model. Parameters live in one flat dictionary keyed by checkpoint name (dots become ``/`` in PyTorch)."""

    def __init__(self, config: Config, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        for name, shape in parameter_shapes(config).items():
            tensor = initial_value(name, shape, config, generator)
            self.register_parameter(name.replace(".", "/"), nn.Parameter(tensor))
        for i in range(1, config.layers):
            self.register_buffer(f"bias/{i}", torch.zeros(config.experts))
        self.loads: dict[int, torch.Tensor] = {}

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by checkpoint name."""
        return {name.replace("/", "."): p for name, p in self.named_parameters()}

    def bias(self, layer: int) -> torch.Tensor:
        """Correction bias of the router of a layer ``[E]``."""
        return getattr(self, f"bias/{layer}")

    def forward(self, ids: torch.Tensor, run: Run, state: State | None = None) -> torch.Tensor:
        """Final normed hidden states ``[B, T, H]``; a given ``state`` (see :meth:`new_state`) is updated in place."""
        c, w = self.config, self.named()
        p = F.embedding(ids, w["model.embed_tokens.weight"]).to(run.dtype)
        bank: list[torch.Tensor] = []
        for i in range(c.layers):
            prefix = f"model.layers.{i}."
            layer = {n[len(prefix) :].removesuffix(".weight"): t for n, t in w.items() if n.startswith(prefix)}
            if bank:
                h = self._mix(run, (*bank, p), layer, "self_attention_res", layer["input_layernorm"])
            else:
                h = run.call(rms_norm, p, layer["input_layernorm"], c.eps)
            cache = None if state is None else state[i]
            y = (self._kda if i + 1 in c.kda_layers else self._mla)(run, h, layer, cache)
            if i % c.block == 0:
                bank.append(p)
                p = y
            else:
                p = p + y
            h = self._mix(run, (*bank, p), layer, "mlp_res", layer["post_attention_layernorm"])
            p = p + self._feed_forward(run, i, h, layer)
        return run.call(
            mix_norm,
            (*bank, p),
            w["model.output_attn_res_norm.weight"],
            w["model.output_attn_res_proj.weight"],
            w["model.norm.weight"],
            c.eps,
        )

    def logits(self, ids: torch.Tensor, run: Run, state: State | None = None) -> torch.Tensor:
        """Logits ``[B, T, V]`` in float32."""
        return linear(self(ids, run, state), self.named()["lm_head.weight"]).float()

    def loss(self, ids: torch.Tensor, run: Run) -> torch.Tensor:
        """Mean next-token loss in nats; ids ``[B, T + 1]``."""
        hidden = self(ids[:, :-1], run)
        return run.call(head_loss, hidden, self.named()["lm_head.weight"], ids[:, 1:]) / ids[:, 1:].numel()

    def new_state(self) -> State:
        """An empty decoding state: one dictionary per layer."""
        return [{} for _ in range(self.config.layers)]

    def _mix(self, run, sources, layer, name, weight):
        return run.call(mix_norm, sources, layer[f"{name}_norm"], layer[f"{name}_proj"], weight, self.config.eps)

    def _kda(self, run, h, layer, cache):
        c = self.config
        a = {n.removeprefix("self_attn."): t for n, t in layer.items()}
        streams = ("q", "k", "v")
        empty = h.new_zeros(h.shape[0], c.conv - 1, c.heads * c.head_dim)
        tails = [empty if not cache else cache[s] for s in streams]
        q, k, v, f, b, gate, raw = run.call(
            kda_inputs,
            h,
            *(a[f"{s}_proj"] for s in streams),
            *(a[f"{s}_conv1d"] for s in streams),
            a["f_a_proj"],
            a["f_b_proj"],
            a["b_proj"],
            a["g_proj"],
            *tails,
        )
        q, k, v, f = (x.unflatten(-1, (c.heads, c.head_dim)) for x in (q, k, v, f))
        start = None if not cache else cache["s"]
        o, final = kda(q, k, v, f, b, a["A_log"], a["dt_bias"], start, run.mode)
        if cache is not None:
            for s, tail, x in zip(streams, tails, raw, strict=True):
                cache[s] = torch.cat((tail, x), dim=1)[:, -(c.conv - 1) :]
            cache["s"] = final
        return run.call(kda_output, o, gate, a["o_norm"], a["o_proj"], c.eps)

    def _mla(self, run, h, layer, cache):
        c = self.config
        a = {n.removeprefix("self_attn."): t for n, t in layer.items()}
        down = [a[n] for n in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")]
        up = [a[n] for n in ("kv_b_proj", "g_proj", "o_proj")]
        if cache is None:
            return run.call(mla_train, h, *down, *up, c.heads, c.nope, c.value, c.kv_rank, c.eps_mla)
        q, rows = mla_project(h, *down, c.kv_rank, c.eps_mla)
        cache["c"] = torch.cat((cache["c"], rows), dim=1) if cache else rows
        return mla_attend(h, q, cache["c"], *up, c.heads, c.nope, c.value, c.kv_rank)

    def _feed_forward(self, run, i, h, layer):
        c = self.config
        if i == 0:
            return run.call(mlp, h, *(layer[f"mlp.{n}_proj"] for n in ("gate", "up", "down")), c.beta, c.linear_beta)
        m = {n.removeprefix("block_sparse_moe."): t for n, t in layer.items()}
        experts = [m[f"experts.{n}"] for n in ("w1", "w2", "w3")]
        if run.quantise:
            experts = run.call(quantise_experts, *experts)
        out, load = run.call(
            moe_sparse if run.sparse else moe,
            h,
            m["gate"],
            self.bias(i),
            m["routed_expert_down_proj"],
            m["routed_expert_norm"],
            m["routed_expert_up_proj"],
            *(m[f"shared_experts.{n}_proj"] for n in ("gate", "up", "down")),
            *experts,
            c.top_k,
            c.eps,
            c.beta,
            c.linear_beta,
        )
        self.loads[i] = load
        return out


def parameter_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Every trainable tensor by checkpoint name (experts stacked, A_log unpadded)."""
    h, p = c.hidden, c.heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab, h)}
    for i in range(c.layers):
        layer = f"model.layers.{i}."
        for name in ("self_attention_res", "mlp_res"):
            shapes[f"{layer}{name}_norm.weight"] = (h,)
            shapes[f"{layer}{name}_proj.weight"] = (1, h)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (h,)
        a = layer + "self_attn."
        if i + 1 in c.kda_layers:
            for s in ("q", "k", "v"):
                shapes[f"{a}{s}_proj.weight"] = (p, h)
                shapes[f"{a}{s}_conv1d.weight"] = (p, 1, c.conv)
            shapes |= {
                f"{a}f_a_proj.weight": (c.head_dim, h),
                f"{a}f_b_proj.weight": (p, c.head_dim),
                f"{a}b_proj.weight": (c.heads, h),
                f"{a}A_log": (c.heads,),
                f"{a}dt_bias": (p,),
                f"{a}o_norm.weight": (c.head_dim,),
            }
        else:
            shapes |= {
                f"{a}q_a_proj.weight": (c.q_rank, h),
                f"{a}q_a_layernorm.weight": (c.q_rank,),
                f"{a}q_b_proj.weight": (c.heads * (c.nope + c.rope), c.q_rank),
                f"{a}kv_a_proj_with_mqa.weight": (c.kv_rank + c.rope, h),
                f"{a}kv_a_layernorm.weight": (c.kv_rank,),
                f"{a}kv_b_proj.weight": (c.heads * (c.nope + c.value), c.kv_rank),
            }
        shapes |= {f"{a}g_proj.weight": (p, h), f"{a}o_proj.weight": (h, p)}
        if i == 0:
            shapes |= {
                f"{layer}mlp.gate_proj.weight": (c.dense, h),
                f"{layer}mlp.up_proj.weight": (c.dense, h),
                f"{layer}mlp.down_proj.weight": (h, c.dense),
            }
            continue
        m, s = layer + "block_sparse_moe.", c.shared * c.expert_width
        shapes |= {
            f"{m}gate.weight": (c.experts, h),
            f"{m}routed_expert_down_proj.weight": (c.latent, h),
            f"{m}routed_expert_norm.weight": (c.latent,),
            f"{m}routed_expert_up_proj.weight": (h, c.latent),
            f"{m}shared_experts.gate_proj.weight": (s, h),
            f"{m}shared_experts.up_proj.weight": (s, h),
            f"{m}shared_experts.down_proj.weight": (h, s),
            f"{m}experts.w1": (c.experts, c.expert_width, c.latent),
            f"{m}experts.w2": (c.experts, c.latent, c.expert_width),
            f"{m}experts.w3": (c.experts, c.expert_width, c.latent),
        }
    shapes |= {
        "model.norm.weight": (h,),
        "model.output_attn_res_norm.weight": (h,),
        "model.output_attn_res_proj.weight": (1, h),
        "lm_head.weight": (c.vocab, h),
    }
    return shapes


def initial_value(name: str, shape: tuple[int, ...], c: Config, generator: torch.Generator) -> torch.Tensor:
    """Start values: unit norms, slow decays, small output projections, uniform AttnRes mixture."""
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith(("A_log", "res_proj.weight")):
        return torch.zeros(shape)
    if name.endswith("dt_bias"):
        # Initial decay exponents spread log-uniformly over [-1, -0.002] per channel.
        g = torch.exp(torch.rand(shape, generator=generator) * 6.2 - 6.2)
        return torch.logit(g / 5.0)
    noise = torch.randn(shape, generator=generator)
    if "conv1d" in name:
        noise = noise * 0.2
        noise[..., -1] += 0.6
        return noise
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return noise * (0.1 if "embed" in name else 0.02)
    out = (
        name.endswith(("o_proj.weight", "down_proj.weight", "up_proj.weight"))
        and "shared_experts.up" not in name
        and "mlp.up" not in name
        and "expert_down" not in name
    )
    return noise * ((0.2 if out else 0.7) * shape[-1] ** -0.5)
