"""Multi-head latent attention without positional encoding, over a paged cache of latents.

A cache row is ``[normed latent C | shared key R]``. Prefill expands latents to keys and values per head; decode absorbs
the expansion into the query and the output (DeepSeek-V2, arXiv 2405.04434, section 2.1). Both give the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from k3port.ops.catalog import Phase
from k3port.ops.contract import Contract, Cost, Sample, accumulation_dtype
from k3port.ops.norm import rms_norm
from k3port.ops.segment import NULL_SLOT, Segment, make_segment


@dataclass(frozen=True, slots=True)
class MlaParams:
    """What an MLA layer needs between its projections; one record per layer.

    ``kv_a_norm`` ``[C]``; ``kv_b`` ``[H, N + V, C]``, the key rows of each head before its value rows; N and R are the
    head's own and the shared query/key channels.
    """

    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    nope_dim: int
    latent_dim: int
    scale: float
    norm_eps: float


def mla_append(kv: torch.Tensor, norm_weight: torch.Tensor, eps: float, cache: torch.Tensor, segment: Segment) -> None:
    """Normalises the latent part of each row and writes the row to its place in the cache.

    Args:
        kv: ``[T, C + R]`` output of ``kv_a_proj_with_mqa``; the R shared key channels are not normalised.
        norm_weight: ``[C]``.
        cache: ``[pages, page_size, C + R]``, updated in place; rows with index -1 are not written.
    """
    latent_dim = norm_weight.shape[0]
    rows = torch.cat((rms_norm(kv[:, :latent_dim], norm_weight, eps), kv[:, latent_dim:]), dim=-1)
    live = segment.cache_rows >= 0
    cache.view(-1, cache.shape[-1])[segment.cache_rows[live]] = rows[live].to(cache.dtype)


def gather_cache(cache: torch.Tensor, pages: Sequence[int], num_tokens: int) -> torch.Tensor:
    """The first ``num_tokens`` cache rows ``[num_tokens, C + R]`` of one request, in token order.

    Neighbouring pages give a view, others a copy.
    """
    used = pages[: -(-num_tokens // cache.shape[1])]
    first, last = used[0], used[-1]
    if last - first == len(used) - 1 and all(b - a == 1 for a, b in pairwise(used)):
        return cache[first : last + 1].flatten(0, 1)[:num_tokens]
    return cache[list(used)].flatten(0, 1)[:num_tokens]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, first_position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal softmax attention of one request: query i sits at position ``first_position + i``.

    Args:
        q: ``[T, H, E]``; k: ``[L, H, E]`` or ``[L, 1, E]``; v: ``[L, H, V]`` or ``[L, 1, V]``.

    Returns:
        ``[T, H, V]`` and the natural-log sum of exponentials ``[T, H]``.
    """
    scores = torch.einsum("the,lhe->thl", q, k.expand(-1, q.shape[1], -1)) * scale
    query = torch.arange(q.shape[0], device=q.device) + first_position
    hidden = torch.arange(k.shape[0], device=q.device) > query.unsqueeze(-1)
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    out = torch.einsum("thl,lhv->thv", torch.softmax(scores, dim=-1), v.expand(-1, q.shape[1], -1))
    return out, torch.logsumexp(scores, dim=-1)


def mla_attend_prefill(
    q: torch.Tensor, kv_b: torch.Tensor, cache: torch.Tensor, scale: float, segment: Segment
) -> torch.Tensor:
    """Expanded form over each request's whole cache, its new tokens included.

    Args:
        q: ``[T, H, N + R]``, own channels first.
        kv_b: ``[H, N + V, C]``.
        cache: ``[pages, page_size, C + R]``.

    Returns:
        ``[T, H, V]`` in the dtype of ``q``; rows of padding requests are zero.
    """
    acc = accumulation_dtype(q)
    latent_dim = kv_b.shape[-1]
    nope_dim = q.shape[-1] - (cache.shape[-1] - latent_dim)
    out = q.new_zeros(*q.shape[:2], kv_b.shape[1] - nope_dim)
    for i, (begin, end) in enumerate(segment.spans()):
        if segment.slot_ids[i] == NULL_SLOT or begin == end:
            continue
        rows = gather_cache(cache, segment.pages[i], segment.contexts[i] + end - begin).to(acc)
        expanded = torch.einsum("lc,hec->lhe", rows[:, :latent_dim], kv_b.to(acc))
        shared = rows[:, latent_dim:].unsqueeze(1).expand(-1, q.shape[1], -1)
        k = torch.cat((expanded[..., :nope_dim], shared), dim=-1)
        o, _ = attend(q[begin:end].to(acc), k, expanded[..., nope_dim:], scale, segment.contexts[i])
        out[begin:end] = o.to(q.dtype)
    return out


def mla_attend_decode(
    q: torch.Tensor, cache: torch.Tensor, latent_dim: int, scale: float, segment: Segment
) -> torch.Tensor:
    """Absorbed form: one key row of width C + R shared by all heads; its first C numbers are also the value.

    Args:
        q: ``[T, H, C + R]`` queries already taken to latent space.
        cache: ``[pages, page_size, C + R]``.
        latent_dim: C.

    Returns:
        ``[T, H, C]`` in the dtype of ``q``, still in latent space; rows of padding requests are zero.
    """
    acc = accumulation_dtype(q)
    out = q.new_zeros(*q.shape[:2], latent_dim)
    for i, (begin, end) in enumerate(segment.spans()):
        if segment.slot_ids[i] == NULL_SLOT or begin == end:
            continue
        rows = gather_cache(cache, segment.pages[i], segment.contexts[i] + end - begin).to(acc).unsqueeze(1)
        o, _ = attend(q[begin:end].to(acc), rows, rows[..., :latent_dim], scale, segment.contexts[i])
        out[begin:end] = o.to(q.dtype)
    return out


def absorb_query(q: torch.Tensor, params: MlaParams) -> torch.Tensor:
    """``[T, H, N + R]`` to ``[T, H, C + R]``: the own channels through the head's key rows of ``kv_b``."""
    n = params.nope_dim
    latent = q[..., :n].transpose(0, 1) @ params.kv_b[:, :n].to(q.dtype)
    return torch.cat((latent.transpose(0, 1), q[..., n:]), dim=-1)


def expand_output(o_latent: torch.Tensor, params: MlaParams) -> torch.Tensor:
    """``[T, H, C]`` to ``[T, H, V]`` through the head's value rows of ``kv_b``."""
    values = params.kv_b[:, params.nope_dim :].to(o_latent.dtype)
    return (o_latent.transpose(0, 1) @ values.transpose(1, 2)).transpose(0, 1)


def apply_output_gate(o: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """``o * sigmoid(gate)`` elementwise on ``[T, H V]``; the sigmoid is rounded first, as in the official code."""
    if gate is None:
        return o
    acc = accumulation_dtype(gate)
    return o * torch.sigmoid(gate.to(acc)).to(o.dtype)


def mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    gate: torch.Tensor | None,
    params: MlaParams,
    cache: torch.Tensor,
    segment: Segment,
) -> torch.Tensor:
    """Cache write, attention in the form of the segment's phase, and the output gate.

    Args:
        q: ``[T, H, N + R]``.
        kv: ``[T, C + R]`` output of ``kv_a_proj_with_mqa``.
        gate: ``[T, H V]`` gate logits, or None where the model has no output gate.

    Returns:
        ``[T, H V]``, the input of ``o_proj``.
    """
    mla_append(kv, params.kv_a_norm, params.norm_eps, cache, segment)
    if segment.phase == "prefill":
        o = mla_attend_prefill(q, params.kv_b, cache, params.scale, segment)
    else:
        o_latent = mla_attend_decode(absorb_query(q, params), cache, params.latent_dim, params.scale, segment)
        o = expand_output(o_latent, params)
    return apply_output_gate(o.flatten(1), gate)


_N, _R, _V, _C, _PAGE = 32, 16, 24, 48, 8


def _paged(
    gen: torch.Generator, dtype: torch.dtype, totals: list[int], width: int, garbage: float, page: int = _PAGE
) -> tuple[torch.Tensor, list[list[int]]]:
    """A cache with permuted pages for requests of the given lengths; unused rows hold ``garbage``."""
    counts = [-(-n // page) for n in totals]
    order = (torch.randperm(sum(counts) + 2, generator=gen)).tolist()
    cache = torch.full((len(order), page, width), garbage)
    tables: list[list[int]] = []
    for total, count in zip(totals, counts, strict=True):
        table, order = order[:count], order[count:]
        tables.append(table)
        for i in range(total):
            cache[table[i // page], i % page] = torch.randn(width, generator=gen)
    return cache.to(dtype), tables


def _shape_case(
    gen: torch.Generator,
    dtype: torch.dtype,
    phase: Phase,
    lengths: list[int],
    contexts: list[int],
    slots: list[int] | None = None,
    garbage: float = 1e4,
) -> tuple[torch.Tensor, Segment]:
    cache, tables = _paged(gen, dtype, [a + b for a, b in zip(lengths, contexts, strict=True)], _C + _R, garbage)
    slots = list(range(1, len(lengths) + 1)) if slots is None else slots
    return cache, make_segment(phase, lengths, slots, contexts, tables, _PAGE)


_PREFILL_CASES = {
    "one request": ([17], [0]),
    "with cached context": ([9], [23]),
    "ragged": ([1, 0, 8, 20], [5, 3, 0, 16]),
}
# A row that a request left behind may hold anything, NaN included, and must not reach another request.
_LEFT_BEHIND = {"1e4": 1e4, "NaN": torch.nan}
_DECODE_CASES = {
    "one request": ([1], [12]),
    "first token": ([1, 1], [0, 7]),
    "page edges": ([1, 1, 1], [7, 8, 15]),
}


def _prefill_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    def args(heads: int, cache: torch.Tensor, segment: Segment) -> dict[str, object]:
        return {
            "q": torch.randn(segment.num_tokens, heads, _N + _R, generator=gen).to(dtype),
            "kv_b": (torch.randn(heads, _N + _V, _C, generator=gen) * _C**-0.5).to(dtype),
            "cache": cache,
            "scale": (_N + _R) ** -0.5,
            "segment": segment,
        }

    for heads in (1, 3):
        for name, (lengths, contexts) in _PREFILL_CASES.items():
            ordinary = args(heads, *_shape_case(gen, dtype, "prefill", lengths, contexts))
            yield Sample(f"{name}, {heads} heads", ordinary)
            if heads == 3:
                peaked = {**ordinary, "q": ordinary["q"] * 30}  # type: ignore[operator]
                yield Sample(f"{name}, peaked scores", peaked, adversarial=True)
    for name, garbage in _LEFT_BEHIND.items():
        case = _shape_case(gen, dtype, "prefill", [3, 5, 9], [4, 9, 2], [2, 0, 1], garbage)
        yield Sample(f"with padding, {name} in unused rows", args(2, *case), adversarial=True)


def _decode_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    for heads in (1, 3, 12):
        for name, (lengths, contexts) in _DECODE_CASES.items():
            cache, segment = _shape_case(gen, dtype, "decode", lengths, contexts)
            yield Sample(f"{name}, {heads} heads", _decode_args(gen, dtype, heads, cache, segment))
    for name, garbage in _LEFT_BEHIND.items():
        for kind, slots in (("ragged", [3, 1, 2]), ("with padding", [0, 2, 0])):
            cache, segment = _shape_case(gen, dtype, "decode", [1, 1, 1], [4, 19, 2], slots, garbage)
            args = _decode_args(gen, dtype, 2, cache, segment)
            yield Sample(f"{kind}, {name} in unused rows", args, adversarial=True)


def _decode_args(
    gen: torch.Generator, dtype: torch.dtype, heads: int, cache: torch.Tensor, segment: Segment
) -> dict[str, object]:
    q = torch.randn(segment.num_tokens, heads, _C + _R, generator=gen).to(dtype)
    return {"q": q, "cache": cache, "latent_dim": _C, "scale": (_N + _R) ** -0.5, "segment": segment}


def _append_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    cases: list[tuple[str, Phase, list[int], list[int], list[int] | None]] = [
        *((name, "prefill", *case, None) for name, case in _PREFILL_CASES.items()),
        ("decode", "decode", [1, 1, 1], [7, 8, 0], None),
        ("prefill with padding", "prefill", [3, 5, 2], [6, 0, 4], [2, 0, 1]),
        ("decode with padding", "decode", [1, 1], [4, 9], [0, 2]),
    ]
    for name, phase, lengths, contexts, slots in cases:
        cache, segment = _shape_case(gen, dtype, phase, lengths, contexts, slots)
        args = {
            "kv": torch.randn(sum(lengths), _C + _R, generator=gen).to(dtype),
            "norm_weight": (1 + 0.2 * torch.randn(_C, generator=gen)).to(dtype),
            "eps": 1e-6,
            "cache": cache,
            "segment": segment,
        }
        yield Sample(name, args)
        tiny = {**args, "kv": args["kv"] * 1e-3}
        yield Sample(f"{name}, tiny latent", tiny, adversarial=True)


def _block_samples(dtype: torch.dtype, gen: torch.Generator) -> Iterator[Sample]:
    heads = 3
    cases: list[tuple[str, Phase, list[int], list[int], list[int] | None]] = [
        *((name, "prefill", *case, None) for name, case in _PREFILL_CASES.items()),
        *((f"decode, {name}", "decode", *case, None) for name, case in _DECODE_CASES.items()),
        ("prefill with padding", "prefill", [3, 5], [6, 0], [2, 0]),
        ("decode with padding", "decode", [1, 1], [4, 9], [0, 2]),
    ]
    for gated in (True, False):
        for name, phase, lengths, contexts, slots in cases:
            cache, segment = _shape_case(gen, dtype, phase, lengths, contexts, slots)
            tokens = sum(lengths)
            params = MlaParams(
                kv_a_norm=(1 + 0.2 * torch.randn(_C, generator=gen)).to(dtype),
                kv_b=(torch.randn(heads, _N + _V, _C, generator=gen) * _C**-0.5).to(dtype),
                nope_dim=_N,
                latent_dim=_C,
                scale=(_N + _R) ** -0.5,
                norm_eps=1e-6,
            )
            args = {
                "q": torch.randn(tokens, heads, _N + _R, generator=gen).to(dtype),
                "kv": torch.randn(tokens, _C + _R, generator=gen).to(dtype),
                "gate": torch.randn(tokens, heads * _V, generator=gen).to(dtype) if gated else None,
                "params": params,
                "cache": cache,
                "segment": segment,
            }
            yield Sample(f"{name}, {'gated' if gated else 'plain'}", args, adversarial=slots is not None)


def _attend_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    """``T`` queries over ``L`` cached tokens in all, key width ``E``, value width ``V`` (decode: C + R and C)."""
    heads, width, value = axes["H"], axes["E"], axes["V"]
    moved = (axes["L"] * (axes["C"] + axes["R"]) + axes["T"] * heads * (width + value)) * itemsize
    return Cost(bytes=moved, flops=2 * axes["T"] * axes["L"] // max(axes["B"], 1) * heads * (width + value))


def _append_cost(axes: Mapping[str, int], itemsize: int) -> Cost:
    elements = axes["T"] * (axes["C"] + axes["R"])
    return Cost(bytes=2 * elements * itemsize, flops=4 * axes["T"] * axes["C"])


_BF16_WIDE = {torch.float64: 2e-14, torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

MLA_APPEND = Contract(
    op="mla_append",
    inputs={"kv": "T C+R", "norm_weight": "C", "eps": "", "cache": "N page C+R", "segment": ""},
    outputs={},
    mutates=("cache",),
    reference=mla_append,
    samples=_append_samples,
    cost=_append_cost,
)
MLA_ATTEND_PREFILL = Contract(
    op="mla_attend",
    phase="prefill",
    inputs={"q": "T H N+R", "kv_b": "H N+V C", "cache": "N page C+R", "scale": "", "segment": ""},
    outputs={"o": "T H V"},
    reference=mla_attend_prefill,
    samples=_prefill_samples,
    cost=_attend_cost,
    tolerance=_BF16_WIDE,
)
MLA_ATTEND_DECODE = Contract(
    op="mla_attend",
    phase="decode",
    inputs={"q": "T H C+R", "cache": "N page C+R", "latent_dim": "", "scale": "", "segment": ""},
    outputs={"o": "T H C"},
    reference=mla_attend_decode,
    samples=_decode_samples,
    cost=_attend_cost,
    tolerance={**_BF16_WIDE, torch.float32: 2e-6},
)
MLA = Contract(
    op="mla",
    inputs={"q": "T H N+R", "kv": "T C+R", "gate": "T HV", "params": "", "cache": "N page C+R", "segment": ""},
    outputs={"o": "T HV"},
    mutates=("cache",),
    reference=mla,
    samples=_block_samples,
    cost=_attend_cost,
    # The absorbed form rounds queries and outputs in latent space once more than the expanded form.
    tolerance={torch.float64: 2e-14, torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3},
)
