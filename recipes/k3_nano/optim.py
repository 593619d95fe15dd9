"""Optimisers: Muon for matrices (batched by shape) and Adam for everything else, with a shared schedule factor."""

from __future__ import annotations

from collections import defaultdict

import torch

ADAM_ONLY = ("embed_tokens", "lm_head", "res_proj", "conv1d", "b_proj.weight", "block_sparse_moe.gate.weight")


def uses_muon(name: str, p: torch.Tensor) -> bool:
    """Muon gets every matrix (or stack of matrices) except embeddings, router and very thin ones."""
    if p.ndim < 2 or any(key in name for key in ADAM_ONLY if key != "b_proj.weight"):
        return False
    return not name.endswith(".b_proj.weight")


def adam_scale(name: str) -> float:
    """Share of the Adam learning rate. Adam moves every weight by about the rate, so a row that meets a normalised
    input of width H moves its output by up to H times the rate: scores that saturate (router, AttnRes, beta) must
    learn slowly, or one choice wins for good within a few steps."""
    if name.endswith((".gate.weight", "res_proj.weight")):
        return 0.08
    if name.endswith(".b_proj.weight"):
        return 0.2
    return 1.0 if "embed_tokens" in name else 0.5


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """Five quintic Newton-Schulz steps on ``[n, r, c]``: singular values go to about one (K. Jordan, Muon, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.to(torch.bfloat16) if g.is_cuda else g
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return (x.mT if flip else x).float()


class Optimiser:
    """Both optimisers in one object; ``step(factor)`` scales every learning rate by the schedule factor."""

    def __init__(self, named: dict[str, torch.nn.Parameter], muon_lr: float, adam_lr: float, decay: float) -> None:
        self.muon_lr, self.adam_lr, self.decay = muon_lr, adam_lr, decay
        groups: dict[tuple[int, ...], list[torch.nn.Parameter]] = defaultdict(list)
        self.adam: list[torch.nn.Parameter] = []
        self.scales: list[float] = []
        for name, p in named.items():
            if uses_muon(name, p):
                groups[tuple(p.shape[-2:])].append(p)
            elif p.requires_grad:
                self.adam.append(p)
                self.scales.append(adam_scale(name))
        self.groups = list(groups.values())
        self.momentum = [self._flat([torch.zeros_like(p) for p in ps]) for ps in self.groups]
        self.first = [torch.zeros_like(p) for p in self.adam]
        self.second = [torch.zeros_like(p) for p in self.adam]
        self.steps = 0

    @staticmethod
    def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([t.reshape(-1, *t.shape[-2:]) for t in tensors])

    @torch.no_grad()
    def step(self, factor: float, clip: float = 1.0) -> torch.Tensor:
        """One update from ``.grad``; returns the gradient norm before clipping."""
        every = [p for ps in self.groups for p in ps] + self.adam
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in every]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        self.steps += 1
        lr = self.muon_lr * factor
        for ps, momentum in zip(self.groups, self.momentum, strict=True):
            grad = self._flat([p.grad for p in ps])
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(momentum, 0.95))
            # RMS of the update as in Adam (Moonlight): 0.2 * sqrt(larger side).
            scale = 0.2 * max(update.shape[-2:]) ** 0.5 * lr
            parts = update.split([p.numel() // update[0].numel() for p in ps])
            torch._foreach_mul_(ps, 1 - lr * self.decay)
            torch._foreach_add_(ps, [part.view_as(p) for part, p in zip(parts, ps, strict=True)], alpha=-scale)
        lr = self.adam_lr * factor
        shrink = (clip / (norm + 1e-6)).clamp_max(1.0)
        grads = torch._foreach_mul(grads[len(every) - len(self.adam) :], shrink)
        torch._foreach_lerp_(self.first, grads, 0.1)
        torch._foreach_mul_(self.second, 0.98)
        torch._foreach_addcmul_(self.second, grads, grads, 0.02)
        denominator = torch._foreach_sqrt(self.second)
        torch._foreach_div_(denominator, (1 - 0.98**self.steps) ** 0.5)
        torch._foreach_add_(denominator, 1e-8)
        rates = [-lr * scale / (1 - 0.9**self.steps) for scale in self.scales]
        torch._foreach_addcdiv_(self.adam, self.first, denominator, rates)
        return norm

    def state(self) -> dict[str, object]:
        """Everything needed to go on."""
        return {"momentum": self.momentum, "first": self.first, "second": self.second, "steps": self.steps}

    def restore(self, state: dict) -> None:
        """Inverse of :meth:`state`."""
        for key in ("momentum", "first", "second"):
            for mine, saved in zip(getattr(self, key), state[key], strict=True):
                mine.copy_(saved)
        self.steps = int(state["steps"])
