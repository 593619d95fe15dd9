"""Checks of whole checkpoints against ``../shared/parity``: results of the official code for the same weights."""

from __future__ import annotations

import torch
from model_runs import Run, run
from shared_data import shared_tensors

from k3port.model.config import ModelConfig
from k3port.ops.contract import relative_rms
from k3port.runtime.runtime import Runtime

CHECKPOINTS = ("tiny-k3", "tiny-kimi-linear")
LENGTHS = (1, 2, 5, 63, 64, 65, 130, 200)
STATE_LENGTH = 65
SHORT_LENGTHS = (1, 2, 5)

PROMPT_BOUND = 6e-6
"""Relative RMS over a prompt, in float32 and (since the files are float32) in float64."""
POSITION_BOUND = 3e-5
"""Relative RMS of one position's logits; single positions can be ill-conditioned."""
INNER_BOUND = 1e-5
"""Residuals, sublayer outputs, final mixtures, states."""


def expected(checkpoint: str, length: int) -> dict[str, torch.Tensor]:
    return shared_tensors(f"parity/{checkpoint}/expected/prompt_len{length:04d}.safetensors")


def bounded(actual: torch.Tensor, wanted: torch.Tensor, bound: float, what: str) -> float:
    assert actual.shape == wanted.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(wanted.shape)}"
    error = relative_rms(actual, wanted)
    assert error <= bound, f"{what}: relative RMS error {error:.2e} above {bound:.0e}"
    return error


def check_logits(logits: torch.Tensor, wanted: torch.Tensor, what: str) -> tuple[float, float]:
    """Whole prompt and each position; returns the two worst errors."""
    whole = bounded(logits, wanted, PROMPT_BOUND, what)
    each = [
        bounded(a, b, POSITION_BOUND, f"{what}, position {t}")
        for t, (a, b) in enumerate(zip(logits, wanted, strict=True))
    ]
    return whole, max(each)


def check_depth(result: Run, data: dict[str, torch.Tensor]) -> float:
    """Running sums after every layer and the final mixture at the recorded positions; sublayers where they are kept."""
    at = data["residual_positions"]
    errors = [bounded(result.mix[at], data["final_mix"], INNER_BOUND, "final mix")]
    for layer, wanted in enumerate(data["residual"]):
        errors.append(bounded(result.residuals[layer][at], wanted, INNER_BOUND, f"p after layer {layer}"))
    for name, values in (("attn_out", result.attention), ("ffn_out", result.mlp)):
        for layer, wanted in enumerate(data.get(name, ())):
            errors.append(bounded(values[layer], wanted, INNER_BOUND, f"{name} of layer {layer}"))
    return max(errors)


def check_states(result: Run, data: dict[str, torch.Tensor], config: ModelConfig) -> float:
    """Recurrent states, convolution tails and the last cached latents after the prompt."""
    errors = []
    layers = data["kda_layers_0based"].tolist()
    assert layers == sorted(config.kda_layers)
    for i, layer in enumerate(layers):
        errors.append(bounded(result.recurrent[layer], data["kda_state"][i], INNER_BOUND, f"state of layer {layer}"))
        # Ours is [tokens, q k v channels]; theirs [q k v, channels, tokens].
        tail = result.conv[layer].unflatten(1, (3, -1)).permute(1, 2, 0)
        errors.append(bounded(tail, data["conv_tail"][i], INNER_BOUND, f"tail of layer {layer}"))
    for i, layer in enumerate(config.mla_layers):
        rows = result.cache[layer][-8:]
        errors.append(bounded(rows, data["mla_latent_last8"][i], INNER_BOUND, f"cache of layer {layer}"))
    return max(errors)


def check_routing(result: Run, data: dict[str, torch.Tensor]) -> float:
    """The experts are the same sets, the weights agree; margins of the prompts leave no room for flips."""
    errors = []
    assert len(result.routing) == data["router_idx"].shape[0]
    for (ids, weights), wanted_ids, wanted in zip(
        result.routing, data["router_idx"], data["router_weights"], strict=True
    ):
        mine, theirs = ids.argsort(dim=-1), wanted_ids.argsort(dim=-1)
        assert torch.equal(ids.gather(-1, mine), wanted_ids.long().gather(-1, theirs)), "other experts"
        errors.append(bounded(weights.gather(-1, mine), wanted.gather(-1, theirs), INNER_BOUND, "weights"))
    return max(errors)


def check_greedy(runtime: Runtime, data: dict[str, torch.Tensor]) -> float:
    """Sixteen greedy tokens decoded with the cache: the logits of every step, and the same choices."""
    prompt, chosen = data["input_ids"].tolist(), data["greedy_ids"].tolist()
    result = run(runtime, [*prompt, *chosen[:-1]], [len(prompt), *([1] * (len(chosen) - 1))])
    logits = result.logits[len(prompt) - 1 :]
    assert logits.argmax(dim=-1).tolist() == chosen
    return check_logits(logits, data["greedy_logits"], "greedy")[0]
