"""Mistakes that ports of these models really made, each planted where the running code would have it.

A plant is a context manager that gives a :class:`Calls`: its count proves that the planted code ran. Ops are replaced in
every kernel that this machine can run and under every name by which k3port's modules imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from builtin_kernels import KERNELS

from k3port.model.config import MlaConfig, ModelConfig
from k3port.model.config_file import parse_config
from k3port.model.mla import MlaAttention
from k3port.model.mlp import LatentMoe
from k3port.ops.kda import normalize_qk
from k3port.ops.mla import apply_output_gate
from k3port.ops.moe import RouterParams
from k3port.ops.moe_weights import StoredExperts, keep_stored, stack_dense
from k3port.ops.segment import NULL_SLOT, Segment
from k3port.runtime.binding import load_object

Op = Callable[..., Any]
Tensor = torch.Tensor


@dataclass
class Calls:
    """How often planted code ran."""

    count: int = 0

    def counted(self, function: Op) -> Op:
        def planted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return planted


Plant = Callable[[], Any]


def instead(*functions: Op, make: Callable[[Op], Op]) -> Plant:
    """Puts ``make(original)`` in the place of each function, in every module of k3port that holds it."""

    @contextmanager
    def plant() -> Iterator[Calls]:
        calls = Calls()
        with ExitStack() as stack:
            for original in functions:
                planted, found = calls.counted(make(original)), 0
                for module in [m for name, m in sys.modules.items() if name.startswith("k3port.")]:
                    for name in [n for n, value in vars(module).items() if value is original]:
                        stack.enter_context(mock.patch.object(module, name, planted))
                        found += 1
                assert found, f"{original} is not used"
            yield calls

    return plant


def in_kernels(op: str, make: Callable[[Op], Op]) -> Plant:
    """The same for every kernel of an op that runs here, composites aside."""

    @contextmanager
    def plant() -> Iterator[Calls]:
        specs = [s for s in KERNELS if s.op == op and not s.parts and s.requires.vendors in ((), ("cpu",))]
        with instead(*dict.fromkeys(load_object(s.load) for s in specs), make=make)() as calls:
            yield calls

    return plant


def after_init(owner: type, change: Callable[[Any], None]) -> Plant:
    """Changes every new object of a class."""

    @contextmanager
    def plant() -> Iterator[Calls]:
        calls, init = Calls(), owner.__init__  # type: ignore[misc]

        def changed(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            calls.count += 1
            change(self)

        with mock.patch.object(owner, "__init__", changed):
            yield calls

    return plant


def in_config(change: Callable[[ModelConfig], ModelConfig]) -> Plant:
    """Reads every configuration wrongly."""
    return instead(parse_config, make=lambda original: lambda *args, **kw: change(original(*args, **kw)))


@contextmanager
def mla_scale_of_nope() -> Iterator[Calls]:
    calls = Calls()
    wrong = property(calls.counted(lambda config: config.nope_dim**-0.5))
    with mock.patch.object(MlaConfig, "scale", wrong):
        yield calls


def with_inner_eps(config: ModelConfig) -> ModelConfig:
    return config if config.mla is None else replace(config, mla=replace(config.mla, inner_norm_eps=1e-5))


def longer_blocks(config: ModelConfig) -> ModelConfig:
    return config if config.attn_res_block is None else replace(config, attn_res_block=config.attn_res_block + 1)


def eps_on_the_mean(_: Op) -> Op:
    def normalize(q: Tensor, k: Tensor, acc: torch.dtype) -> tuple[Tensor, Tensor]:
        def unit(x: Tensor) -> Tensor:
            size = x.shape[-1]
            return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6) * size**-0.5

        return unit(q.to(acc)) * q.shape[-1] ** -0.5, unit(k.to(acc))

    return normalize


def core(
    read_before_decay: bool = False,
    output_before_write: bool = False,
    decay_on_values: bool = False,
    **gate_switches: bool,
) -> Callable[[Op], Op]:
    """Gate and recurrence token by token, right with no switch set."""

    def kda_core(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gate_raw: Tensor,
        beta_logit: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float | None,
        state: Tensor,
        segment: Segment,
        drafts: None = None,
    ) -> Tensor:
        g = log_decay(gate_raw, A_log, dt_bias, lower_bound, **gate_switches)
        beta = torch.sigmoid(beta_logit)
        q, k = normalize_qk(q, k, v.dtype)
        out = torch.zeros_like(v)
        for (begin, end), slot in zip(segment.spans(), segment.slot_ids, strict=True):
            if slot == NULL_SLOT:
                continue
            s = state[slot].to(v.dtype)
            for t in range(begin, end):
                decay = torch.exp(g[t])
                old, s = s, s * decay.unsqueeze(-1 if decay_on_values else -2)
                read = torch.einsum("hvk,hk->hv", old if read_before_decay else s, k[t])
                written = s + torch.einsum("hv,hk->hvk", beta[t].unsqueeze(-1) * (v[t] - read), k[t])
                out[t] = torch.einsum("hvk,hk->hv", s if output_before_write else written, q[t])
                s = written
            state[slot] = s.to(state.dtype)
        return out

    return lambda _: kda_core


def log_decay(
    raw: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    bound: float | None,
    per_channel: bool = False,
    bias_outside: bool = False,
    clamped_softplus: bool = False,
) -> Tensor:
    raw, bias = raw.unflatten(-1, (a_log.shape[0], -1)), dt_bias.unflatten(-1, (a_log.shape[0], -1))
    a = a_log.exp().unsqueeze(-1)
    if per_channel:
        # The file's heads are followed by zeros up to the head dimension.
        a = F.pad(a_log, (0, max(raw.shape[-1] - a_log.shape[0], 0)))[: raw.shape[-1]].exp()
    z = a * raw + bias if bias_outside else a * (raw + bias)
    if bound is None or clamped_softplus:
        g = -a * F.softplus(raw + bias)
        return g if bound is None else g.clamp(min=bound)
    return bound * torch.sigmoid(z)


def situ(uncapped_linear: bool = False, sigmoid_of_capped: bool = False) -> Callable[[Op], Op]:
    """SiTU or SwiGLU, right with no switch set."""

    def situ_mul(gate_up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
        a, b = gate_up.chunk(2, dim=-1)
        if beta is None:
            return F.silu(a) * b
        capped = beta * torch.tanh(a / beta)
        linear = b if uncapped_linear or linear_beta is None else linear_beta * torch.tanh(b / linear_beta)
        return capped * torch.sigmoid(capped if sigmoid_of_capped else a) * linear

    return lambda _: situ_mul


def mixture(normalised_sources: bool = False, without_gamma: bool = False) -> Callable[[Op], Op]:
    """Attention Residuals, right with no switch set."""

    def attn_res(
        partial: Tensor,
        pending: Tensor | None,
        blocks: Tensor,
        num_blocks: int,
        write_block: bool,
        gamma: Tensor | None,
        w: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        p = partial if pending is None else partial + pending
        (blocks[num_blocks] if write_block else partial).copy_(p)
        sources = torch.cat((blocks[:num_blocks], p.unsqueeze(0)))
        normed = sources * torch.rsqrt(sources.square().mean(dim=-1, keepdim=True) + eps)
        # One source takes all of the sum, whatever its score.
        query = torch.zeros(()) if gamma is None or w is None else w if without_gamma else gamma * w
        scores = (normed * query).sum(dim=-1, keepdim=True)
        # The models of the parity data leave a mixture of one source out.
        mixed = normed if normalised_sources and num_blocks else sources
        x = (scores.softmax(dim=0) * mixed).sum(dim=0)
        return x if norm_weight is None else F.rms_norm(x, norm_weight.shape, norm_weight, eps)

    return lambda _: attn_res


def routed_with(**switches: Any) -> Callable[[Op], Op]:
    """The real router with other settings."""
    return lambda original: lambda h, router: original(h, replace(router, **switches))


def bias_in_the_weights(original: Op) -> Op:
    def moe_route(h: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
        ids, _ = original(h, router)
        weights = (torch.sigmoid(h @ router.weight.to(h.dtype).T) + router.bias.to(h.dtype)).gather(-1, ids)  # type: ignore[union-attr]
        if router.top_k > 1 and router.renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return ids, weights * router.scaling_factor

    return moe_route


def reversed_taps(original: Op) -> Op:
    return lambda x, weight, tail, segment, record=None: original(x, weight.flip(-1), tail, segment, record)


def swapped_experts(original: Op) -> Op:
    def pack(stored: StoredExperts, dtype: torch.dtype) -> Any:
        return original(StoredExperts(gate=stored.up, up=stored.gate, down=stored.down), dtype)

    return pack


def values_first(layer: MlaAttention) -> None:
    keys, values = layer.params.kv_b.split(
        (layer.params.nope_dim, layer.params.kv_b.shape[1] - layer.params.nope_dim), 1
    )
    layer.params = replace(layer.params, kv_b=torch.cat((values, keys), dim=1))


def without_latent_norm(block: LatentMoe) -> None:
    block.latent_norm = None


K3, LINEAR = "k3: logits", "linear: logits"
GATES = ("op: KDA gates, prefill", "op: KDA gates, decode")
CORE = ("op: KDA example, step by step", "op: KDA example, decode", "op: KDA example, in one call")

# The mistake as the parity data names it; how it is planted; the named checks that must fail with it.
MISTAKES: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "l2norm eps added to the mean": (
        instead(normalize_qk, make=eps_on_the_mean),
        ("op: l2norm adds its epsilon to the sum, prefill", "op: l2norm adds its epsilon to the sum, decode"),
    ),
    "MLA-internal norm eps 1e-5 instead of 1e-6": (in_config(with_inner_eps), ("layer: MLA on faint latents",)),
    "no renormalisation of top-k weights": (
        in_kernels("moe_route", routed_with(renormalize=False)),
        ("op: router example", "op: router weights", LINEAR, K3),
    ),
    "MLA scale 1/sqrt(nope)": (mla_scale_of_nope, ("layer: MLA on faint latents", K3, LINEAR)),
    "SiTU linear branch uncapped": (
        in_kernels("situ_mul", situ(uncapped_linear=True)),
        ("op: SiTU", "op: SiTU caps", K3),
    ),
    "rms_norm_eps 1e-6": (in_config(lambda config: replace(config, norm_eps=1e-6)), (K3, LINEAR)),
    "delta read before decay": (in_kernels("kda_core", core(read_before_decay=True)), (*CORE, K3, LINEAR)),
    "SiTU sigmoid on the capped gate": (
        in_kernels("situ_mul", situ(sigmoid_of_capped=True)),
        ("op: SiTU", "op: SiTU sigmoid on the uncapped gate", K3),
    ),
    "correction bias kept in the weights": (
        in_kernels("moe_route", bias_in_the_weights),
        ("op: router example", "k3: routing", K3, LINEAR),
    ),
    "MLA gate omitted": (
        instead(apply_output_gate, make=lambda _: lambda o, gate: o),
        ("op: MLA example, prefill", "op: MLA example, decode", "layer: MLA on faint latents", K3),
    ),
    "routed_scaling_factor 1": (
        in_kernels("moe_route", routed_with(scaling_factor=1.0)),
        ("op: router weights", LINEAR),
    ),
    "kv_b rows read as [v, k]": (
        after_init(MlaAttention, values_first),
        ("layer: MLA on faint latents", K3, LINEAR),
    ),
    "correction bias ignored": (
        in_kernels("moe_route", routed_with(bias=None)),
        ("op: router example", "k3: routing", K3, LINEAR),
    ),
    "AttnRes scores without gamma": (
        in_kernels("attn_res", mixture(without_gamma=True)),
        ("op: AttnRes example", K3, "k3: depth"),
    ),
    "AttnRes sums normalised sources": (
        in_kernels("attn_res", mixture(normalised_sources=True)),
        ("op: AttnRes example", "op: AttnRes of equal sources is the source", K3, "k3: depth"),
    ),
    "latent norm omitted": (after_init(LatentMoe, without_latent_norm), (K3, "k3: depth")),
    "A_log read per channel": (in_kernels("kda_core", core(per_channel=True)), (*GATES, K3)),
    "dt_bias outside exp(A_log)": (in_kernels("kda_core", core(bias_outside=True)), (*GATES, K3)),
    "KDA output read before the write": (
        in_kernels("kda_core", core(output_before_write=True)),
        (*CORE, K3, LINEAR),
    ),
    "w1/w3 swapped": (instead(keep_stored, stack_dense, make=swapped_experts), (K3, LINEAR)),
    "block size + 1": (in_config(longer_blocks), (K3, "k3: depth")),
    "gate as clamped softplus": (in_kernels("kda_core", core(clamped_softplus=True)), (*GATES, K3)),
    "decay on the value axis": (in_kernels("kda_core", core(decay_on_values=True)), (*CORE, K3, LINEAR)),
    "conv taps reversed": (
        in_kernels("short_conv", reversed_taps),
        ("op: convolution taps, prefill", "op: convolution taps, decode", K3, LINEAR),
    ),
}
RIGHT: dict[str, Plant] = {
    "kda_core": in_kernels("kda_core", core()),
    "situ_mul": in_kernels("situ_mul", situ()),
    "attn_res": in_kernels("attn_res", mixture()),
}
"""The mistaken functions with no switch set: they must pass every check, so that a failure is the mistake's."""
