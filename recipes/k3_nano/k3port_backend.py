"""k3port as a backend of ``evaluate.py``: ``--backend k3port_backend:load``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

import k3port


class K3portBackend:
    """The runtime itself, on its default platform."""

    def __init__(self, folder: Path) -> None:
        self.runtime = k3port.load(folder)

    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Natural log probabilities of ``ids[1:]`` given everything before."""
        logp = self.runtime.logits(list(ids)[:-1]).log_softmax(-1)
        return logp.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1))[:, 0].tolist()

    def sample(
        self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        """``tokens`` new ids for each prompt, one seed per prompt."""
        params = [
            k3port.SamplingParams(
                max_tokens=tokens, temperature=temperature, top_p=top_p, seed=seed + i, ignore_eos=True
            )
            for i in range(len(prompts))
        ]
        return [list(answer.token_ids) for answer in self.runtime.generate(list(prompts), params)]


def load(folder: Path) -> K3portBackend:
    """The factory that ``evaluate.py`` calls."""
    return K3portBackend(folder)
