"""Small Triton kernels, most of them wrong on purpose, with the arguments of ``rms_norm``; what they compute is nobody's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from k3port.backends.portable.launch import arch, tuned


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols))


@triton.jit
def product_kernel(x_ptr, y_ptr, M: tl.constexpr, K: tl.constexpr, DTYPE: tl.constexpr):
    rows, inner = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(x_ptr + rows[:, None] * K + inner[None, :]).to(DTYPE)
    b = tl.load(x_ptr + inner[:, None] * M + rows[None, :]).to(DTYPE)
    tl.store(y_ptr + rows[:, None] * M + rows[None, :], tl.dot(a, b).to(y_ptr.dtype.element_ty))


@triton.jit
def spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x_ptr + at).to(tl.float32)
    b = tl.load(x_ptr + at + BLOCK).to(tl.float32)
    c = tl.load(x_ptr + at + 2 * BLOCK).to(tl.float32)
    # Everything is needed again after a sum over everything.
    total = tl.sum(a + b * c, axis=0)
    out = y_ptr.dtype.element_ty
    tl.store(y_ptr + at, (a * total).to(out))
    tl.store(y_ptr + at + BLOCK, (b * total).to(out))
    tl.store(y_ptr + at + 2 * BLOCK, (c * total).to(out))


@triton.jit
def broken_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 3, "a planted error")
    tl.store(y_ptr + tl.arange(0, BLOCK), 0.0)


@triton.jit
def arguments_kernel(
    x_ptr, none_ptr, y_ptr, one, sixteen, seven, switch, number, stride, D: tl.constexpr, T: tl.constexpr
):
    tl.store(y_ptr, tl.load(x_ptr + stride) * number)


@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=[])
@triton.jit
def autotuned_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols))


@triton.heuristics({"BLOCK": lambda args: 64 if args["n"] == 1 else 128})
@triton.jit
def heuristic_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(y_ptr + cols, tl.load(x_ptr + cols))


@triton.jit
def shifted_kernel(x_ptr, y_ptr, count):
    # A count of 1 is a constant when it is compiled, and a constant has no ``to``.
    tl.store(y_ptr + count.to(tl.int64), tl.load(x_ptr))


def copy(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    copy_kernel[(1,)](x, y, BLOCK=1024, num_warps=2)
    return y


def product(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    product_kernel[(1,)](x, y, M=32, K=32, DTYPE=tl.bfloat16)
    return y


def fnuz(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    product_kernel[(1,)](x, y, M=32, K=32, DTYPE=tl.float8e4b8)
    return y


def lds_hog(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    product_kernel[(1,)](x, y, M=64, K=1024, DTYPE=tl.bfloat16)
    return y


def spilling(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    few_registers = {"maxnreg": 32} if arch().startswith("sm_") else {"waves_per_eu": 8}
    spilling_kernel[(1,)](x, y, BLOCK=4096, num_warps=1, **few_registers)
    return y


def broken(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    broken_kernel[(1,)](x, y, BLOCK=64)
    return y


def failing(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    raise RuntimeError("the host code failed")


def plain(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * weight


def autotuned(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    autotuned_kernel[(1,)](x, y)
    return y


def shifted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    shifted_kernel[(1,)](x, y, x.shape[0])
    return y


def copy_misaligned(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    copy_kernel[(1,)](x.flatten()[1:], y, BLOCK=1024, num_warps=2)
    return y


def warned(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    copy_kernel[(1,)](x, y, BLOCK=1024, kpack=2)
    return y


def configured(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    copy_kernel[(1,)](x, y, **tuned("toy", D=x.shape[1]))
    return y


def not_on_amd(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * 1.0 if arch().startswith("gfx") else copy(x, weight, eps)


def sized(gate_up: torch.Tensor, beta: float | None, linear_beta: float | None) -> torch.Tensor:
    y = torch.empty_like(gate_up)
    copy_kernel[(1,)](gate_up, y, BLOCK=triton.next_power_of_2(gate_up.shape[-1]))
    return y
