"""``python interpreted_run.py FOLDER``: a model with its plan for an H200, on the CPU in Triton's interpreter.

Prints one JSON document: the kernels of the plan, errors against the CPU's own plan, the tokens of both, and what the host
waited for. A process of its own, since Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from fake_machines import Card, look, nvidia_probe
from foreign_device import DEVICE, ForeignDevice
from model_runs import routed_error, run
from pretend_gpu import pretend_placement
from triton.runtime import interpreter

from k3port.ops.contract import relative_rms
from k3port.oracle.detect import TorchBuild
from k3port.plugins import make_registry
from k3port.runtime import prepare, runtime
from k3port.runtime.placement import Placement
from k3port.runtime.request import SamplingParams
from k3port.runtime.runtime import Runtime
from k3port.testing.interpreter import let_arguments_be_counts

IDS = [5, 9, 2, 77, 100, 31, 8, 64, 12, 3, 90]


def main(folder: Path) -> None:
    let_arguments_be_counts(interpreter)  # Triton 3.6
    with tempfile.TemporaryDirectory() as root:
        machine = look(Path(root), nvidia_probe(Card("GPU-0")), torch=TorchBuild("2.14.0+cu130", cuda="13.0"))
    prepare.detect_here = lambda registry: machine
    runtime.open_placement = pretend_placement
    common = {"registry": make_registry(entry_points=False), "kv_tokens": 256, "max_requests": 2, "threads": 1}
    here = Runtime.load(folder, dtype="float32", **common)
    gpu = {"platform": "h200", "allow_reference": True, **common}
    params = [
        SamplingParams(max_tokens=3, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=5, ignore_eos=True),
    ]
    prompts = [IDS[:6], IDS[6:8]]
    expected = here.logits(IDS)
    runtime.open_placement = lambda device, needed=0: Placement(DEVICE, on_host=False, name="labels")
    # On a device made of labels the wrappers of the kernels fail where they make a tensor on the host.
    with ForeignDevice() as mode, Runtime.load(folder, dtype="float32", prefill_chunk_tokens=5, **gpu) as there:
        kernels = {selection.slot: selection.kernel for selection in there.plan.selections}
        errors = {"one prefill": relative_rms(there.logits(IDS).cpu(), expected)}
        errors["chunks of 4"] = relative_rms(there.logits(IDS, chunk_tokens=4).cpu(), expected)
        mode.waits.clear()
        mine = [g.token_ids for g in there.generate(prompts, params)]
        waits = dict(mode.waits)
    runtime.open_placement = pretend_placement
    exact = run(Runtime.load(folder, dtype="float64", **common), IDS)
    plain = routed_error(Runtime.load(folder, dtype="bfloat16", **common), IDS, exact)
    with Runtime.load(folder, **gpu) as there:
        halves = {"dtype": there.plan.dtype, "error": routed_error(there, IDS, exact), "plain": plain}
    tokens = {"gpu": mine, "cpu": [g.token_ids for g in here.generate(prompts, params)]}
    print(json.dumps({"kernels": kernels, "errors": errors, "bfloat16": halves, "tokens": tokens, "waits": waits}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
