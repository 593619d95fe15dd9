"""The whole model on this machine's GPU: the same numbers as on the CPU, and what the command says and leaves behind.

Skipped without a GPU. References are allowed, so ops without a built kernel run too; ``-s`` shows the plan and every
measured error. Run it with ``python -m pytest tests/gpu -s``.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import PROMPT_BOUND, expected
from model_runs import load_runtime, routed_error, run
from shared_data import shared

from k3port.cli.inputs import embedded_checkpoint
from k3port.cli.preview import plan_lines
from k3port.ops.contract import map_tensors, relative_rms
from k3port.plugins import default_registry
from k3port.runtime.choice import recognised
from k3port.runtime.placement import open_placement
from k3port.runtime.prepare import detect_here, prepare
from k3port.runtime.request import SamplingParams
from k3port.runtime.runtime import Runtime

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")

ROOT = Path(__file__).parents[2]
MODELS = ("k3-nano", "tiny-k3", "tiny-kimi-linear", "synthetic-k3", "synthetic-linear")
IDS = [(17 * i + 5) % 120 + 3 for i in range(90)]
PROMPTS = [IDS[:5], IDS[:70], [9], IDS[20:33]]
BFLOAT16_FACTOR = 2.0
"""bfloat16 on the GPU may be so many times as far from the float64 numbers as plain bfloat16 on the CPU is, with the
experts that the float64 run chose: which way a router's near tie falls is chance."""


@pytest.fixture(scope="session")
def folder(tiny_k3_folder: Path, tiny_linear_folder: Path) -> Callable[[str], Path]:
    def find(model: str) -> Path:
        if model == "k3-nano":
            return embedded_checkpoint()
        if model.startswith("synthetic-"):
            return tiny_k3_folder if model == "synthetic-k3" else tiny_linear_folder
        return shared(f"parity/{model}")

    return find


@cache
def platform() -> str:
    """The platform of this machine's GPU; skips where there is none that k3port knows."""
    registry = default_registry()
    found, why = recognised(registry, detect_here(registry), ())
    if found is None:
        pytest.skip(f"the GPU is no platform that k3port knows: {why}")
    return found.name


def on_gpu(place: Path, dtype: str, **options: Any) -> Runtime:
    common = {"kv_tokens": 2048, "max_requests": 4, "allow_reference": True}
    return Runtime.load(place, platform=platform(), dtype=dtype, **{**common, **options})


@pytest.fixture(params=MODELS)
def place(request: pytest.FixtureRequest, folder: Callable[[str], Path]) -> Path:
    return folder(request.param)


@pytest.fixture
def gpu(place: Path) -> Iterator[Runtime]:
    with on_gpu(place, "float32", prefill_chunk_tokens=32) as runtime:
        yield runtime


def tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(value, lambda tensor: found.append(tensor) or tensor)
    return found


# Numbers.


def test_float32_logits_are_those_of_the_cpu(gpu: Runtime, place: Path) -> None:
    print("", *plan_lines(gpu.plan), sep="\n")
    device = gpu.placement.device
    assert not gpu.placement.on_host
    assert all(t.device == device for t in tensors([gpu.pools.model_state.kda, gpu.pools.model_state.mla]))
    assert all(t.device == device for t in tensors(dict(gpu.weights.params)))
    cpu = load_runtime(place).logits(IDS)
    whole = gpu.logits(IDS)
    assert whole.device == device and whole.dtype == torch.float32
    for what, logits in (("one prefill", whole), ("chunks of 7", gpu.logits(IDS, chunk_tokens=7))):
        error = relative_rms(logits.cpu(), cpu)
        print(f"{place.name} float32, {what}: relative RMS {error:.2e} (bound {PROMPT_BOUND:.0e})")
        assert error < PROMPT_BOUND, what
    assert torch.equal(whole.argmax(-1).cpu(), cpu.argmax(-1))


def test_bfloat16_logits_are_as_near_as_those_of_the_cpu(place: Path) -> None:
    exact = run(load_runtime(place, "float64"), IDS)
    plain = routed_error(load_runtime(place, "bfloat16", "reference"), IDS, exact)
    with on_gpu(place, "bfloat16") as runtime:
        error = routed_error(runtime, IDS, exact)
    print(f"{place.name} bfloat16: relative RMS {error:.2e}, plain bfloat16 on the CPU {plain:.2e}")
    assert error < BFLOAT16_FACTOR * plain


@pytest.mark.parametrize("checkpoint", ["tiny-k3", "tiny-kimi-linear"])
def test_parity_data(checkpoint: str, folder: Callable[[str], Path]) -> None:
    """Results of the official code: a prompt's logits, then sixteen greedy tokens."""
    with on_gpu(folder(checkpoint), "float32") as runtime:
        for length in (1, 5, 64, 65, 200):
            data = expected(checkpoint, length)
            prompt, chosen = data["input_ids"].tolist(), data["greedy_ids"].tolist()
            error = relative_rms(runtime.logits(prompt).cpu(), data["logits"])
            print(f"{checkpoint}, {length} tokens: relative RMS {error:.2e}")
            assert error < PROMPT_BOUND
            params = SamplingParams(max_tokens=len(chosen), temperature=0, ignore_eos=True)
            assert list(runtime.generate([prompt], params)[0].token_ids) == chosen


# Generation.


def test_greedy_tokens_are_those_of_the_cpu(gpu: Runtime, place: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    cpu = load_runtime(place, max_requests=4)
    mine = [g.token_ids for g in gpu.generate(PROMPTS, params)]
    assert mine == [g.token_ids for g in cpu.generate(PROMPTS, params)]
    assert mine == [gpu.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    # Prefill in chunks and decode with the cache agree with one prefill of everything.
    logits = gpu.logits([*PROMPTS[1], *mine[1]])
    assert logits.argmax(-1).tolist()[len(PROMPTS[1]) - 1 : -1] == list(mine[1])


def test_drawn_tokens_are_those_of_the_cpu(gpu: Runtime, place: Path) -> None:
    params = [
        SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.0, top_k=20, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=1.2, min_p=0.05, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=12, temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, seed=6, ignore_eos=True),
    ]
    cpu = load_runtime(place, max_requests=4)
    assert [g.token_ids for g in gpu.generate(PROMPTS, params)] == [g.token_ids for g in cpu.generate(PROMPTS, params)]


def test_a_number_that_is_not_finite_is_named(folder: Callable[[str], Path]) -> None:
    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x.float() @ weight.float().T) * torch.nan

    with on_gpu(folder("synthetic-k3"), "float32", overrides={"logits": broken}) as runtime:
        (answer,) = runtime.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert answer.finish_reason == "error"
    assert "first in op logits" in answer.error


# The device.


def test_a_step_is_uploaded_without_waiting(folder: Callable[[str], Path]) -> None:
    from k3port.model.step import Step
    from k3port.ops.segment import make_segment

    place = open_placement("cuda:0")
    segment = make_segment("prefill", [3], [1], [0], [[1, 4]])
    step = Step(torch.arange(3), (segment,), torch.tensor([2]))
    place.step(step)  # the first one allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        placed, (more,) = place.step(step, torch.rand(4, dtype=torch.float64))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, theirs in zip(tensors(placed), tensors(step), strict=True):
        assert mine.device.type == "cuda" and torch.equal(mine.cpu(), theirs)
    assert more.dtype == torch.float64


def test_closing_gives_the_memory_back(folder: Callable[[str], Path]) -> None:
    def once() -> tuple[int, int]:
        with on_gpu(folder("k3-nano"), "bfloat16") as runtime:
            runtime.generate([IDS[:40]], SamplingParams(max_tokens=4, ignore_eos=True))
            loaded = sum(runtime.weights.bytes_by_kind.values())
            assert torch.cuda.memory_allocated() > loaded > 1 << 20
            peak = runtime.placement.peak_bytes()
            assert peak is not None and peak >= torch.cuda.memory_allocated()
        return loaded, torch.cuda.memory_allocated()

    loaded, first = once()  # libraries keep a workspace from their first call on
    _, second = once()
    print(f"allocated after the first run {first}, after the second {second}, weights {loaded}")
    assert second <= first
    assert torch.cuda.memory_reserved() - second < loaded + (64 << 20)


# The command.


def k3port(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k3port", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def gaps() -> list[str]:
    """Slots of the embedded model that no kernel fills without references."""
    found = prepare(embedded_checkpoint(), platform=platform(), allow_reference=True)
    names = {spec.name for spec in found.registry.kernels if spec.fallback}
    return sorted({s.op for s in found.plan.selections if s.kernel in names})


def test_the_command_runs_with_references() -> None:
    common = ("run", "The kernel", "-n", 8, "--greedy", "--ignore-eos", "--platform", platform(), "--allow-reference")
    done = k3port(*common, "--json")
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["plan"]["platform"], document["plan"]["dtype"]) == (platform(), "bfloat16")
    assert len(document["token_ids"]) == 8 and document["text"]
    assert document["timings"]["peak_device_bytes"] > 1 << 20
    assert "GiB on the GPU" in done.stderr.splitlines()[-1]
    banner = [line for line in done.stderr.splitlines() if " run on references on " in line]
    assert len(banner) == bool(gaps())
    plain = k3port(*common)
    assert (plain.returncode, plain.stdout.rstrip("\n")) == (0, document["text"].rstrip("\n"))


def test_without_leave_the_command_refuses_and_says_how() -> None:
    slow = gaps()
    if not slow:
        pytest.skip("every op has a built kernel here")
    done = k3port("run", "The kernel", "-n", 2, "--platform", platform())
    assert (done.returncode, done.stdout) == (3, "")
    assert f"error: no kernel for {platform()} is built for " in done.stderr
    assert "hint: --allow-reference runs slow references there" in done.stderr
    idle = k3port("run", "The kernel", "-n", 2, "--greedy")
    assert idle.returncode == 0
    assert f"--platform {platform()} --allow-reference runs there, with references" in idle.stderr
    taken = k3port("run", "The kernel", "-n", 2, "--greedy", "--allow-reference")
    assert taken.returncode == 0
    assert f"{platform()} (bfloat16)" in taken.stderr


LOOKS = [
    "pass",
    "main(['plan', '--platform', PLATFORM]); main(['plan', '--platform', PLATFORM, '--allow-reference'])",
    "main(['doctor']); main(['doctor', '--platform', PLATFORM])",
    "main(['run', '--dry-run', '--platform', PLATFORM, '--allow-reference']); main(['run', '--dry-run'])",
    "main(['kernels', 'explain', 'kda', '--platform', PLATFORM])",
]


@pytest.mark.parametrize("look", LOOKS)
def test_b09_looking_starts_no_gpu(look: str) -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests/support'); import k3port; from k3port.cli.main import main\n"
        f"PLATFORM = {platform()!r}\n{look}\n"
        "from gpu_context import traces\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert not traces(), traces()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_b09_a_started_gpu_would_be_seen() -> None:
    """The check above can fail: torch leaves traces."""
    code = (
        "import sys; sys.path.insert(0, 'tests/support'); import torch; torch.zeros(1, device='cuda')\n"
        "from gpu_context import traces; sys.exit(0 if traces() else 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=300).returncode == 0


def test_the_plan_prefers_built_kernels(folder: Callable[[str], Path]) -> None:
    """A reference only runs where no kernel that fits is built."""
    found = prepare(folder("k3-nano"), platform=platform(), allow_reference=True)
    strict = prepare_strictly(folder("k3-nano"))
    for selection in found.plan.selections:
        if "a reference, allowed" in selection.reason:
            assert selection.slot in strict, selection.slot
    print("on references:", ", ".join(gaps()) or "nothing")


def prepare_strictly(place: Path) -> set[str]:
    """Slots without a kernel where references are not allowed, as the error names them."""
    from k3port.errors import PlanError

    try:
        prepare(place, platform=platform())
    except PlanError as exc:
        return set(exc.message.partition(" is built for ")[2].split(", "))
    return set()


def test_records_of_a_run_name_the_gpu(folder: Callable[[str], Path]) -> None:
    with on_gpu(folder("k3-nano"), "bfloat16") as runtime:
        assert runtime.placement.name == torch.cuda.get_device_name(runtime.placement.device)
        assert runtime.placement.device.type == "cuda"
        assert dataclasses.asdict(runtime.plan)["platform"] == platform()
