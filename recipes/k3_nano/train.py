"""Train k3-nano against the clock on one GPU.

Usage: ``python train.py --data DIR --tokenizer DIR --out DIR --minutes 9 --total-minutes 18 [--resume DIR]``.
``--data`` holds ``train.txt.xz`` and ``heldout.txt.xz`` (see data.py). The learning rate follows the share of
``--total-minutes`` used so far, so a run that is resumed ends decayed whatever the speed. Writes
``master-*.safetensors`` (bfloat16, experts float32, each file under 16 MiB), ``progress.json`` and ``loss.csv``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from export import load_tensors, model_tensors
from model import Config, K3Nano, Run, compile_pieces, mix_norm
from optim import Optimiser
from tokenizer import BOS, END, load

_ENCODING = None


def _start(path: Path) -> None:
    global _ENCODING
    _ENCODING = load(path)


def _encode(texts: list[str]) -> list[np.ndarray]:
    return [np.array([BOS, *_ENCODING.encode_ordinary(t), END], dtype=np.uint16) for t in texts]


def read_documents(path: Path) -> list[str]:
    """Texts of a NUL-separated file, ``.xz`` or plain."""
    raw = (
        path.read_bytes()
        if path.exists()
        else subprocess.run(["xz", "-dc", "-T0", f"{path}.xz"], capture_output=True, check=True).stdout
    )
    return raw.decode().split("\0")


def tokenise(path: Path, tokenizer: Path, workers: int, limit: int | None = None) -> list[np.ndarray]:
    """Token arrays of all documents: ``[BOS] text <|end_of_msg|>``; kept in ``/tmp`` for a second run."""
    cache = Path(f"/tmp/k3-nano-{path.stem}-{limit}.npz")
    if cache.exists():
        saved = np.load(cache)
        return np.split(saved["ids"], saved["cuts"])
    texts = read_documents(path)[:limit]
    batches = [texts[i : i + 64] for i in range(0, len(texts), 64)]
    with ProcessPoolExecutor(workers, initializer=_start, initargs=(tokenizer / "tiktoken.model",)) as pool:
        documents = [ids for part in pool.map(_encode, batches) for ids in part]
    np.savez(cache, ids=np.concatenate(documents), cuts=np.cumsum([len(d) for d in documents])[:-1])
    return documents


class Batches:
    """Endless rows of ``length + 1`` tokens: documents shuffled and joined anew in each epoch."""

    def __init__(self, documents: list[np.ndarray], rows: int, length: int, device: str, seed: int) -> None:
        self.documents, self.rows, self.length, self.device = documents, rows, length, device
        self.random = np.random.default_rng(seed)
        self.epoch = 0
        self._begin()

    def _begin(self) -> None:
        stream = np.concatenate([self.documents[i] for i in self.random.permutation(len(self.documents))])
        offset = int(self.random.integers(0, self.length))
        count = (len(stream) - offset - 1) // self.length
        self.stream = torch.from_numpy(stream.astype(np.int16)).to(self.device)
        starts = offset + self.random.permutation(count) * self.length
        self.starts = torch.from_numpy(starts).to(self.device)
        self.arange = torch.arange(self.length + 1, device=self.device)
        self.position = 0
        self.epoch += 1

    def next(self) -> torch.Tensor:
        """Ids ``[rows, length + 1]`` (int64)."""
        if self.position + self.rows > len(self.starts):
            self._begin()
        starts = self.starts[self.position : self.position + self.rows]
        self.position += self.rows
        return self.stream[starts.unsqueeze(1) + self.arange].long()


def balance(model: K3Nano, rate: float) -> torch.Tensor:
    """Router bias step (sign rule, no auxiliary loss); returns the largest load relative to the mean."""
    worst = []
    for layer, load_ in model.loads.items():
        mean = load_.float().mean()
        model.bias(layer).add_(torch.sign(mean - load_), alpha=rate)
        worst.append(load_.max() / mean)
    return torch.stack(worst).max()


class GraphedStep:
    """Forward and backward captured in a CUDA graph: without it launching kernels takes longer than running them.

    Gradients live in the graph's memory and are overwritten by each replay, so nobody may reset them.
    """

    def __init__(self, model: K3Nano, run: Run, example: torch.Tensor) -> None:
        self.ids = example.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                model.loss(self.ids, run).backward()
        torch.cuda.current_stream().wait_stream(stream)
        model.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = model.loss(self.ids, run)
            self.loss.backward()
        self.loads = dict(model.loads)

    def __call__(self, model: K3Nano, ids: torch.Tensor) -> torch.Tensor:
        """Loss of a batch; gradients are left in ``.grad``."""
        self.ids.copy_(ids)
        self.graph.replay()
        model.loads = self.loads
        return self.loss.detach().clone()


def verify_mix(run: Run, config: Config, rows: int, length: int) -> None:
    """Compare gradients of the compiled AttnRes mixture with eager ones; on a mismatch it stays eager."""
    gamma, weight = torch.ones(config.hidden, device="cuda"), torch.ones(config.hidden, device="cuda")
    proj = torch.randn(1, config.hidden, device="cuda") * 0.1
    base = torch.randn(config.layers // config.block + 2, rows, length, config.hidden, device="cuda").bfloat16()
    upstream = torch.randn_like(base[0])
    for count in range(2, len(base) + 1):
        results = []
        for function in (run.compiled["mix_norm"], mix_norm):
            sources = tuple(b.clone().requires_grad_() for b in base[:count])
            leaves = [p.clone().requires_grad_() for p in (gamma, proj, weight)]
            function(sources, *leaves, config.eps).backward(upstream)
            results.append(torch.cat([x.grad.float().flatten() for x in (*sources, *leaves)]))
        error = ((results[0] - results[1]).norm() / results[1].norm()).item()
        print(f"AttnRes with {count} sources: gradient difference {error:.1e}")
        if not error < 0.02:
            del run.compiled["mix_norm"]
            return


def eager_step(model: K3Nano, run: Run, ids: torch.Tensor) -> torch.Tensor:
    """Loss and gradients without a graph (CPU tests)."""
    model.zero_grad(set_to_none=True)
    loss = model.loss(ids, run)
    loss.backward()
    return loss.detach()


def heldout_bits(
    model: K3Nano, run: Run, documents: list[np.ndarray], size: int, rows: int, length: int, device: str
) -> float:
    """Bits per byte over the joined held-out documents in rows of ``length`` (a quick monitor).

    Gradients stay enabled so that the compiled pieces of training serve here too.
    """
    stream = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    count = (len(stream) - 1) // length // rows * rows
    total = 0.0
    for i in range(0, count, rows):
        ids = torch.stack([stream[(i + j) * length : (i + j + 1) * length + 1] for j in range(rows)]).to(device)
        total += model.loss(ids, run).item() * rows * length
    return total / (count * length) * len(stream) / size / math.log(2)


def save_parts(model: K3Nano, out: Path, limit: int = 15_500_000) -> None:
    """Master weights in files below ``limit`` bytes: what the forward pass used, experts before rounding."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    used = 0
    for name, tensor in model_tensors(model).items():
        keep = ".experts." in name or tensor.ndim == 1 or name.endswith(("conv1d.weight", "A_log"))
        tensor = (tensor.float() if keep else tensor.to(torch.bfloat16)).contiguous()
        size = tensor.numel() * tensor.element_size()
        if used + size > limit:
            parts.append({})
            used = 0
        parts[-1][name] = tensor
        used += size
    for i, part in enumerate(parts):
        save_file(part, out / f"master-{i}.safetensors")


def factor(done: float, step: int, warmup: int = 150) -> float:
    """Learning-rate factor: short warm-up, flat for a tenth of the time, then linear to zero."""
    return min(1.0, (step + 1) / warmup) * min(1.0, max(0.0, (1.0 - done) / 0.9))


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="folder with master-*.safetensors and progress.json")
    parser.add_argument("--exact", type=Path, help="file for the exact state, used when it exists")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--total-minutes", type=float, default=9.0)
    parser.add_argument("--steps", type=int, default=10**9, help="stop early (for tests)")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--muon-lr", type=float, default=3e-3)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--quantise-from", type=float, default=0.72)
    parser.add_argument("--limit", type=int, help="number of documents (for tests)")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--eager", default="", help="names of pieces not to compile, comma separated")
    parser.add_argument("--constant", action="store_true", help="no decay (for tests)")
    parser.add_argument("--abort-above", type=float, default=1e9, help="give up when the loss at step 600 is higher")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = args.device == "cuda"
    torch.manual_seed(1)
    config = Config()
    model = K3Nano(config).to(args.device)
    run = Run(mode="fla" if gpu else "chunk", dtype=torch.bfloat16 if gpu else torch.float32)
    if gpu:
        from fla_setup import pin_configurations

        print(pin_configurations())
        compile_pieces(run, tuple(args.eager.split(",")))
        if "mix_norm" in run.compiled:
            verify_mix(run, config, args.rows, args.length)
    documents = tokenise(args.data / "train.txt", args.tokenizer, args.workers, args.limit)
    heldout = tokenise(args.data / "heldout.txt", args.tokenizer, args.workers, args.limit)
    size = sum(len(t.encode()) for t in read_documents(args.data / "heldout.txt")[: args.limit])
    print(f"{len(documents)} documents, {sum(map(len, documents)) / 1e6:.1f} M tokens, {time.time() - began:.0f} s")
    optimiser = Optimiser(model.named(), args.muon_lr, args.adam_lr, args.decay)
    progress = {"minutes": 0.0, "step": 0, "tokens": 0}
    fresh = 0  # steps since the optimiser state began, for the warm-up
    if args.exact and args.exact.exists():
        saved = torch.load(args.exact, map_location=args.device, weights_only=True)
        load_tensors(model, saved["tensors"])
        optimiser.restore(saved["optimiser"])
        progress, fresh = saved["progress"], 10**6
    elif args.resume:
        for file in sorted(args.resume.glob("master-*.safetensors")):
            load_tensors(model, load_file(file))
        progress = json.loads((args.resume / "progress.json").read_text())
    print("start", progress)
    batches = Batches(documents, args.rows, args.length, args.device, seed=7 + progress["step"])
    log = open(args.out / "loss.csv", "w", newline="")  # noqa: SIM115
    writer = csv.writer(log)
    writer.writerow(["step", "tokens", "share", "lr_factor", "loss", "grad_norm", "max_load", "tokens_per_s"])
    start_minutes, start_step = progress["minutes"], progress["step"]
    window, clock = [], time.time()
    graphs: dict[bool, GraphedStep] = {}
    while progress["step"] - start_step < args.steps:
        # The clock counts from the start of the program: loading and compiling are part of the budget.
        minutes = (time.time() - began) / 60
        if minutes >= args.minutes:
            break
        done = (start_minutes + minutes) / args.total_minutes
        run.quantise = done >= args.quantise_from
        rate = factor(0.0 if args.constant else done, fresh)
        ids = batches.next()
        if gpu and run.quantise not in graphs:
            graphs.clear()
            graphs[run.quantise] = GraphedStep(model, run, ids)
        loss = graphs[run.quantise](model, ids) if gpu else eager_step(model, run, ids)
        norm = optimiser.step(rate)
        worst = balance(model, 4e-3 * max(0.0, 1 - done))
        window.append(loss)
        fresh += 1
        progress["step"] += 1
        progress["tokens"] += args.rows * args.length
        if progress["step"] % 20 == 0:
            mean = torch.stack(window).mean().item()
            speed = len(window) * args.rows * args.length / (time.time() - clock)
            window, clock = [], time.time()
            writer.writerow(
                [
                    progress["step"],
                    progress["tokens"],
                    f"{done:.4f}",
                    f"{rate:.4f}",
                    f"{mean:.4f}",
                    f"{norm.item():.3f}",
                    f"{worst.item():.2f}",
                    f"{speed:.0f}",
                ]
            )
            if progress["step"] == 600 and not mean < args.abort_above:
                raise SystemExit(f"loss {mean} at step 600")
            if progress["step"] % 200 == 0 or args.steps < 1000:
                log.flush()
                print(
                    f"step {progress['step']} share {done:.3f} loss {mean:.4f} norm {norm.item():.2f} "
                    f"load {worst.item():.2f} {speed / 1e3:.0f} k tok/s epoch {batches.epoch}"
                )
    progress["minutes"] = start_minutes + (time.time() - began) / 60
    log.close()
    for quantise in (False, True):
        run.quantise = quantise
        bits = heldout_bits(model, run, heldout, size, args.rows, args.length, args.device)
        progress["bpb_mxfp4" if quantise else "bpb_unrounded"] = bits
    (args.out / "progress.json").write_text(json.dumps(progress))
    save_parts(model, args.out)
    if args.exact:
        torch.save({"tensors": model_tensors(model), "optimiser": optimiser.state(), "progress": progress}, args.exact)
    print("end", progress, f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if gpu else "")


if __name__ == "__main__":
    main()
