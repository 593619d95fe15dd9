"""Checks before a long GPU run: FLA kernel against the token recurrence (values and gradients), speed, profile.

Usage: ``python gpu_check.py --rows 32``.
"""

from __future__ import annotations

import argparse
import time

import torch

from fla_setup import pin_configurations
from kda import kda
from model import Config, K3Nano, Run, compile_pieces
from optim import Optimiser


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """``|a - b| / |b|`` in float32."""
    return ((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-20)).item()


def check_kernel(tokens: int) -> None:
    """Attention output and all input gradients of the Triton kernel, inputs in bfloat16."""
    torch.manual_seed(tokens)
    shape = (2, tokens, 4, 128)
    tensors = [torch.randn(shape, device="cuda") for _ in range(4)] + [torch.randn(shape[:3], device="cuda")]
    a_log, dt_bias = torch.randn(4, device="cuda") * 0.3, torch.randn(512, device="cuda") - 2
    upstream = torch.randn(shape, device="cuda")
    results = []
    for mode in ("fla", "recurrent"):
        leaves = [t.bfloat16().to(torch.bfloat16 if mode == "fla" else torch.float32).requires_grad_() for t in tensors]
        extra = [a_log.clone().requires_grad_(), dt_bias.clone().requires_grad_()]
        out, _ = kda(*leaves, *extra, mode=mode)
        (out.float() * upstream).sum().backward()
        results.append([out] + [t.grad for t in leaves + extra])
    names = ("out", "q", "k", "v", "f", "beta", "A_log", "dt_bias")
    print(tokens, {n: f"{relative(a, b):.1e}" for n, a, b in zip(names, *results, strict=True)})


def check_model() -> None:
    """Logits and parameter gradients of the whole model: compiled bfloat16 against float32 recurrence."""
    ids = torch.randint(0, 3840, (2, 193), device="cuda")
    model = K3Nano(Config()).cuda()
    grads, losses = [], []
    for run in (Run(mode="fla", dtype=torch.bfloat16), Run(mode="recurrent")):
        if run.mode == "fla":
            compile_pieces(run)
        loss = model.loss(ids, run)
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad.clone() for n, p in model.named().items() if p.grad is not None})
        model.zero_grad(set_to_none=True)
    errors = sorted(((relative(grads[0][n], g), n) for n, g in grads[1].items()), reverse=True)
    print("losses", losses, "largest gradient errors", errors[:6], "median", errors[len(errors) // 2])


def speed(rows: int, length: int, quantise: bool, profile: bool) -> None:
    """Time per training step."""
    model = K3Nano(Config()).cuda()
    run = Run(mode="fla", dtype=torch.bfloat16, quantise=quantise)
    compile_pieces(run)
    optimiser = Optimiser(model.named(), 5e-3, 4e-3, 0.1)
    ids = torch.randint(0, 3840, (rows, length + 1), device="cuda")

    def step() -> None:
        model.loss(ids, run).backward()
        optimiser.step(0.1)
        model.zero_grad(set_to_none=True)

    began = time.time()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    warm = time.time() - began
    began = time.time()
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    each = (time.time() - began) / 10
    print(
        f"rows {rows} quantise {quantise}: first 3 steps {warm:.1f} s, then {each * 1e3:.1f} ms a step, "
        f"{rows * length / each / 1e3:.0f} k tok/s, peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    )
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            step()
            torch.cuda.synchronize()
        print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    args = parser.parse_args()
    began = time.time()
    print(pin_configurations())
    for tokens in (64, 200):
        check_kernel(tokens)
    print(f"{time.time() - began:.0f} s")
    check_model()
    print(f"{time.time() - began:.0f} s")
    speed(args.rows, args.length, False, True)
    print(f"{time.time() - began:.0f} s")
    speed(args.rows, args.length, True, False)
    speed(args.rows // 2, args.length, False, False)


if __name__ == "__main__":
    main()
