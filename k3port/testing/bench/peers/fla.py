"""The KDA kernels of fla-core (flash-linear-attention 0.6.0) as peers.

Its autotuner would try for minutes, and again for every shape. Each of its kernels is pinned to one configuration of
its own list, the one in the middle: typical, and the same in every run. :func:`pinned` says which.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from k3port.testing.bench.workload import Args, Peer, PeerAbsent

_PINNED: dict[str, str] = {}


def pinned() -> dict[str, str]:
    """Configuration by kernel of fla-core, for the receipt; empty before the first peer was prepared."""
    return dict(_PINNED)


@functools.cache
def _kda() -> Any:
    """The package's KDA module with its autotuners pinned.

    Raises:
        PeerAbsent: it is not installed, or does not work here.
    """
    try:
        module = importlib.import_module("fla.ops.kda")
    except Exception as exc:
        # A missing compiler or driver shows as almost any exception at import.
        raise PeerAbsent(f"fla-core cannot be imported: {type(exc).__name__}: {exc}"[:200]) from exc
    _PINNED.update(pin_autotuners("fla"))
    return module


def pin_autotuners(package: str) -> dict[str, str]:
    """Leaves every Triton autotuner of a package's imported modules one configuration; what it is, by kernel."""
    from triton.runtime.autotuner import Autotuner

    chosen: dict[str, str] = {}
    for tuner in _autotuners(package, Autotuner):
        tuner.configs = [_middle(tuner.configs)]
        tuner.cache.clear()
        chosen[tuner.base_fn.__name__] = str(tuner.configs[0])
    return chosen


def _middle(configs: list[Any]) -> Any:
    """The one in the middle of the configurations with four warps, where there are any."""
    usual = [config for config in configs if config.num_warps == 4] or configs
    return usual[len(usual) // 2]


def _autotuners(package: str, kind: type) -> Iterator[Any]:
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if module is None or not (name == package or name.startswith(package + ".")):
            continue
        for value in list(vars(module).values()):
            # Heuristics and the like hold the next layer in fn.
            while value is not None and not isinstance(value, kind) and type(value).__module__.startswith("triton"):
                value = getattr(value, "fn", None)
            if isinstance(value, kind) and id(value) not in seen:
                seen.add(id(value))
                yield value


@functools.lru_cache(maxsize=64)
def _cu_seqlens(lengths: tuple[int, ...], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """On the device and on the CPU. One object per shape: fla-core keeps its chunk tables by identity, and a table that
    it has to make new reads the device from the host, which no graph can hold."""
    host = torch.tensor((0, *lengths), dtype=torch.int64).cumsum(0)
    return host.to(device), host


def _decays(args: Args) -> dict[str, Any]:
    """The gate in the kernel where the contract hands over raw numbers, else the decays as they are."""
    if "g" in args:
        return {"g": args["g"].unsqueeze(0), "beta": args["beta"].unsqueeze(0)}
    heads = args["q"].shape[1]
    return {
        "g": args["gate_raw"].reshape(1, -1, heads, args["q"].shape[2]),
        "beta": args["beta_logit"].unsqueeze(0),
        "A_log": args["A_log"],
        "dt_bias": args["dt_bias"].flatten(),
        "lower_bound": args["lower_bound"],
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }


def _common(args: Args) -> dict[str, Any]:
    return {
        **{name: args[name].unsqueeze(0) for name in ("q", "k", "v")},
        **_decays(args),
        # fla-core's states are dense, ours lie in slots: the copy is made outside the timing.
        "initial_state": args["state"][args["segment"].slots].contiguous(),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "state_v_first": True,
    }


def chunk_peer(safe_gate: bool = True) -> Peer:
    """``fla.ops.kda.chunk_kda``. All our decays are bounded by -5: ``safe_gate`` lets it use faster products."""

    def prepare(args: Args) -> Callable[[], Any]:
        function, given = _kda().chunk_kda, _common(args)
        lengths = args["segment"].lengths
        if len(lengths) > 1:
            device, host = _cu_seqlens(lengths, str(args["q"].device))
            given |= {"cu_seqlens": device, "cu_seqlens_cpu": host}
        given["safe_gate"] = safe_gate

        return lambda: function(**given)[0]

    return Peer("fla chunk_kda", prepare, note=lambda: "one configuration per kernel, not tuned")


def step_peer() -> Peer:
    """``fla.ops.kda.fused_recurrent_kda`` on one token per request."""

    def prepare(args: Args) -> Callable[[], Any]:
        function, given = _kda().fused_recurrent_kda, _common(args)
        # One token each: the batch axis in place of a packed one, which saves it the look-up of sequence ends.
        for name in ("q", "k", "v", "g", "beta"):
            given[name] = given[name].transpose(0, 1)

        return lambda: function(**given)[0]

    return Peer("fla fused_recurrent_kda", prepare)
