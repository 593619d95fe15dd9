"""A clock that invents times and writes down what it was asked, and small things to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from k3port.oracle.spec import Device, KernelSpec, Target
from k3port.testing.bench.ceilings import Ceilings
from k3port.testing.bench.clock import CannotCapture, CpuClock
from k3port.testing.bench.suite import Bench
from k3port.testing.bench.timing import Settings
from k3port.testing.bench.workload import Case, Peer, PeerAbsent, Workload, no_peers

SHORT = Settings(rounds=3, sample_seconds=1e-6, warmup_seconds=0.0)
CEILINGS = Ceilings(4e12, 7e14, 2**32, 8192)


class FakeClock:
    """Each call takes what its name says: ``log`` has every call in order, captured ones with a ``*``."""

    def __init__(self, eager: dict[str, float], captured: dict[str, float] | None = None) -> None:
        self.device = torch.device("cpu")
        self.eager, self.replayed = eager, captured or {}
        self.log: list[str] = []
        self.samples: list[list[str]] = []
        self._in_graph = False

    def call(self, name: str, copy: int = 0) -> Callable[[], str]:
        def run() -> str:
            self.log.append(f"{name}{copy}{'*' if self._in_graph else ''}")
            return name

        return run

    def sync(self) -> None:
        self.log.append("sync")

    def elapsed(self, run: Callable[[], object]) -> float:
        before = len(self.log)
        run()
        calls = [entry for entry in self.log[before:] if entry != "sync"]
        self.samples.append(calls)
        times = self.replayed if calls and calls[0].endswith("*") else self.eager
        return sum(times[entry.rstrip("*").rstrip("0123456789")] for entry in calls)

    def host_time(self, run: Callable[[], object]) -> float:
        return self.elapsed(run) / 2

    def capture(self, runs: Sequence[Callable[[], object]]) -> Callable[[], object]:
        if not self.replayed:
            raise CannotCapture("no graphs here")

        def replay() -> None:
            self._in_graph = True
            for run in runs:
                run()
            self._in_graph = False

        return replay

    def launches(self, run: Callable[[], object]) -> tuple[str, ...] | None:
        return None


def cpu_bench(kernels: Sequence[KernelSpec], *names: str, peers: bool = True, **fields: Any) -> Bench:
    """A bench on this CPU with times that are as good as none."""
    target = Target("here", Device("cpu", "x86_64", "a CPU", "detected"))
    return Bench(
        clock=fields.pop("clock", CpuClock()),
        target=target,
        ceilings=CEILINGS,
        kernels=kernels,
        settings=fields.pop("settings", SHORT),
        names=frozenset(names),
        peers=peers,
        cold_bytes=fields.pop("cold_bytes", 1),
        **fields,
    )


def rms_workload(
    peers: Iterable[Peer] = (), tokens: int = 5, dim: int = 32, dtype: torch.dtype = torch.bfloat16
) -> Workload:
    """RMSNorm at one small shape."""

    def make(device: torch.device, gen: torch.Generator) -> dict[str, Any]:
        x = torch.randn(tokens, dim, device=device, generator=gen).to(dtype)
        return {"x": x, "weight": torch.ones(dim, device=device).to(dtype), "eps": 1e-5}

    case = Case(f"T{tokens}", {"T": tokens, "D": dim}, make, quick=True)
    found = tuple(peers)
    return Workload("rms_norm", None, (case,), (lambda *_: found) if found else no_peers, dtype=dtype)


def toy_kernel(name: str, function: str, op: str = "rms_norm", **fields: Any) -> KernelSpec:
    """A kernel of this module."""
    return KernelSpec(name=name, op=op, load=f"bench_parts:{function}", doc="for tests", **fields)


def right(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def off_by_a_percent(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Wrong everywhere by more than the tolerance."""
    return (right(x, weight, eps).float() * 1.01).to(x.dtype)


def one_wrong(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One number of the result is wrong."""
    y = right(x, weight, eps)
    y[-1, -1] += 0.5
    return y


def with_a_hole(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The last row is never written."""
    y = torch.empty_like(x)
    y[:-1] = right(x[:-1], weight, eps)
    return y


def beside(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Writes behind the end of its result."""
    y = torch.empty_like(x)
    y.as_strided((x.numel() + 1,), (1,), y.storage_offset())[-1] = 1.0
    return y.copy_(right(x, weight, eps))


def failing(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Cannot do what it says."""
    raise RuntimeError("out of shared memory\nmore lines")


def absent_peer() -> Peer:
    """A peer whose package is missing."""

    def absent(args: object) -> Callable[[], Any]:
        raise PeerAbsent("it is not installed")

    return Peer("nobody", absent)
