"""Tools for comparing runs: a recording probe, forced routing, and the search for the first op that is not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from k3port.errors import UsageError
from k3port.ops.moe import RouterParams


class Recorder:
    """A probe that keeps what it sees: ``attention``, ``mlp``, ``residuals`` (lists by layer) and ``mix``.

    Each entry is a list of tensors, one per step.
    """

    def __init__(self) -> None:
        self.sublayers: dict[tuple[str, int], list[torch.Tensor]] = {}
        self.residuals: dict[int, list[torch.Tensor]] = {}
        self.mix: list[torch.Tensor] = []

    def sublayer(self, layer: int, name: str, value: torch.Tensor) -> None:
        self.sublayers.setdefault((name, layer), []).append(value.clone())

    def residual(self, layer: int, value: torch.Tensor) -> None:
        self.residuals.setdefault(layer, []).append(value.clone())

    def final_mix(self, value: torch.Tensor) -> None:
        self.mix.append(value.clone())


class ForcedRouting:
    """A ``moe_route`` kernel that replays given choices for one request, whatever the scores say.

    Near ties flip between implementations; with the choices of a reference replayed, the rest can be compared.

    Args:
        expert_ids: int64 ``[MoE layers, T, X]``.
        weights: ``[MoE layers, T, X]``.
    """

    def __init__(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        self.expert_ids, self.weights = expert_ids.long(), weights
        self._layers: dict[int, int] = {}
        self._position: dict[int, int] = {}

    def start(self) -> None:
        """The next call is for the first token again."""
        self._position.clear()

    def __call__(self, h: torch.Tensor, router: RouterParams) -> tuple[torch.Tensor, torch.Tensor]:
        # Layers are told apart by their router: the first pass meets them in order.
        layer = self._layers.setdefault(id(router), len(self._layers))
        begin = self._position.get(layer, 0)
        if begin + h.shape[0] > self.expert_ids.shape[1]:
            raise UsageError(
                f"the replayed routing has {self.expert_ids.shape[1]} tokens, the sequence has more",
                hint="record the routing of the whole sequence, its answer included",
            )
        self._position[layer] = begin + h.shape[0]
        rows = slice(begin, begin + h.shape[0])
        weights = self.weights[layer, rows].to(h.device, torch.promote_types(h.dtype, torch.float32))
        return self.expert_ids[layer, rows].to(h.device), weights


def start_sequence(overrides: Mapping[str, Any]) -> None:
    """Tells replaying kernels that a new sequence begins."""
    for function in overrides.values():
        if isinstance(function, ForcedRouting):
            function.start()


class FirstBadOpError(Exception):
    """Raised inside a checked forward pass at the first op whose result is not finite."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        super().__init__(slot)


class LayerCounter:
    """A probe that knows which layer is running."""

    def __init__(self) -> None:
        self.layer = 0
        self.after_layers = False

    def sublayer(self, layer: int, name: str, value: torch.Tensor) -> None:
        self.layer = layer

    def residual(self, layer: int, value: torch.Tensor) -> None:
        self.layer = layer + 1

    def final_mix(self, value: torch.Tensor) -> None:
        self.after_layers = True


def check_finite(slot: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a kernel so that a result that is not finite raises :class:`FirstBadOpError`."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                raise FirstBadOpError(slot)
        return result

    return checked
