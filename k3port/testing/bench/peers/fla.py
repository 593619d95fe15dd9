"""The KDA kernels of fla-core (flash-linear-attention 0.6.0) as peers.

Its autotuner would try for minutes, and again for every shape. Each of its kernels is pinned to one configuration of
its own list: to the fastest one where we have looked for it (:data:`FASTEST`), else to the one in the middle.
:func:`pinned` says which.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from k3port.testing.bench.workload import Args, Peer, PeerAbsent

FASTEST: Mapping[str, Mapping[str, int]] = {
    "l2norm_fwd_kernel": {"BT": 8, "num_warps": 1},
    "chunk_kda_fwd_kernel_intra_sub_chunk": {"num_warps": 1, "num_stages": 3},
    "chunk_kda_fwd_kernel_inter_solve_fused": {"BK": 32, "num_warps": 1},
    "chunk_gla_fwd_kernel_o": {"BK": 64, "BV": 128, "num_warps": 4, "num_stages": 2},
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 64, "num_warps": 4, "num_stages": 2},
}
"""The fastest configuration of a kernel on an H200, by the time of the kernel alone, of up to 14 of its list. Measured
on 2026-12-01 (torch 2.11, Triton 3.6, 96 heads with 8192 tokens); the lists depend on the device."""
FASTEST_FEW = {**FASTEST, "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": {"BV": 32, "num_warps": 4, "num_stages": 4}}
"""The same for 12 heads with 65536 tokens."""
FEW_HEADS = 48

_PINNED: dict[str, str] = {}
_LISTS: dict[str, tuple[Any, list[Any]]] = {}


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
        name = tuner.base_fn.__name__
        _, configs = _LISTS.setdefault(name, (tuner, tuner.configs))
        tuner.configs = [_pick(configs, FASTEST.get(name, {}))]
        tuner.cache.clear()
        chosen[name] = str(tuner.configs[0])
    return chosen


def _pin_heads(heads: int) -> None:
    """Pins the kernels whose best configuration depends on the number of heads."""
    for name in FASTEST:
        if FASTEST[name] != FASTEST_FEW[name] and name in _LISTS:
            tuner, configs = _LISTS[name]
            many, few = _pick(configs, FASTEST[name]), _pick(configs, FASTEST_FEW[name])
            tuner.configs = [few if heads < FEW_HEADS else many]
            tuner.cache.clear()
            _PINNED[name] = f"{many}; with fewer than {FEW_HEADS} heads {few}"


def _pick(configs: list[Any], wanted: Mapping[str, int]) -> Any:
    """The first configuration with these values; the middle one where none has, or nothing is wanted."""
    for config in configs:
        given = {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}
        if wanted and wanted.items() <= given.items():
            return config
    return _middle(configs)


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
    """The raw numbers: its kernels have the gate inside, as ours have."""
    return {
        "g": args["gate_raw"].unflatten(1, args["q"].shape[1:]).unsqueeze(0),
        "beta": args["beta_logit"].unsqueeze(0),
        "A_log": args["A_log"],
        "dt_bias": args["dt_bias"],
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
        _pin_heads(args["q"].shape[1])
        lengths = args["segment"].lengths
        if len(lengths) > 1:
            device, host = _cu_seqlens(lengths, str(args["q"].device))
            given |= {"cu_seqlens": device, "cu_seqlens_cpu": host}
        given["safe_gate"] = safe_gate

        return lambda: function(**given)[0]

    return Peer("fla chunk_kda", prepare, note=lambda: "one configuration per kernel: see the receipt")


def step_peer() -> Peer:
    """``fla.ops.kda.fused_recurrent_kda`` on requests of one length. Of drafts it gives the state after the last one in
    place of a record."""

    def prepare(args: Args) -> Callable[[], Any]:
        function, given = _kda().fused_recurrent_kda, _common(args)
        _pin_heads(args["q"].shape[1])
        # The batch axis in place of a packed one, which saves it the look-up of sequence ends.
        for name in ("q", "k", "v", "g", "beta"):
            given[name] = given[name].squeeze(0).unflatten(0, (len(args["segment"].lengths), -1))

        return lambda: function(**given)[0]

    return Peer("fla fused_recurrent_kda", prepare)
