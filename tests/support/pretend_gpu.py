"""A GPU that is the CPU in truth: the paths of a run on a GPU (copies, uploads, pools) without one."""

from __future__ import annotations

import torch

from k3port.runtime.placement import Placement

PEAK = 1 << 28


class PretendPlacement(Placement):
    """Host memory behind the face of a GPU; ``uploads`` counts transfers."""

    uploads = 0

    def upload(self, tensors):  # type: ignore[no-untyped-def]
        type(self).uploads += 1
        return super().upload(tensors)

    def peak_bytes(self) -> int | None:
        return PEAK


def pretend_placement(device: str, needed_bytes: int = 0) -> Placement:
    """In place of ``open_placement``: GPUs are pretended, the host is itself."""
    del needed_bytes
    if device == "cpu":
        return Placement(torch.device("cpu"), on_host=True)
    return PretendPlacement(torch.device("cpu"), on_host=False, name="Pretend GPU")
