"""Where a model's weights, states and steps live: host memory, or one GPU. The only module that opens a GPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from k3port.errors import CapacityError, PlanError
from k3port.model.step import Step
from k3port.ops.segment import Segment

HOST = "cpu"
_ALIGNMENT = 16
"""Bytes: views of an uploaded buffer start where a kernel may read 16 bytes at once."""
_SEGMENT_TENSORS = ("cu_seqlens", "kv_lens", "slots", "block_table", "cache_rows")


@dataclass(frozen=True)
class Placement:
    """One device of this process.

    Attributes:
        device: where tensors are made.
        on_host: the model runs in host memory: weights may stay views of mapped files, and nothing is uploaded.
        name: product name of a GPU, for the first line of a run.
    """

    device: torch.device
    on_host: bool
    name: str = ""

    def upload(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Small host tensors as tensors of the device, in one transfer that the host does not wait for.

        They share one buffer, so all of them live as long as one of them does.
        """
        if self.on_host:
            return list(tensors)
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Page-locked memory is what lets the copy run beside the host; the allocator keeps it until the copy is done.
        staging = torch.empty(end, dtype=torch.uint8, pin_memory=self.device.type != HOST)
        for start, tensor in zip(starts, tensors, strict=True):
            if tensor.numel():
                staging[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        there = torch.empty_like(staging, device=self.device)
        there.copy_(staging, non_blocking=True)
        return [
            there[start : start + t.nbytes].view(t.dtype).view(t.shape)
            if t.numel()
            else torch.empty(t.shape, dtype=t.dtype, device=self.device)
            for start, t in zip(starts, tensors, strict=True)
        ]

    def step(self, step: Step, *more: torch.Tensor) -> tuple[Step, tuple[torch.Tensor, ...]]:
        """A step that was put together on the host, and further tensors, on the device: one transfer for all."""
        if self.on_host:
            return step, more
        tensors = [step.token_ids, step.logit_rows, *more]
        tensors += [getattr(segment, name) for segment in step.segments for name in _SEGMENT_TENSORS]
        placed = self.upload(tensors)
        segments: list[Segment] = []
        first = 2 + len(more)
        for number, segment in enumerate(step.segments):
            begin = first + number * len(_SEGMENT_TENSORS)
            own = placed[begin : begin + len(_SEGMENT_TENSORS)]
            segments.append(replace(segment, **dict(zip(_SEGMENT_TENSORS, own, strict=True))))
        return Step(placed[0], tuple(segments), placed[1]), tuple(placed[2:first])

    def peak_bytes(self) -> int | None:
        """Most bytes of device memory that tensors took since the device was opened; None on the host."""
        return None if self.device.type == HOST else torch.cuda.max_memory_allocated(self.device)

    def used_bytes(self) -> int | None:
        """Bytes of device memory that tensors take now; None on the host."""
        return None if self.device.type == HOST else torch.cuda.memory_allocated(self.device)

    def release(self) -> None:
        """Gives memory that no tensor holds back to the system."""
        gc.collect()
        if self.device.type != HOST:
            torch.cuda.empty_cache()


def open_placement(device: str, needed_bytes: int = 0) -> Placement:
    """Opens the device of a plan; on a GPU this makes the context, so nothing before a load may call it.

    Args:
        device: as torch names it: ``cpu``, or ``cuda:N`` for a GPU of either vendor.
        needed_bytes: what the plan says that the run will take; compared with what is free now.

    Raises:
        PlanError: the installed PyTorch does not see the GPU.
        CapacityError: others have taken the memory.
    """
    if device == HOST:
        return Placement(torch.device(HOST), on_host=True)
    found = torch.device(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = found.index or 0
    if index >= count:
        reasons = [f"PyTorch {torch.__version__} sees {count} GPUs, this run needs number {index}"]
        reasons += [str(warning.message).splitlines()[0] for warning in said]
        raise PlanError("PyTorch cannot use the GPU", reasons=reasons, hint="k3port doctor says why")
    try:
        free, _ = torch.cuda.mem_get_info(found)
        torch.cuda.reset_peak_memory_stats(found)
    except RuntimeError as exc:
        reason = str(exc).splitlines()[0]
        raise PlanError("the GPU cannot be started", reasons=[reason], hint="k3port doctor says why") from exc
    if needed_bytes > free:
        raise CapacityError(
            "not enough of the GPU's memory is free",
            reasons=[f"{free / 2**30:.1f} GiB are free, the run needs {needed_bytes / 2**30:.1f} GiB"],
            hint="end other programs that use it, or choose a GPU with CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES",
        )
    return Placement(found, on_host=False, name=torch.cuda.get_device_name(found))
