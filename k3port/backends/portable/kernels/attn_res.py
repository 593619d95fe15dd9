# pyright: reportPossiblyUnboundVariable=false
"""Attention Residuals in one launch: pending add, block write, mixture, RMSNorm; every number is read once.

A program holds one token: the weighted sum of its sources lives in registers (D float32 numbers), and an online softmax
takes the finished blocks in groups, with one reduction for both sums that a score needs. With one stage the next group
waits in registers, with more Triton pipelines the loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.kernels.lib import LOG2E, cast
from k3port.backends.portable.launch import launch, power_of_2, tuned

CANDIDATES = {"num_warps": (8, 16, 32), "GROUP": (1, 2, 4), "STAGES": (1, 2, 3)}


@triton.jit
def _sources(row_ptr, index, num_blocks, slot_stride, cols, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's row of some blocks, ``[GROUP, BLOCK]``; zeros where there is no such block."""
    there = (index < num_blocks)[:, None] & (cols < D)[None, :]
    return tl.load(row_ptr + index.to(tl.int64)[:, None] * slot_stride + cols[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=["num_blocks"])
def attn_res_kernel(  # type: ignore[no-untyped-def]
    partial_ptr,
    pending_ptr,
    blocks_ptr,
    res_norm_ptr,
    res_proj_ptr,
    norm_weight_ptr,
    y_ptr,
    partial_stride,
    pending_stride,
    slot_stride,
    block_stride,
    y_stride,
    num_blocks,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PENDING: tl.constexpr,
    WRITE_BLOCK: tl.constexpr,
    MIX: tl.constexpr,
    NORM: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    AHEAD: tl.constexpr = STAGES == 1
    dtype = y_ptr.dtype.element_ty
    cols = tl.arange(0, BLOCK)
    live = cols < D
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(partial_ptr + row * partial_stride + cols, mask=live, other=0.0)
    members = tl.arange(0, GROUP)
    row_ptr = blocks_ptr + row * block_stride
    if MIX:
        query = tl.load(res_norm_ptr + cols, mask=live, other=0.0).to(tl.float32)
        query *= tl.load(res_proj_ptr + cols, mask=live, other=0.0).to(tl.float32)
        if AHEAD:
            # On its way from the start: no load passes a barrier, and a reduction over warps has some.
            coming = _sources(row_ptr, members, num_blocks, slot_stride, cols, D)
    if NORM and AHEAD:
        norm_weight = tl.load(norm_weight_ptr + cols, mask=live, other=0.0)
    if PENDING:
        pending = tl.load(pending_ptr + row * pending_stride + cols, mask=live, other=0.0)
        # Rounded before anything else sees it.
        total = cast(total.to(tl.float32) + pending.to(tl.float32), dtype)
    if WRITE_BLOCK:
        slot_ptr = blocks_ptr + tl.cast(num_blocks, tl.int64) * slot_stride + row * block_stride
        tl.store(slot_ptr + cols, total, mask=live)
    elif PENDING:
        # A layout may hold a number in several warps: all must have read before one of them writes.
        tl.debug_barrier()
        tl.store(partial_ptr + row * partial_stride + cols, total, mask=live)

    mixture = total.to(tl.float32)
    if MIX:
        # The running sum is the first source of the online softmax: one reduction gives both of its sums.
        both = tl.join(mixture * mixture, mixture * query)
        square, score = tl.split(tl.sum(both, axis=0))
        highest = score * tl.rsqrt(square / D + eps)
        share = 1.0
        for first in tl.range(0, num_blocks, GROUP, num_stages=STAGES):
            index = first + members
            if AHEAD:
                source = coming.to(tl.float32)
                coming = _sources(row_ptr, index + GROUP, num_blocks, slot_stride, cols, D)
            else:
                source = _sources(row_ptr, index, num_blocks, slot_stride, cols, D).to(tl.float32)
            squares, scores = tl.split(tl.sum(tl.join(source * source, source * query[None, :]), axis=1))
            scores = tl.where(index < num_blocks, scores * tl.rsqrt(squares / D + eps), float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, axis=0))
            weights = tl.exp2((scores - new_highest) * LOG2E)
            decay = tl.exp2((highest - new_highest) * LOG2E)
            mixture = mixture * decay + tl.sum(source * weights[:, None], axis=0)
            share = share * decay + tl.sum(weights, axis=0)
            highest = new_highest
        mixture = mixture / share
    y = cast(mixture, dtype)
    if NORM:
        if not AHEAD:
            norm_weight = tl.load(norm_weight_ptr + cols, mask=live, other=0.0)
        mixed = y.to(tl.float32)
        normed = cast(mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) / D + eps), dtype)
        # The order of the official code: rounded once before the weight and once after.
        y = cast(normed.to(tl.float32) * cast(norm_weight.to(tl.float32), dtype).to(tl.float32), dtype)
    tl.store(y_ptr + row * y_stride + cols, y, mask=live)


def attn_res(
    partial: torch.Tensor,
    pending: torch.Tensor | None,
    blocks: torch.Tensor,
    num_blocks: int,
    write_block: bool,
    res_norm: torch.Tensor | None,
    res_proj: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See :func:`k3port.ops.residual.attn_res`. Rows of numbers that are no neighbours are copied first.

    Raises:
        ValueError: the bank has no slot for the block, or its numbers are no neighbours.
    """
    tokens, dim = partial.shape
    if partial.stride(1) != 1:
        rows = partial.contiguous()
        y = attn_res(rows, pending, blocks, num_blocks, write_block, res_norm, res_proj, norm_weight, eps)
        partial.copy_(rows)
        return y
    if pending is not None and pending.stride(1) != 1:
        pending = pending.contiguous()
    if num_blocks + write_block > blocks.shape[0] or blocks.stride(2) != 1:
        raise ValueError(
            f"attn_res: {num_blocks} blocks{' and one to write' if write_block else ''} in a bank of shape "
            f"{tuple(blocks.shape)}, strides {blocks.stride()}; it needs a slot each and rows without gaps"
        )
    y = torch.empty((tokens, dim), dtype=partial.dtype, device=partial.device)
    if tokens:
        config = tuned("attn_res", D=dim, R=num_blocks, T=tokens)
        # An operand that is not there is not read: any pointer stands in for it.
        launch(
            attn_res_kernel,
            (tokens, 1, 1),
            partial,
            partial if pending is None else pending,
            blocks,
            partial if res_norm is None else res_norm,
            partial if res_proj is None else res_proj,
            partial if norm_weight is None else norm_weight,
            y,
            partial.stride(0),
            0 if pending is None else pending.stride(0),
            blocks.stride(0),
            blocks.stride(1),
            dim,
            num_blocks,
            eps,
            D=dim,
            BLOCK=power_of_2(dim),
            PENDING=pending is not None,
            WRITE_BLOCK=write_block,
            MIX=num_blocks > 0,
            NORM=norm_weight is not None,
            **config,
        )
    return y
