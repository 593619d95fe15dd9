"""MLA on the CPU: torch's fused attention for prefill, batched products over gathered latents for decode."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from k3port.ops import mla as reference
from k3port.ops.contract import accumulation_dtype
from k3port.ops.mla import gather_cache
from k3port.ops.segment import NULL_SLOT, Segment


def mla_append(kv: torch.Tensor, norm_weight: torch.Tensor, eps: float, cache: torch.Tensor, segment: Segment) -> None:
    """See :func:`k3port.ops.mla.mla_append`."""
    if segment.has_padding or kv.dtype == torch.bfloat16:
        reference.mla_append(kv, norm_weight, eps, cache, segment)
        return
    latent_dim = norm_weight.shape[0]
    latent = F.rms_norm(kv[:, :latent_dim], norm_weight.shape, norm_weight, eps)
    rows = cache.view(-1, cache.shape[-1])
    rows[segment.cache_rows] = torch.cat((latent, kv[:, latent_dim:]), dim=-1)


def mla_attend_sdpa(
    q: torch.Tensor, kv_b: torch.Tensor, cache: torch.Tensor, scale: float, segment: Segment
) -> torch.Tensor:
    """See :func:`k3port.ops.mla.mla_attend_prefill`."""
    num_heads, latent_dim = kv_b.shape[0], kv_b.shape[-1]
    nope_dim = q.shape[-1] - (cache.shape[-1] - latent_dim)
    out = q.new_zeros(*q.shape[:2], kv_b.shape[1] - nope_dim)
    for i, (begin, end) in enumerate(segment.spans()):
        if segment.slot_ids[i] == NULL_SLOT or begin == end:
            continue
        context, total = segment.contexts[i], segment.contexts[i] + end - begin
        rows = gather_cache(cache, segment.pages[i], total)
        expanded = F.linear(rows[:, :latent_dim], kv_b.flatten(0, 1)).view(total, num_heads, -1).transpose(0, 1)
        shared = rows[:, latent_dim:].expand(num_heads, -1, -1)
        k = torch.cat((expanded[..., :nope_dim], shared), dim=-1)
        mask = None
        if context:
            # With cached tokens the causal triangle is aligned to the lower right corner.
            mask = torch.ones(end - begin, total, dtype=torch.bool).tril(context)
        o = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1).unsqueeze(0),
            k.unsqueeze(0),
            expanded[..., nope_dim:].unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )
        out[begin:end] = o[0].transpose(0, 1)
    return out


def mla_attend_batched(
    q: torch.Tensor, cache: torch.Tensor, latent_dim: int, scale: float, segment: Segment
) -> torch.Tensor:
    """See :func:`k3port.ops.mla.mla_attend_decode`, for one token per request."""
    if segment.has_padding:
        return reference.mla_attend_decode(q, cache, latent_dim, scale, segment)
    acc = accumulation_dtype(q)
    longest = max(segment.contexts) + 1
    if len(segment.lengths) == 1:
        rows = gather_cache(cache, segment.pages[0], longest).to(acc).unsqueeze(0)
        scores = (q.to(acc) @ rows.transpose(1, 2)).mul_(scale)
    else:
        num_pages = -(-longest // cache.shape[1])
        # Unused table entries are -1: page 0 stands in for them, and the mask below hides its rows.
        pages = cache[segment.block_table[:, :num_pages].clamp(min=0).long()]
        hidden = torch.arange(longest) >= segment.kv_lens.unsqueeze(-1)
        # Garbage rows must not reach the sums even with weight zero: zero times infinity is NaN.
        rows = pages.flatten(1, 2)[:, :longest].to(acc).masked_fill_(hidden.unsqueeze(-1), 0)
        scores = (q.to(acc) @ rows.transpose(1, 2)).mul_(scale)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    return (torch.softmax(scores, dim=-1) @ rows[..., :latent_dim]).to(q.dtype)
