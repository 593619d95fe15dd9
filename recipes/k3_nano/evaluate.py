"""Measure a k3-nano checkpoint: bits per byte, ``xz -9e`` on the same text, cost of MXFP4, verbatim spans.

Usage: ``python evaluate.py --checkpoint DIR --data DIR [--master FILE ...] [--backend module:factory]``.

A backend is any object with two methods, so that another runtime can be measured with the same script:
``logprobs(ids) -> log-probabilities (nats) of ids[1:]``, and ``sample(prompts, tokens, temperature, top_p, seed)
-> new ids per prompt`` (all prompts have the same length). ``factory(checkpoint_dir)`` returns one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tiktoken
import torch
from safetensors.torch import load_file

from export import load_tensors, read_checkpoint
from model import Config, K3Nano, Run
from tokenizer import BOS, END, RANKS, load

SPAN = 50


class Backend(Protocol):
    """What is measured."""

    def logprobs(self, ids: Sequence[int]) -> Sequence[float]:
        """Natural log probabilities of ``ids[1:]`` given everything before."""

    def sample(
        self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        """``tokens`` new ids for each prompt."""


class NanoBackend:
    """The float32 PyTorch module of this folder."""

    def __init__(self, model: K3Nano) -> None:
        self.model = model.eval()
        self.run = Run(sparse=True)

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int]) -> list[float]:
        """See :class:`Backend`."""
        tensor = torch.tensor([list(ids)])
        logp = self.model.logits(tensor[:, :-1], self.run).log_softmax(-1)
        return logp.gather(-1, tensor[:, 1:, None])[0, :, 0].tolist()

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Sequence[int]], tokens: int, temperature: float, top_p: float, seed: int
    ) -> list[list[int]]:
        """See :class:`Backend`; nucleus sampling, most likely tokens first until ``top_p`` is reached."""
        generator = torch.Generator().manual_seed(seed)
        state, ids = self.model.new_state(), torch.tensor([list(p) for p in prompts])
        out = []
        for _ in range(tokens):
            p = (self.model.logits(ids, self.run, state)[:, -1] / temperature).softmax(-1)
            ranked, order = p.sort(descending=True)
            ranked[ranked.cumsum(-1) - ranked >= top_p] = 0.0
            ids = order.gather(-1, torch.multinomial(ranked, 1, generator=generator))
            out.append(ids)
        return torch.cat(out, dim=1).tolist()


def own_backend(folder: Path) -> NanoBackend:
    """Backend for an exported checkpoint."""
    return NanoBackend(read_checkpoint(folder))


def master_backend(files: Sequence[Path]) -> NanoBackend:
    """The same weights with experts as they were before MXFP4 rounding."""
    model = K3Nano(Config())
    for file in files:
        load_tensors(model, load_file(file))
    return NanoBackend(model)


def total_bits(backend: Backend, encoding: tiktoken.Encoding, texts: Sequence[str], context: int) -> tuple[float, int]:
    """Bits and number of tokens of all documents, each as ``[BOS] text <|end_of_msg|>`` (BOS is given, not counted).

    Longer documents are cut into windows of ``context`` tokens; each window starts from nothing but its first token,
    which the window before has paid for.
    """
    bits, count = 0.0, 0
    for text in texts:
        ids = [BOS, *encoding.encode_ordinary(text), END]
        for start in range(0, len(ids) - 1, context):
            window = ids[start : start + context + 1]
            bits -= sum(backend.logprobs(window)) / math.log(2)
            count += len(window) - 1
    return bits, count


def window_hashes(data: np.ndarray, span: int = SPAN) -> np.ndarray:
    """A 64-bit polynomial hash of every window of ``span`` bytes (arithmetic modulo 2^64)."""
    base = np.uint64(0x9E3779B97F4A7C15)
    n = len(data)
    if n < span:
        return np.empty(0, np.uint64)
    # hash_i = sum_j data[i + j] * base^(span - 1 - j), by Horner's rule over the span.
    out = np.zeros(n - span + 1, np.uint64)
    for j in range(span):
        out *= base
        out += data[j : j + len(out)]
    return out


def verbatim_share(samples: Sequence[str], train: Path) -> tuple[float, int]:
    """Share of all 50-byte spans of the samples that occur in the training text, and the number of spans."""
    hashes = [window_hashes(np.frombuffer(s.encode(), np.uint8).astype(np.uint64)) for s in samples]
    wanted = np.unique(np.concatenate(hashes))
    seen = np.zeros(len(wanted), bool)
    corpus = np.memmap(train, np.uint8, "r")
    step = 4_000_000
    for start in range(0, len(corpus), step):
        found = window_hashes(np.asarray(corpus[start : start + step + SPAN - 1]).astype(np.uint64))
        where = np.searchsorted(wanted, found)
        where[where == len(wanted)] = 0
        seen[where[wanted[where] == found]] = True
    total = sum(map(len, hashes))
    return sum(int(seen[np.searchsorted(wanted, h)].sum()) for h in hashes) / total, total


def draw_samples(
    backend: Backend,
    encoding: tiktoken.Encoding,
    texts: Sequence[str],
    count: int,
    tokens: int,
    temperature: float,
    seed: int,
) -> list[tuple[str, str]]:
    """(prompt, continuation): half of the prompts are the first 12 tokens of held-out documents, half only BOS."""
    starts = [[BOS, *encoding.encode_ordinary(t[:400])[:12]] for t in texts]
    starts = [s for s in starts if len(s) == 13][: count // 2]
    pairs = []
    for group in (starts, [[BOS]] * (count - len(starts))):
        for i in range(0, len(group), 50):
            part = group[i : i + 50]
            for prompt, ids in zip(part, backend.sample(part, tokens, temperature, 0.95, seed + i), strict=True):
                # A finished document is followed by the next one; control tokens become a line break.
                text = b"".join(encoding.decode_single_token_bytes(t) if t < RANKS else b"\n" for t in ids)
                pairs.append((encoding.decode(prompt[1:]), text.decode("utf-8", "replace")))
    return pairs


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.txt and heldout.txt")
    parser.add_argument("--master", type=Path, nargs="*", default=[], help="weights before MXFP4 rounding")
    parser.add_argument("--backend", help="module:factory of another runtime")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--limit", type=int, help="number of held-out documents (for quick looks)")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--sample-tokens", type=int, default=180)
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    args = parser.parse_args()
    encoding = load(args.checkpoint / "tiktoken.model")
    texts = (args.data / "heldout.txt").read_text().split("\0")[: args.limit]
    data = "\0".join(texts).encode()
    packed = subprocess.run(["xz", "-9e", "-c"], input=data, capture_output=True, check=True).stdout
    results: dict[str, object] = {
        "heldout_bytes": len(data),
        "heldout_documents": len(texts),
        "context": args.context,
        "xz_bits_per_byte": 8 * len(packed) / len(data),
    }
    if args.backend:
        module, factory = args.backend.split(":")
        backend: Backend = getattr(importlib.import_module(module), factory)(args.checkpoint)
    else:
        backend = own_backend(args.checkpoint)
    began = time.time()
    bits, count = total_bits(backend, encoding, texts, args.context)
    results |= {"bits_per_byte": bits / len(data), "tokens": count, "seconds": round(time.time() - began, 1)}
    results["below_xz"] = 1 - results["bits_per_byte"] / results["xz_bits_per_byte"]
    print(json.dumps(results), flush=True)
    if args.master:
        unrounded, _ = total_bits(master_backend(args.master), encoding, texts, args.context)
        results["bits_per_byte_unrounded"] = unrounded / len(data)
        results["mxfp4_perplexity_cost"] = 2 ** ((bits - unrounded) / count) - 1
    if args.samples:
        pairs = draw_samples(backend, encoding, texts, args.samples, args.sample_tokens, args.temperature, 1)
        results["sample_count"], results["temperature"] = len(pairs), args.temperature
        results["sample_mean_characters"] = sum(len(t) for _, t in pairs) / len(pairs)
        share, spans = verbatim_share([t for _, t in pairs], args.data / "train.txt")
        results |= {"verbatim_share": share, "verbatim_spans": spans}
        args.out.with_suffix(".samples.json").write_text(json.dumps(pairs, indent=1))
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
