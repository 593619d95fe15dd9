"""Coarse ops made of fine ops: factories that take the bound parts and return a plain function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from k3port.ops.kda import split_heads
from k3port.ops.kda_state import KdaParams, KdaState, required_record
from k3port.ops.mla import MlaParams, absorb_query, apply_output_gate, expand_output
from k3port.ops.moe import RouterParams
from k3port.ops.segment import Segment

Op = Callable[..., Any]
Tensor = torch.Tensor


def make_kda(short_conv: Op, kda_core: Op, gated_norm: Op) -> Op:
    def kda(
        qkv: Tensor,
        gate_raw: Tensor,
        beta_logit: Tensor,
        out_gate: Tensor,
        params: KdaParams,
        state: KdaState,
        segment: Segment,
    ) -> Tensor:
        drafts = required_record(segment, state.drafts)
        inputs = None if drafts is None else drafts.x
        q, k, v = split_heads(short_conv(qkv, params.conv, state.conv, segment, inputs), params.num_heads)
        gate = (gate_raw, beta_logit, params.A_log, params.dt_bias, params.lower_bound)
        o = kda_core(q, k, v, *gate, state.recurrent, segment, drafts)
        return gated_norm(o, out_gate.view(o.shape), params.o_norm, params.norm_eps).flatten(1)

    return kda


def make_mla_expanded(mla_append: Op, mla_attend: Op) -> Op:
    def mla(q: Tensor, kv: Tensor, gate: Tensor | None, params: MlaParams, cache: Tensor, segment: Segment) -> Tensor:
        mla_append(kv, params.kv_a_norm, params.norm_eps, cache, segment)
        o = mla_attend(q, params.kv_b, cache, params.scale, segment)
        return apply_output_gate(o.flatten(1), gate)

    return mla


def make_mla_absorbed(mla_append: Op, mla_attend: Op) -> Op:
    def mla(q: Tensor, kv: Tensor, gate: Tensor | None, params: MlaParams, cache: Tensor, segment: Segment) -> Tensor:
        mla_append(kv, params.kv_a_norm, params.norm_eps, cache, segment)
        o_latent = mla_attend(absorb_query(q, params), cache, params.latent_dim, params.scale, segment)
        return apply_output_gate(expand_output(o_latent, params).flatten(1), gate)

    return mla


def make_moe(moe_route: Op, moe_experts: Op) -> Op:
    def moe(
        h: Tensor, x: Tensor, router: RouterParams, experts: Any, beta: float | None, linear_beta: float | None
    ) -> Tensor:
        ids, weights = moe_route(h, router)
        return moe_experts(x, ids, weights, experts, beta, linear_beta)

    return moe


def make_dense_mlp(linear: Op, situ_mul: Op) -> Op:
    def dense_mlp(x: Tensor, gate_up: Tensor, down: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
        return linear(situ_mul(linear(x, gate_up), beta, linear_beta), down)

    return dense_mlp
