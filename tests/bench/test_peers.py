"""The kernels of fla-core as peers: pinned, called with what they take, right where they can run here, told if absent."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from k3port.testing.bench.peers import fla
from k3port.testing.bench.suite import make_args
from k3port.testing.bench.workload import Peer, PeerAbsent
from k3port.testing.bench.workloads import kda_core

ROOT = Path(__file__).parents[2]
# The extra dev brings it on Linux: there its absence is a failure.
NEEDS_FLA = pytest.mark.skipif(sys.platform != "linux", reason="fla-core needs Triton, which exists for Linux only")


def prefill_args() -> dict[str, Any]:
    return make_args(kda_core.case("prefill", 2, 20, 2, dim=16), torch.device("cpu"))


@NEEDS_FLA
def test_autotuners_keep_one_configuration() -> None:
    from triton.runtime.autotuner import Autotuner

    # Only modules that are imported have autotuners to pin; no other test must have done it.
    importlib.import_module("fla.ops.kda")
    chosen = fla.pin_autotuners("fla")
    assert any("chunk_kda" in name for name in chosen)
    assert all("num_warps" in text for text in chosen.values())
    tuners = list(fla._autotuners("fla", Autotuner))
    assert len(tuners) >= len(chosen) > 5
    assert all(len(tuner.configs) == 1 for tuner in tuners)
    assert fla.pin_autotuners("fla") == chosen, "pinning again changes nothing"


@NEEDS_FLA
def test_known_configurations_are_for_kernels_that_exist() -> None:
    importlib.import_module("fla.ops.kda")
    fla.pin_autotuners("fla")
    assert fla.FASTEST.keys() == fla.FASTEST_FEW.keys() <= fla._LISTS.keys()
    for heads in (96, 12):
        fla._pin_heads(heads)
        assert all(len(tuner.configs) == 1 for tuner, _ in fla._LISTS.values())


def test_a_known_configuration_is_taken_where_the_list_has_it() -> None:
    configs = [SimpleNamespace(kwargs={"BV": v}, num_warps=w, num_stages=2) for v in (32, 64) for w in (2, 4)]
    assert fla._pick(configs, {"BV": 64, "num_warps": 2}) is configs[2]
    assert fla._pick(configs, {"BV": 128}) is fla._pick(configs, {}) is fla._middle(configs)


def test_the_middle_configuration_with_four_warps_is_taken() -> None:
    configs = [SimpleNamespace(num_warps=w, key=i) for i, w in enumerate((1, 4, 4, 4, 8))]
    assert fla._middle(configs).key == 2
    assert fla._middle(configs[:1]).key == 0


@NEEDS_FLA
@pytest.mark.parametrize("peer", [fla.chunk_peer(), fla.step_peer()], ids=lambda peer: peer.name)
def test_the_package_gets_what_it_takes(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    from fla.ops import kda

    got: dict[str, Any] = {}

    def recorded(name: str) -> Any:
        signature = inspect.signature(inspect.unwrap(getattr(kda, name)))

        def function(**kwargs: Any) -> tuple[str, None]:
            signature.bind(**kwargs)
            got.update(kwargs)
            return "o", None

        return function

    names = ("chunk_kda", "fused_recurrent_kda")
    monkeypatch.setattr(fla, "_kda", lambda: SimpleNamespace(**{name: recorded(name) for name in names}))
    args = prefill_args()
    assert peer.prepare(args)() == "o"
    if "chunk" in peer.name:
        assert got["q"].shape == (1, 20, 2, 16)
        assert got["cu_seqlens"].tolist() == [0, 10, 20]
    else:
        assert got["q"].shape == (2, 10, 2, 16)
    assert torch.equal(got["initial_state"], args["state"][1:])
    assert got["state_v_first"]
    assert got["use_qk_l2norm_in_kernel"]


def test_raw_gates_are_computed_by_the_peer() -> None:
    args = {"q": torch.zeros(4, 2, 8), "gate_raw": torch.zeros(4, 16), "beta_logit": torch.zeros(4, 2)}
    found = fla._decays({**args, "A_log": 1, "dt_bias": torch.zeros(16), "lower_bound": -5.0})
    assert found["g"].shape == (1, 4, 2, 8)
    assert found["use_gate_in_kernel"]
    assert found["use_beta_sigmoid_in_kernel"]


def test_sequence_ends_are_one_object_per_shape() -> None:
    """The package keeps its tables by identity: copies of the buffers must not make it build them anew."""
    assert fla._cu_seqlens((3, 4), "cpu")[0] is fla._cu_seqlens((3, 4), "cpu")[0]


def test_an_absent_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fla._kda.cache_clear()
    monkeypatch.setitem(sys.modules, "fla.ops.kda", None)
    with pytest.raises(PeerAbsent, match="fla-core cannot be imported"):
        fla.chunk_peer().prepare(prefill_args())


@NEEDS_FLA
def test_the_step_agrees_with_the_contract() -> None:
    if Version(version("triton")) < Version("3.7"):
        pytest.skip("the interpreter of Triton 3.6 cannot run this kernel's loop with NumPy 2.4")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("interpreted_step.py"))],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-5
