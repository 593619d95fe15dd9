"""Memory that outlives a step: recurrent state slots and pages of the latent cache, for all layers at once."""

from __future__ import annotations

import torch

from k3port.errors import CapacityError
from k3port.model.config import ModelConfig
from k3port.model.shapes import RankDims
from k3port.model.step import ModelState
from k3port.ops.kda import KdaState
from k3port.ops.segment import NULL_SLOT
from k3port.runtime.terms import PAGE_TOKENS


class StatePool:
    """One KDA state per request and layer. Slot 0 is the null slot, which no request gets."""

    def __init__(
        self,
        config: ModelConfig,
        dims: RankDims,
        num_requests: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers: dict[int, KdaState] = {}
        self.num_slots = num_requests + 1
        for layer in sorted(config.kda_layers):
            conv = torch.zeros(self.num_slots, dims.conv_width - 1, 3 * dims.kda_width, dtype=dtype, device=device)
            recurrent = torch.zeros(
                self.num_slots,
                dims.kda_heads,
                dims.kda_head_dim,
                dims.kda_head_dim,
                dtype=torch.float64 if dtype == torch.float64 else torch.float32,
                device=device,
            )
            arrivals = torch.zeros(recurrent.shape[:2], dtype=torch.int32, device=recurrent.device)
            self.layers[layer] = KdaState(conv, recurrent, arrivals)
        self._free = list(range(num_requests, NULL_SLOT, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A cleared slot.

        Raises:
            CapacityError: all slots are taken.
        """
        if not self._free:
            raise CapacityError(f"all {self.num_slots - 1} state slots are taken")
        slot = self._free.pop()
        self._clear(slot)
        return slot

    def release(self, slot: int) -> None:
        # Cleared on release too: a state that is not finite must not wait in memory for the next request.
        self._clear(slot)
        self._free.append(slot)

    def _clear(self, slot: int) -> None:
        for state in self.layers.values():
            state.conv[slot].zero_()
            state.recurrent[slot].zero_()


class PagePool:
    """Pages of 64 cache rows, shared by all requests; a request's pages are the same numbers in every MLA layer."""

    def __init__(
        self, config: ModelConfig, num_tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.num_pages = pages_for(num_tokens)
        width = config.mla.cache_dim if config.mla is not None else 0
        # torch.zeros: the system commits a page of host memory only when it is first written.
        self.layers = {
            layer: torch.zeros(self.num_pages, PAGE_TOKENS, width, dtype=dtype, device=device)
            for layer in config.mla_layers
        }
        self._free = list(range(self.num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages.

        Raises:
            CapacityError: fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} cache pages needed, {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        self._free.extend(pages)


class Pools:
    """Both pools, and the view of them that a model gets.

    Args:
        device: where they lie.

    Raises:
        CapacityError: the memory cannot be had.
    """

    def __init__(
        self,
        config: ModelConfig,
        dims: RankDims,
        *,
        num_requests: int,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        try:
            self.states = StatePool(config, dims, num_requests, dtype, device)
            self.pages = PagePool(config, num_tokens, dtype, device)
        except (MemoryError, RuntimeError) as exc:
            # torch reports a failed allocation as a RuntimeError.
            raise CapacityError(
                f"no memory for the states of {num_requests} requests and a cache of {num_tokens} tokens",
                reasons=[str(exc).splitlines()[0]],
                hint="load the model with a smaller max_requests or kv_tokens",
            ) from exc
        self.model_state = ModelState(kda=self.states.layers, mla=self.pages.layers)


def pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS)
