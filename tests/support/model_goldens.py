"""Golden numbers of the two tiny models (prompt 1 5 9 2 77 100, inner norms at 1e-6), as printed in the specification."""

from __future__ import annotations

import torch
from model_runs import Run

PROMPT = (1, 5, 9, 2, 77, 100)
COLUMNS = [0, 1, 2, 3, 63, 64, 126, 127]
LOGITS_TOLERANCE = {torch.float64: 1.2e-6, torch.float32: 2e-5}
"""Absolute. Six decimals are printed, from float32 runs; float64 shows 9.6e-7, float32 up to 1.1e-5."""


def table(text: str) -> torch.Tensor:
    return torch.tensor([[float(word) for word in line.split()] for line in text.strip().splitlines()]).double()


# logits at COLUMNS, L2 norm, argmax, largest
K3_LOGITS = table("""
.883579 -.077328 -1.468424 .956282 1.798936 2.191612 -1.062699 .907685 12.158360 111 2.598272
-.888161 -.893797 2.733332 -.163689 .807104 1.112668 .908634 -.397142 12.362903 100 3.553400
.591928 -.746810 -1.118688 -.405151 -.561628 -.583166 -.431607 -.408647 13.502919 58 3.076171
-.014284 1.107211 1.916324 .713467 -.071424 -2.184540 .321846 -1.176188 12.615767 71 3.125707
-5.791285 -2.485581 .868825 -.221806 .277182 .126645 6.103769 -1.310754 16.160605 28 6.867608
-1.460586 -.245023 3.294985 -.389586 1.344201 .266838 1.552463 -.923754 13.251649 100 3.724424
""")
LINEAR_LOGITS = table("""
.230443 .865729 .669340 .328104 -.287238 .044664 -.331422 .937980 12.221306 115 3.019446
.650744 1.804130 -1.798450 -.462722 -1.457099 -.180377 -.249172 -1.004906 11.127876 60 2.391857
-1.379419 -1.857291 -.986709 .571398 -.133302 .086487 1.461059 -1.500865 12.165378 42 2.257188
1.024250 -.158754 .027087 -.895228 -1.179330 -.340101 -1.956417 -.404921 15.206172 75 3.109308
-2.071550 -1.264746 -.281785 .408339 1.279657 1.129882 .713025 -2.222311 13.420136 4 2.905728
.255214 -.705130 .774018 .353695 -1.252533 .098837 -1.410696 -.609634 11.091559 22 2.952211
""")
K3_RESIDUALS = table("""
10.615014 5.375821 13.002004 10.151835 26.892078 6.624283
25.546092 20.684578 17.869688 15.483813 28.030656 13.837700
14.332384 11.576912 10.546912 18.632373 11.255333 12.764537
12.856999 20.929431 16.854864 23.993296 17.437210 18.334027
""")
K3_MIX = table("21.762866 13.680192 10.073378 8.180690 5.413318 5.595893")[0]
K3_KDA_OUTPUT = table("""
4.574017 3.478634 4.170303 2.634034 3.330583 3.285338
4.252505 4.728658 4.785092 5.775888 3.321448 5.550902
3.758191 3.789948 4.879815 4.014353 5.115964 4.581107
""")
# Frobenius norm per head; S[head 0][v 0][k 0..2]; S[head 3][v 31][k 29..31]
K3_STATES = table("""
3.607048 1.547328 .898570 2.731005 .386879 -.120732 .815571 -.001982 -.012741 -.000021
1.581843 1.043258 1.014188 1.795392 .151465 -.054614 .337689 .002029 .193735 .025346
2.275867 2.033087 .549188 1.952111 -.010026 -.002271 .115267 .009491 -.016786 -.002678
""")
# channels 0, 1, 2 of the q stream in layer 0; tokens 3, 4, 5
K3_CONV_TAIL = table("""
.878589 4.463703 1.018004
1.591115 2.627070 .483151
-4.534901 -.673332 -5.961109
""")
K3_BETA = table(".653970 .808075 .173854 .569799")[0]
K3_LOG_DECAY = table("-.648120 -1.217035 -1.245051")[0]
K3_LATENT_NORMS = table("5.891078 5.876806 5.856574 5.882378 4.781666 5.782491")[0]
K3_LATENT_HEAD = table("1.030085 1.510859 -.836666")[0]
K3_KEY_NORMS = table("3.590403 2.471460 2.516243 2.662051 .537366 3.683012")[0]
K3_KEY_HEAD = table("-1.070081 1.624921 .461335")[0]
K3_EXPERTS = [
    [[1, 0], [5, 4], [1, 0], [0, 6], [6, 0], [0, 6]],
    [[1, 6], [2, 4], [3, 7], [4, 3], [0, 3], [4, 3]],
    [[1, 0], [5, 0], [1, 0], [1, 0], [6, 7], [0, 5]],
]
K3_WEIGHTS_LAYER_1 = table("""
.563388 .436612
.541858 .458142
.554938 .445062
.514234 .485766
.573895 .426105
.531021 .468979
""")
K3_WEIGHTS_LAYER_2_POSITION_1 = table(".499233 .500767")[0]


def near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> float:
    """Asserts equality within an absolute tolerance; returns the largest difference."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    worst = float((actual.double() - expected).abs().max())
    assert worst <= tolerance, f"{what}: off by {worst:.2e}, allowed {tolerance:.0e}"
    return worst


def check_logits(logits: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> float:
    """The whole logits table of a model; returns the largest difference."""
    tolerance = tolerance or LOGITS_TOLERANCE[logits.dtype]
    assert torch.isfinite(logits).all()
    assert logits.argmax(dim=-1).tolist() == expected[:, 9].long().tolist(), "argmax"
    parts = (
        near(logits[:, COLUMNS], expected[:, :8], tolerance, "logits"),
        near(logits.amax(dim=-1), expected[:, 10], tolerance, "largest logit"),
        near(logits.double().norm(dim=-1), expected[:, 8], 2 * tolerance, "L2 norm of the logits"),
    )
    return max(parts)


def check_k3_logits(run: Run) -> float:
    return check_logits(run.logits, K3_LOGITS)


def check_linear_logits(run: Run) -> float:
    return check_logits(run.logits, LINEAR_LOGITS)


def check_k3_depth(run: Run) -> None:
    """Running sums, the final mix and the KDA outputs: where a fault in depth begins."""
    for layer in range(4):
        near(run.residuals[layer].double().norm(dim=-1), K3_RESIDUALS[layer], 4e-5, f"p after layer {layer}")
    near(run.mix.double().norm(dim=-1), K3_MIX, 4e-5, "final mix")
    for layer in range(3):
        near(run.attention[layer].double().norm(dim=-1), K3_KDA_OUTPUT[layer], 1e-5, f"KDA output of layer {layer}")


def check_k3_states(run: Run) -> None:
    for layer in range(3):
        state, expected = run.recurrent[layer].double(), K3_STATES[layer]
        near(state.flatten(1).norm(dim=-1), expected[:4], 5e-6, f"state norms of layer {layer}")
        near(state[0, 0, :3], expected[4:7], 3e-6, f"state of layer {layer}, head 0")
        near(state[3, 31, 29:], expected[7:], 3e-6, f"state of layer {layer}, head 3")


def check_k3_conv_tail(run: Run) -> None:
    near(run.conv[0][:, :3].T, K3_CONV_TAIL, 5e-6, "convolution tail: channels by tokens, oldest first")


def check_k3_cache(run: Run) -> None:
    latent, key = run.cache[3].double().split((32, 8), dim=-1)
    near(latent.norm(dim=-1), K3_LATENT_NORMS, 1e-5, "L2 of the latents")
    near(latent[0, :3], K3_LATENT_HEAD, 5e-6, "latent of token 0")
    near(key.norm(dim=-1), K3_KEY_NORMS, 1e-5, "L2 of the shared keys")
    near(key[0, :3], K3_KEY_HEAD, 5e-6, "shared key of token 0")


def check_k3_routing(run: Run) -> None:
    assert len(run.routing) == 3
    for layer, (ids, _) in enumerate(run.routing):
        assert ids.tolist() == K3_EXPERTS[layer], f"experts of MoE layer {layer}"
    near(run.routing[0][1], K3_WEIGHTS_LAYER_1, 2e-6, "weights of layer 1")
    # The order is that of the biased scores, not of the weights.
    near(run.routing[1][1][1], K3_WEIGHTS_LAYER_2_POSITION_1, 2e-6, "weights of layer 2 at position 1")
    for _, weights in run.routing:
        near(weights.double().sum(dim=-1), torch.ones(6).double(), 1e-6, "sums of weights")


K3_CHECKS = {
    "logits": check_k3_logits,
    "depth": check_k3_depth,
    "states": check_k3_states,
    "convolution tail": check_k3_conv_tail,
    "cache": check_k3_cache,
    "routing": check_k3_routing,
}
