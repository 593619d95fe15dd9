"""Every mistake of the parity data's list, planted one at a time, fails the checks that are named for it.

Without the mistake the same checks pass: they are those of the golden and parity tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import op_goldens
import pytest
import torch
from builtin_kernels import KERNELS, runnable
from mistakes import MISTAKES, RIGHT
from mla_layer import check_mla_layer
from model_goldens import K3_CHECKS, PROMPT, check_linear_logits
from model_parity import PROMPT_BOUND, expected
from model_runs import DEFAULT, REFERENCE, load_runtime, run
from shared_data import has_shared, shared

from k3port.ops.contract import relative_rms
from k3port.testing.harness import build_kernel

Checks = list[tuple[str, Callable[[], object]]]


@pytest.fixture(scope="module")
def folders(tiny_k3_folder: Path, tiny_linear_folder: Path) -> dict[str, Path]:
    return {"k3": tiny_k3_folder, "linear": tiny_linear_folder}


def checks_named(name: str, folders: dict[str, Path]) -> Checks:
    """A check on everything that it applies to: every kernel of an op, every plan of a model, one step and many."""
    kind, _, rest = name.partition(": ")
    if kind == "op":
        op, phase, check = op_goldens.CHECKS[rest]
        specs = runnable(op, phase, torch.float64)
        assert specs
        return [
            (spec.name, lambda spec=spec: check(build_kernel(spec, KERNELS, phase), torch.float64)) for spec in specs
        ]
    if kind == "layer":
        cases = [(references, decode) for references in (True, False) for decode in (False, True)]
        return [(f"references {r}, decode {d}", lambda r=r, d=d: check_mla_layer(r, d)) for r, d in cases]
    model_check = K3_CHECKS[rest] if kind == "k3" else check_linear_logits
    splits = [None, [1] * 6] if rest == "logits" else [None]

    def on_model(plan: str, split: list[int] | None) -> object:
        return model_check(run(load_runtime(folders[kind], "float64", plan), PROMPT, split))

    return [
        (f"{plan} plan, steps {split or 'one'}", lambda plan=plan, split=split: on_model(plan, split))
        for plan in (REFERENCE, DEFAULT)
        for split in splits
    ]


def test_the_table_is_the_published_list() -> None:
    assert len(MISTAKES) == 24
    if has_shared("parity/mutations.json"):
        assert set(MISTAKES) == set(json.loads(shared("parity/mutations.json").read_text()))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_caught(mistake: str, folders: dict[str, Path]) -> None:
    plant, names = MISTAKES[mistake]
    for name in names:
        for where, check in checks_named(name, folders):
            check()
            with plant() as calls:
                caught = True
                try:
                    check()
                    caught = False
                except AssertionError:
                    pass
                assert calls.count, f"{mistake}: the planted code did not run in {name} ({where})"
            assert caught, f"{mistake}: {name} ({where}) does not see it"
            check()


@pytest.mark.parametrize("op", RIGHT)
def test_the_planted_functions_are_right_without_a_mistake(op: str, folders: dict[str, Path]) -> None:
    names = [f"op: {name}" for name, (golden_op, *_) in op_goldens.CHECKS.items() if golden_op == op]
    assert names
    with RIGHT[op]() as calls:
        for name in [*names, "k3: logits", "k3: states", "linear: logits"]:
            for _, check in checks_named(name, folders):
                check()
        assert calls.count


def test_every_operator_golden_catches_some_mistake() -> None:
    """Goldens that no mistake of the list needs are named here, so that none is there by accident."""
    used = {name.partition(": ")[2] for _, names in MISTAKES.values() for name in names if name.startswith("op: ")}
    assert set(op_goldens.CHECKS) - used == {
        "router groups",
        "norm epsilons",
        "gated norm",
        "sampling",
        "KDA block, prefill",
        "KDA block, decode",
    }


@cache
def clean_logits(checkpoint: str) -> torch.Tensor:
    return load_runtime(shared(f"parity/{checkpoint}"), "float64").logits(
        expected(checkpoint, 65)["input_ids"].tolist()
    )


@pytest.mark.parametrize("checkpoint", ["tiny-k3", "tiny-kimi-linear"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_moves_the_logits_as_published(mistake: str, checkpoint: str) -> None:
    """In float64 the effect is the published one, so the planted mistake is the one that is meant."""
    published = json.loads(shared("parity/mutations.json").read_text())[mistake].get(checkpoint)
    if published is None:
        pytest.skip("this checkpoint does not have the part that the mistake is in")
    data, clean = expected(checkpoint, 65), clean_logits(checkpoint)
    assert relative_rms(clean, data["logits"]) <= PROMPT_BOUND
    with MISTAKES[mistake][0]() as calls:
        wrong = load_runtime(shared(f"parity/{checkpoint}"), "float64").logits(data["input_ids"].tolist())
        assert calls.count
    effect = relative_rms(wrong, clean)
    assert effect == pytest.approx(published["rel"], rel=0.02)
    # Whatever moves the logits by more than the bound is also caught by the parity of whole prompts.
    if effect > 2 * PROMPT_BOUND:
        assert relative_rms(wrong, data["logits"]) > PROMPT_BOUND
