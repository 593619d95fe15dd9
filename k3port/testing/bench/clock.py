"""Where time comes from: events of a GPU's stream, or the wall clock of the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from k3port.errors import ExitCode, K3Error

Run = Callable[[], object]


class NoDeviceError(K3Error):
    """There is no device that could be measured."""

    exit_code = ExitCode.UNSUPPORTED


class CannotCapture(Exception):
    """These calls do not go into a graph; the text says why."""


class Clock(Protocol):
    """Times work on one device."""

    device: torch.device

    def sync(self) -> None:
        """Returns when all work on the device is done."""
        ...

    def elapsed(self, run: Run) -> float:
        """Seconds from the start of ``run`` until the device has done what ``run`` gave it."""
        ...

    def host_time(self, run: Run) -> float:
        """Seconds until ``run`` returns, whatever the device still has to do: what the caller pays."""
        ...

    def capture(self, runs: Sequence[Run]) -> Run:
        """A function that repeats the device work of all ``runs`` with one launch.

        Raises:
            CannotCapture: they cannot be captured.
        """
        ...

    def launches(self, run: Run) -> tuple[str, ...] | None:
        """Names of the kernels that ``run`` starts on the device; None where they cannot be seen."""
        ...


class CpuClock:
    """The wall clock. A CPU has no graphs and no launches."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def sync(self) -> None:
        pass

    def elapsed(self, run: Run) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def host_time(self, run: Run) -> float:
        return self.elapsed(run)

    def capture(self, runs: Sequence[Run]) -> Run:
        raise CannotCapture("the CPU has no graphs")

    def launches(self, run: Run) -> tuple[str, ...] | None:
        return None


class GpuClock:
    """Events on the current stream of one GPU; CUDA and HIP alike, through PyTorch.

    Raises:
        NoDeviceError: PyTorch sees no GPU.
    """

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise NoDeviceError(
                "no GPU to measure on",
                reasons=[f"PyTorch {torch.__version__} sees none"],
                hint="k3port doctor says which devices there are; kernels are measured where they run",
            )
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)

    def sync(self) -> None:
        torch.cuda.synchronize(self.device)

    def elapsed(self, run: Run) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def host_time(self, run: Run) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def capture(self, runs: Sequence[Run]) -> Run:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        # What the calls return is kept until all are recorded: results that took turns in one small buffer would be
        # overwritten in the cache and never reach memory.
        kept: list[object] = []
        try:
            with torch.cuda.graph(graph):
                kept.extend(run() for run in runs)
        except Exception as exc:
            # A capture that fails half way leaves its own stream as the current one, and the generator of random
            # numbers waiting for its end: one that succeeds ends that too.
            torch.cuda.set_stream(stream)
            self.sync()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=self.device)
            raise CannotCapture(f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}") from exc
        return graph.replay

    def launches(self, run: Run) -> tuple[str, ...] | None:
        from torch.profiler import DeviceType, ProfilerActivity, profile

        self.sync()
        try:
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                run()
                self.sync()
        except RuntimeError:
            # The driver may keep its counters to itself; times need none.
            return None
        events = profiler.events()
        names = tuple(event.name for event in events or () if event.device_type == DeviceType.CUDA)
        return names or None
